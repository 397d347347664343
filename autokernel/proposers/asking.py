"""One question to a provider, until there is an answer or a reason to give up.

    the prompt is too long         trimmed, and asked again                  `prompt.MAX_TRIM` times
    the limits of the run          nothing is sent
    quota, rate, server, network   a pause, longer each time, and again      `PAUSES_S`
    key, model                     given up for good

A request that was answered before a kill is not sent again: see `autokernel.proposers.transcript`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autokernel.proposers.prompt import MAX_TRIM
from autokernel.proposers.provider import Provider, ProviderError, Reply, Request
from autokernel.proposers.spending import Spending
from autokernel.proposers.transcript import Purpose, Transcript

PAUSES_S = (30, 60, 120, 240, 480)
MAX_PAUSED_S = 3600
"""Seconds before each further try of one request, and of all pauses of a run."""
WAITED_FOR = frozenset({"quota", "rate", "server", "connection"})
_SLICE_S = 5


class NoAnswer(Exception):
    """``final``: this provider needn't be asked anything more in this run; ``overflow``: not on this task;
    ``unsent``: the limits of the run forbade it."""

    def __init__(
        self, reason: str, *, final: bool = False, overflow: bool = False, unsent: bool = False
    ) -> None:
        super().__init__(reason)
        self.final, self.overflow, self.unsent = final, overflow, unsent


@dataclass
class Cost:
    """What the exchanges of one round came to; None where nothing was reported."""

    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None
    model: str = ""
    seconds: float = 0.0

    def add(self, reply: Reply) -> None:
        if reply.tokens_in is not None:
            self.tokens_in = (self.tokens_in or 0) + reply.tokens_in
        if reply.tokens_out is not None:
            self.tokens_out = (self.tokens_out or 0) + reply.tokens_out
        if reply.cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + reply.cost_usd
        self.model = reply.model or self.model


@dataclass
class Asker:
    """``stop`` ends a pause early; ``say`` is told of every pause.  ``sleep`` takes seconds."""

    provider: Provider
    spending: Spending
    transcript: Transcript
    say: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False
    sleep: Callable[[float], None] = time.sleep
    _trims: dict[str, int] = field(default_factory=dict, repr=False)
    _paused_s: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        # The journal's rows have been counted: what the transcript knows beyond them was lost in a kill.
        tokens, usd = self.transcript.totals()
        lost = tokens - self.spending.tokens
        if lost > 0:
            self.spending.add(lost, 0, None if usd is None else max(usd - self.spending.usd, 0.0))

    def ask(
        self,
        request_at: Callable[[int], Request],
        cost: Cost,
        *,
        task: str,
        purpose: Purpose,
        attempt: int,
        patient: bool = True,
    ) -> Reply | None:
        """The answer, its cost added to ``cost``; None where the provider has no more to say.

        ``request_at(trim)`` is the request with that much left out.  Raises NoAnswer.
        """
        if earlier := self.transcript.unspent(task, purpose, attempt):
            cost.add(earlier)  # the run's spending has it already
            return earlier
        pauses: list[int] = [*PAUSES_S] if patient else []
        while True:
            request = request_at(self._trims.get(task, 0))
            if why := self.spending.refuses(request):
                raise NoAnswer(why, final=True, unsent=True)
            begin = time.monotonic()
            try:
                reply = self.provider.complete(request)
            except ProviderError as error:
                cost.seconds += time.monotonic() - begin
                self.transcript.record(task, purpose, attempt, request, error, time.monotonic() - begin)
                if error.lost is not None:
                    self._count(error.lost, cost)
                self._after(error, task, pauses, patient)
                continue
            cost.seconds += time.monotonic() - begin
            if reply is not None:
                self.transcript.record(task, purpose, attempt, request, reply, time.monotonic() - begin)
                self._count(reply, cost)
            return reply

    def _count(self, reply: Reply, cost: Cost) -> None:
        cost.add(reply)
        self.spending.add(reply.tokens_in, reply.tokens_out, reply.cost_usd, reply.tokens_cached)

    def _after(self, error: ProviderError, task: str, pauses: list[int], patient: bool) -> None:
        """Returns when the request should be sent again, with more left out or after a pause."""
        if error.kind == "overflow":
            if self._trims.get(task, 0) >= MAX_TRIM:
                raise NoAnswer(f"{error} (nothing more can be left out)", overflow=True) from None
            self._trims[task] = self._trims.get(task, 0) + 1
            return
        if error.final or error.kind not in WAITED_FOR or not patient:
            raise NoAnswer(str(error), final=error.final) from None
        if not pauses or self._paused_s + pauses[0] > MAX_PAUSED_S:
            raise NoAnswer(f"{error} (still, after {self._paused_s:.0f} s of waiting)", final=True) from None
        self._pause(pauses.pop(0), error)

    def _pause(self, seconds: int, error: ProviderError) -> None:
        if self.provider.name == "replay":
            return  # a recording isn't waited for
        self.say(f"{self.provider.name}: {error}; asked again in {seconds} s")
        self._paused_s += seconds
        for _ in range(0, seconds, _SLICE_S):
            if self.stop():
                raise NoAnswer(f"{error} (the wait was interrupted)") from None
            self.sleep(min(_SLICE_S, seconds))
