"""The proposer protocol: one method, asked once per round of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import Experiment, Task


@dataclass
class TaskState:
    """What is known of a task when a proposer is asked.

    ``current`` is the source of kernel.py (the best so far, or the starter), ``current_latency_us`` its
    time where it has one, ``ahead`` whether it already beats every baseline.  ``history`` are the rows of
    this task, ``recall`` what memory has to say on its family, ``baselines`` latencies in µs by name.
    """

    task: Task
    reference: str
    current: str
    current_latency_us: float | None = None
    ahead: bool = False
    baselines: dict[str, float] = field(default_factory=dict)
    history: Sequence[Experiment] = ()
    tried: frozenset[str] = frozenset()
    recall: str = ""


class Proposer(Protocol):
    """``name`` goes into the journal's ``proposer`` column.

    ``patience`` is after how many rounds in a row without a keep the loop stops asking it; None for one
    that ends by itself.  ``propose`` returns None when it has nothing (more) to say about this task.
    """

    @property
    def name(self) -> str: ...

    @property
    def patience(self) -> int | None: ...

    def propose(self, state: TaskState) -> Proposal | Failure | None: ...
