"""What this run already knows: a readable recall over its own journal, and what proposers made of it.

Recall is by family and mechanism (the strategy tags), never by hash alone, so that what was learned on one
region is told about the next one of its kind.  The reflections lie beside the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel.proposers import reflection
from autokernel.proposers.reflection import Reflection
from autokernel.records import Experiment, Task
from autokernel.scheduler import REPAIR
from autokernel.tuner import POINT

_FAILED = ("incorrect", "compile_error", "crash", "timeout", "rejected")


@dataclass(frozen=True, slots=True)
class Memory:
    """One mechanism on one family: how often it was tried, how often kept, and how it went at best."""

    family: str
    strategy: str
    tried: int
    kept: int
    best_speedup: float | None
    failure: str

    @property
    def outcome(self) -> str:
        if self.kept:
            return "positive"
        return "negative" if self.best_speedup is not None else "rejected"

    def __str__(self) -> str:
        text = f"{self.strategy}: {self.outcome}, kept {self.kept} of {self.tried}"
        if self.best_speedup is not None:
            text += f", at best {self.best_speedup:.2f}× the best baseline"
        if self.failure:
            text += f"; failed with: {self.failure}"
        return text


def recall(rows: Sequence[Experiment], task: Task) -> list[Memory]:
    """What was tried on tasks of ``task``'s family in these rows, best first.

    Baselines, starters, points of a search and infra errors say nothing about a mechanism and are left out.
    """
    groups: dict[str, list[Experiment]] = {}
    for row in rows:
        if row.kernel_type != task.family or row.status in ("baseline", "infra_error"):
            continue
        if (
            row.task != "model"
            and row.strategy not in ("", "starter")
            and POINT not in row.strategy.split(",")
        ):
            plan = ",".join(tag for tag in row.strategy.split(",") if tag != REPAIR)
            groups.setdefault(plan or row.strategy, []).append(row)
    memories = [_summary(task.family, strategy, group) for strategy, group in groups.items()]
    return sorted(memories, key=lambda m: -(m.best_speedup or 0.0))


def _summary(family: str, strategy: str, rows: Sequence[Experiment]) -> Memory:
    speedups = [r.speedup_vs_best_baseline for r in rows if r.speedup_vs_best_baseline is not None]
    failures = [f"{r.status}: {r.reason}" for r in rows if r.status in _FAILED]
    return Memory(
        family=family,
        strategy=strategy,
        tried=len(rows),
        kept=sum(r.status == "keep" for r in rows),
        best_speedup=max(speedups, default=None),
        failure=failures[-1][:200] if failures else "",
    )


def reflections(run: Path, task: Task) -> list[Reflection]:
    """What proposers made of verdicts on ``task``, and then on others of its family; the newest first."""
    return reflection.relevant(reflection.load(run), task)


def remember(run: Path, one: Reflection) -> None:
    """Raises RunFolderError when the disk refuses it."""
    reflection.store(run, one)


def describe(memories: Sequence[Memory], lessons: Sequence[Reflection] = (), limit: int = 8) -> str:
    """The recall as lines for a prompt or a person; empty when there is nothing to say."""
    lines = [f"- {m}" for m in memories[:limit]]
    if lessons:
        lines += ["What was made of earlier verdicts, the nearest first:", *(f"- {one}" for one in lessons)]
    return "\n".join(lines)
