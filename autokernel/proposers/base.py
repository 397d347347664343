"""The proposer protocol: one method, asked once per round of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import Experiment, Task, Verdict

if TYPE_CHECKING:
    from autokernel.proposers.reflection import Reflection


@dataclass
class TaskState:
    """What is known of a task when a proposer is asked.

    ``current`` is the source of kernel.py (the best so far, or the starter), ``current_latency_us`` its
    time where it has one, ``ahead`` whether it already beats every baseline.  ``history`` are the rows of
    this task, ``recall`` what memory has to say on its family, ``baselines`` latencies in µs by name.
    ``verdicts`` are this process's, by candidate: they know more than their rows (stages, the worker's log).
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
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def attempts(self) -> int:
        """Rows of this task that somebody's proposal led to."""
        return sum(1 for row in self.history if row.status != "baseline")

    @property
    def times_us(self) -> list[float]:
        """Of whatever has been timed and may be the one to beat."""
        current = [] if self.current_latency_us is None else [self.current_latency_us]
        return [*self.baselines.values(), *current]


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


@runtime_checkable
class Learner(Protocol):
    """A proposer that has something to say of the verdict on its own proposal.

    ``row`` is what is about to be written; ``state`` is what the proposal was made from.  What learning costs
    is added to ``proposal``, so that it is in that row.
    """

    def learn(self, state: TaskState, proposal: Proposal, row: Experiment) -> Reflection | None: ...
