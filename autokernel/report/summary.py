"""The facts of a run, from the rows of its journal.  Pure; needs neither torch nor the device.

A whole-model row (``task`` is ``model``) with status ``baseline`` is what a user gets for free.  The other
whole-model rows are of backend ``autokernel``: with ``parent`` empty they add a kernel (``candidate``) to
what is kept so far or are the final measurement, with ``parent`` set they leave that kernel out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autokernel.records import Experiment

MODEL = "model"
OURS = "autokernel"
FINAL = "final"
"""The strategy tag of the whole-model row that measures the selection once more, on fresh inputs."""
IN, EVICTED, NOT_SHIPPED = "in the model", "evicted", "not shipped"
KEPT_ALONE, NOT_FASTER = "not tried in the model", "not faster"


@dataclass(slots=True)
class Baseline:
    """Its latest measurement.  ``vs_eager`` and ``vs_best`` are times faster than eager and than the best
    baseline, from the rounds in which both were timed; None if there were none."""

    backend: str
    latency_us: float | None
    vs_eager: float | None
    vs_best: float | None = None
    best: bool = False
    reason: str = ""


@dataclass(slots=True)
class KernelLine:
    """One task.  Speed-ups are of the region by itself; ``contribution`` is the whole model's time without
    this kernel over its time with it (from the leave-one-out row).  The interval is that of the comparison
    which decided, ``decided`` times faster than ``rival`` (the kernel's parent, else the best baseline)."""

    task: str
    family: str
    backend: str = ""
    strategy: str = ""
    provenance: str = ""
    latency_us: float | None = None
    speedup_vs_eager: float | None = None
    speedup_vs_compile: float | None = None
    decided: float | None = None
    rival: str = ""
    ci_low: float | None = None
    ci_high: float | None = None
    attempts: int = 0
    outcome: str = ""
    contribution: float | None = None
    why: str = ""


@dataclass(slots=True)
class Summary:
    tag: str
    device: str
    baselines: list[Baseline] = field(default_factory=list)
    best_baseline: str = ""
    latency_us: float | None = None
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    speedup_vs_eager: float | None = None
    error_ratio: float | None = None
    refused: str = ""
    """Why the model with kernels, though faster, is not shipped."""
    executor: str = ""
    kernels: list[KernelLine] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    cost_usd: float | None = None
    seconds: float = 0.0

    @property
    def improved(self) -> bool:
        return self.speedup is not None

    def headline(self) -> str:
        """One sentence: what the run came to."""
        if self.improved:
            interval = ""
            if self.ci_low is not None and self.ci_high is not None:
                interval = f" (95 % interval {self.ci_low:.3f} to {self.ci_high:.3f})"
            text = f"{self.speedup:.3f}× the best baseline, {self.best_baseline}{interval}"
            if self.speedup_vs_eager is not None:
                text += f"; {self.speedup_vs_eager:.2f}× eager"
            return text
        if not self.baselines:
            return "the whole model was not measured"
        if self.refused:
            what = "nothing that can be shipped beat the best baseline"
            return f"{what}: use {self.best_baseline} ({self.refused})"
        return f"nothing beat the best baseline: use {self.best_baseline}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "improved": self.improved, "headline": self.headline()}


def summarize(rows: Sequence[Experiment]) -> Summary:
    """The `Summary` of a journal's rows."""
    summary = Summary(
        tag=next((r.tag for r in reversed(rows) if r.tag), ""),
        device=next((r.device for r in reversed(rows) if r.device), ""),
        statuses=dict(Counter(r.status or r.correctness.lower() for r in rows)),
        tokens=sum((r.tokens_in or 0) + (r.tokens_out or 0) for r in rows),
        seconds=sum(r.seconds or 0.0 for r in rows),
    )
    costs = [r.cost_usd for r in rows if r.cost_usd is not None]
    summary.cost_usd = sum(costs) if costs else None
    model = [r for r in rows if r.task == MODEL]
    _baselines(summary, model)
    _ours(summary, [r for r in model if r.backend == OURS])
    ours = [r for r in model if r.backend == OURS]
    by_task: dict[str, list[Experiment]] = {}
    for row in rows:
        if row.task != MODEL:
            by_task.setdefault(row.task or row.kernel_type, []).append(row)
    summary.kernels = [_kernel(task, group, ours) for task, group in by_task.items()]
    return summary


def _baselines(summary: Summary, model: Sequence[Experiment]) -> None:
    together: dict[str, dict[str, Experiment]] = {}
    batch, before = dict[str, Experiment](), -1
    for row in model:
        if row.backend == OURS:
            continue
        if row.experiment != before + 1:  # rows without a gap were timed in the same rounds
            batch = {}
        batch[row.backend], before = row, row.experiment
        together[row.backend] = batch
    timed = {name: row.latency_us for name, rows in together.items() if (row := rows[name]).latency_us}
    summary.best_baseline = min(timed, key=lambda name: timed[name], default="")
    for name, rows in together.items():
        row = rows[name]

        def times_faster(
            rival: str, row: Experiment = row, rows: dict[str, Experiment] = rows
        ) -> float | None:
            other = rows[rival].latency_us if rival in rows else None
            return other / row.latency_us if other and row.latency_us else None

        line = Baseline(name, row.latency_us, times_faster("eager"), times_faster(summary.best_baseline))
        line.best = name == summary.best_baseline
        line.reason = row.reason if row.status == "baseline" else f"{row.status}: {row.reason}"
        summary.baselines.append(line)


def _times_faster(row: Experiment, rival: Experiment | None) -> float | None:
    return rival.latency_us / row.latency_us if rival and rival.latency_us and row.latency_us else None


def final_row(ours: Sequence[Experiment]) -> Experiment | None:
    """The last measurement of the whole selection, which may say that it lost."""
    return next(reversed(finals(ours)), None)


def finals(ours: Sequence[Experiment]) -> list[Experiment]:
    return [r for r in ours if FINAL in r.strategy.split(",")]


def _ours(summary: Summary, ours: Sequence[Experiment]) -> None:
    row = final_row(ours)
    if row is None:
        return
    if row.status != "keep":
        faster = row.ci_low is not None and row.ci_low > 1.0
        summary.refused = row.reason if faster or row.latency_us is None else ""
        return
    summary.latency_us = row.latency_us
    summary.speedup = row.speedup_vs_best_baseline
    summary.ci_low, summary.ci_high = row.ci_low, row.ci_high
    summary.speedup_vs_eager = row.speedup_vs_pytorch
    summary.error_ratio = row.error_ratio
    summary.executor = row.description


def _tried(
    kept: Sequence[Experiment],
    correct: Sequence[Experiment],
    ours: Sequence[Experiment],
    added: Sequence[Experiment],
) -> list[Experiment]:
    """Of a region that is not in the model: what was last left out of it, else the region's own winner (and
    not an alternative that it was compared with), else whatever was tried."""
    tried = {r.candidate for r in added}
    left_out = {r.parent for r in ours if r.parent and r.status == "keep"}
    for rows in (
        [r for r in (*kept, *correct) if r.candidate in left_out],
        [r for r in kept if r.candidate in tried],
        [r for r in correct if r.candidate in tried],
    ):
        if rows:
            return rows
    return []


def _kernel(task: str, rows: Sequence[Experiment], ours: Sequence[Experiment]) -> KernelLine:
    kept = [r for r in rows if r.status == "keep"]
    correct = [r for r in rows if r.status == "discard" and r.latency_us is not None]
    attempts = [r for r in rows if r.candidate and r.status != "baseline"]
    ids = {r.candidate for r in attempts}
    added = [r for r in ours if not r.parent and r.candidate in ids]
    final = final_row(ours)
    inside = [r for r in correct + kept if final and r.candidate in final.candidate.split(",")]
    inside.sort(key=lambda r: r.speedup_vs_best_baseline is not None)  # a point of a search was only timed
    fastest = min(correct, key=lambda r: r.latency_us or 0.0, default=None)
    best = (inside or _tried(kept, correct, ours, added) or kept or [fastest])[-1]
    added = [r for r in added if best is not None and r.candidate == best.candidate]
    line = KernelLine(task=task, family=rows[0].kernel_type, attempts=len(attempts))
    if best is None:
        failed = [r for r in rows if r.status != "baseline" and r.reason]
        line.outcome = "no correct kernel" if attempts else "no attempt"
        line.why = failed[-1].reason if failed else ""
        return line
    line.backend, line.strategy, line.provenance = best.backend, best.strategy, best.provenance
    line.latency_us = best.latency_us
    line.speedup_vs_eager, line.speedup_vs_compile = best.speedup_vs_pytorch, best.speedup_vs_compile
    line.ci_low, line.ci_high = best.ci_low, best.ci_high
    line.decided, line.rival = best.speedup_vs_parent, "its parent"
    if line.decided is None:
        line.decided = best.speedup_vs_best_baseline
        line.rival = "compile" if line.decided == best.speedup_vs_compile else "eager"
    left_out = [r for r in ours if r.parent == best.candidate]
    measured = [r for r in finals(ours) if best.candidate in r.candidate.split(",")]
    if inside and final is not None and final.status != "keep":
        line.outcome, line.why = NOT_SHIPPED, final.reason
    elif inside:
        line.outcome = IN
    elif not added:
        line.outcome, line.why = (KEPT_ALONE, "") if kept else (NOT_FASTER, best.reason)
    elif added[-1].status != "keep":
        line.outcome, line.why = EVICTED, added[-1].reason or "the model is not faster with it"
    elif left_out and left_out[-1].status == "keep":
        line.outcome, line.why = EVICTED, left_out[-1].reason or "the model is faster without it"
    elif measured:  # it was in the selection, which was measured again without it
        line.outcome, line.why = EVICTED, measured[-1].reason
    else:
        line.outcome = IN
    if left_out and left_out[-1].speedup_vs_parent:
        line.contribution = 1.0 / left_out[-1].speedup_vs_parent
    elif line.outcome == IN and (gains := [r.speedup_vs_parent for r in added if r.speedup_vs_parent]):
        line.contribution = gains[-1]  # the only one: adding it said the same
    return line
