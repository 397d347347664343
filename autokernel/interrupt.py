"""Ctrl-C (and SIGTERM) while rows are being written: the first one ends the run after the current row, the
second one at once.  Outside of `Interrupt`'s block the signals do what they always do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """``with Interrupt(say) as interrupt:`` ... ``interrupt.requested``; ``say`` is told of the first."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.requested = False
        self._say = say
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("Stopping after this row (again to stop at once) …")

    def check(self) -> None:
        """Between rows: raises KeyboardInterrupt when one was asked for."""
        if self.requested:
            raise KeyboardInterrupt
