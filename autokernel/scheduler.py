"""Which task next, how much of it, when not to bother, and when to stop.

"Don't bother" is said before tokens are spent: a region that is near its roofline has nothing to give, and
one that is a sliver of the model can't matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autokernel.records import Experiment, Task

NEAR_ROOFLINE = 1.10
"""A kernel within 10 % of its roofline time is finished."""
MIN_SHARE = 0.005
"""A task with less of the model's time than this is left alone."""

REPAIR = "repair"
"""The strategy tag of a row that is a further implementation of a plan whose last one failed."""
REPAIRABLE = frozenset({"compile_error", "crash", "incorrect"})
MAX_REPAIRS = 2

Effort = Literal["full", "starter", "skip"]


@dataclass(frozen=True, slots=True)
class Plan:
    """``effort``: the whole loop, only its starter judged, or nothing.  ``why`` is for the reader."""

    task: Task
    effort: Effort
    why: str = ""


def plan(tasks: Sequence[Task]) -> list[Plan]:
    """The tasks in order of what they can give the whole model, each with its effort."""
    return [plan_task(task) for task in sorted(tasks, key=_gain, reverse=True)]


def _gain(task: Task) -> tuple[float, int]:
    """The Amdahl bound where it is known, else the share; the profile's rank decides between equals."""
    return (task.amdahl_bound or 1.0 / (1.0 - min(task.share or 0.0, 0.999)), -task.rank)


def plan_task(task: Task) -> Plan:
    if task.share is not None and task.share < MIN_SHARE:
        return Plan(task, "skip", f"only {task.share:.2%} of the model's time")
    if task.head_room is not None and task.head_room < NEAR_ROOFLINE:
        return Plan(task, "starter", f"already within {NEAR_ROOFLINE - 1:.0%} of its roofline")
    return Plan(task, "full")


def reordered(plans: Sequence[Plan], baselines: Mapping[str, Mapping[str, float]]) -> list[Plan]:
    """The plans by what each task can still give a model that torch.compile has already had.

    ``baselines``: by fingerprint, the latency in µs of the region by itself with each baseline.  A chain
    that eager spreads over ten kernels and the compiler fuses into one has little left to give, whatever its
    share of the eager profile.
    """

    def left_us(plan: Plan) -> float:
        times = baselines.get(plan.task.fingerprint)
        if plan.effort == "skip" or not times:
            return -1.0
        return plan.task.call_count * max(0.0, min(times.values()) - (plan.task.roofline_us or 0.0))

    return sorted(plans, key=left_us, reverse=True)


def finished(task: Task, latency_us: float | None) -> str:
    """Why a task whose best kernel takes ``latency_us`` needs no further round; empty when it does."""
    if latency_us is None or not task.roofline_us:
        return ""
    if latency_us <= NEAR_ROOFLINE * task.roofline_us:
        return f"within {NEAR_ROOFLINE - 1:.0%} of its roofline ({task.roofline_us:.1f} µs)"
    return ""


@dataclass
class Limits:
    """When a run's experiments end.  ``deadline`` is on `time.monotonic`'s clock; None is no limit.

    ``stop`` is asked between rows: a Ctrl-C sets it.
    """

    max_experiments: int | None = None
    deadline: float | None = None
    stop: Callable[[], bool] = lambda: False

    def reached(self, rows: Sequence[Experiment]) -> str:
        """Why no further experiment may start; empty when one may."""
        if self.stop():
            return "interrupted"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "the time budget is spent"
        if self.max_experiments is not None and count_experiments(rows) >= self.max_experiments:
            return f"--max-experiments {self.max_experiments} is reached"
        return ""


def count_experiments(rows: Sequence[Experiment]) -> int:
    """Judged kernels in the journal: neither baselines nor whole-model rows nor dead API calls."""
    return sum(1 for r in rows if r.task != "model" and r.status != "baseline" and r.candidate)


def not_worth_asking(task: Task, times_us: Sequence[float]) -> str:
    """Why nobody who costs money is asked about ``task``; empty when it is worth it.

    ``times_us`` are those of its baselines and of its best kernel: what any of them has reached is no longer
    there to gain.
    """
    if task.share is not None and task.share < MIN_SHARE:
        return f"only {task.share:.2%} of the model's time"
    best = min(times_us, default=None)
    if why := finished(task, best):
        return f"{best:.1f} µs is {why}"
    return ""


