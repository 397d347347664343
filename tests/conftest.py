"""One judge per device for all test files that don't need one of their own: starting one takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from autokernel.judge import Judge

PLANTED = ("OPENAI_API_KEY", "AUTOKERNEL_REDTEAM_KEY")
"""Secrets in this process's environment while a judge starts; tests look for them in the workers."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what tests marked ``beside`` will wait for: minutes of compiling, done while nothing is timed."""
    if session.config.option.collectonly:
        return
    for item in session.items:
        if marker := item.get_closest_marker("beside"):
            marker.args[0]()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own is the same in every run, alone or after others."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def judge_of() -> Iterator[Callable[[str], Judge]]:
    from autokernel.judge import Judge
    from autokernel.judge.handle import Worker

    judges: dict[str, Judge] = {}
    with ExitStack() as stack:

        def get(device: str) -> Judge:
            if device not in judges:
                with pytest.MonkeyPatch.context() as patch:
                    for name in PLANTED:
                        patch.setenv(name, "planted")
                    judges[device] = stack.enter_context(Judge(device))
                    Worker(judges[device].launcher, kind="kernel").close()  # started with that environment
            return judges[device]

        yield get


@pytest.fixture(scope="session")
def cpu_judge(judge_of: Callable[[str], Judge]) -> Judge:
    return judge_of("cpu")


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For verdicts whose times matter to nobody: a fifth of the rounds."""
    from autokernel.judge.stages import timing

    for tier in timing.ROUNDS:
        monkeypatch.setitem(timing.ROUNDS, tier, 20)