def open_plan(rows: Sequence[Experiment], proposer: str) -> Experiment | None:
    """The last row of a proposer's plan that failed in its implementation and has repairs left; else None.

    A plan is a row and the repairs that follow it.  A repair that brought no kernel file counts, one that the
    judge couldn't judge doesn't.
    """
    failed: Experiment | None = None
    repairs = 0
    for row in reversed(rows):
        if row.proposer != proposer or row.status == "baseline":
            continue
        is_repair = REPAIR in row.strategy.split(",")
        if row.status == "infra_error":
            if row.candidate and not is_repair and failed is None:
                return None
            repairs += is_repair and not row.candidate
            continue
        if failed is None:
            if row.status not in REPAIRABLE or not row.candidate:
                return None
            failed = row
        if not is_repair:
            break
        repairs += 1
    return failed if repairs < MAX_REPAIRS else None


def stagnant_rounds(rows: Sequence[Experiment], proposer: str) -> int:
    """How many plans in a row, counted from the end, a proposer had without a keep on this task.

    A plan that can still be repaired isn't over, and doesn't count yet.
    """
    rounds = 0
    for row in reversed(rows):
        if row.proposer != proposer or row.status in ("baseline", "infra_error"):
            continue
        if row.status == "keep":
            break
        rounds += REPAIR not in row.strategy.split(",")
    return rounds - (1 if open_plan(rows, proposer) is not None else 0)


def model_candidate(rows: Sequence[Experiment]) -> Experiment | None:
    """Of one task's rows, the kernel that gets its chance in the whole model; None when none deserves it.

    That is the last keep.  Without one it is the fastest correct kernel that is not clearly slower than the
    best baseline: a region by itself and the same region inside a compiled model are not the same thing, so
    a near tie is the whole model's to break.  A starter is the model's own code and is never worth it.
    """
    kept = [r for r in rows if r.status == "keep" and not _is_reference(r)]
    if kept:
        return kept[-1]
    near = [r for r in rows if _near_tie(r)]
    return max(near, key=lambda r: r.speedup_vs_best_baseline or 0.0, default=None)


NEARLY_AS_FAST, HOPELESS = 0.9, 0.5
"""Of the best baseline's speed, and of the chosen kernel's: what is slower isn't made up for at the edges."""
MAX_ALTERNATIVES = 2


def alternatives(rows: Sequence[Experiment], chosen: Experiment) -> list[Experiment]:
    """Other correct kernels of the task that the whole model may prefer to ``chosen``.

    One per backend and first strategy tag, the fastest first: a custom kernel keeps the compiler from fusing
    across its edges, a rewrite into library calls does not, so the order of regions by themselves may turn.
    """
    found: dict[tuple[str, str], Experiment] = {}
    enough = max(NEARLY_AS_FAST, HOPELESS * (chosen.speedup_vs_best_baseline or 0.0))
    for row in rows:
        speed = row.speedup_vs_best_baseline
        if row.status not in ("keep", "discard") or speed is None or speed < enough:
            continue
        kind = _kind(row)
        if not row.candidate or _is_reference(row) or kind == _kind(chosen):
            continue
        if kind not in found or speed > (found[kind].speedup_vs_best_baseline or 0.0):
            found[kind] = row
    ranked = sorted(found.values(), key=lambda r: -(r.speedup_vs_best_baseline or 0.0))
    return ranked[:MAX_ALTERNATIVES]


def _kind(row: Experiment) -> tuple[str, str]:
    return (row.backend, row.strategy.split(",")[0])


def _is_reference(row: Experiment) -> bool:
    """A starter of backend `torch` is the region's own code: being faster than itself is luck."""
    return row.proposer == "starter" and row.backend == "torch"


def _near_tie(row: Experiment) -> bool:
    return (
        row.status == "discard"
        and bool(row.candidate)
        and row.proposer != "starter"
        and row.speedup_vs_best_baseline is not None
        and row.speedup_vs_parent is None
        and (row.ci_high or 0.0) > 1.0
    )
