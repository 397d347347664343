"""Rows of results.tsv from what the judge and the proposers say.  Pure functions."""

from __future__ import annotations

from autokernel.bound import performance
from autokernel.hardware import Ceilings
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import TIMED, Experiment, Ratio, Task, Verdict
from autokernel.run_folder import now


def best_baseline(verdict: Verdict) -> Ratio | None:
    """The comparison with the fastest baseline, which is the one with the lowest speed-up."""
    ratios = [r for r in (verdict.vs_eager, verdict.vs_compile) if r is not None]
    return min(ratios, key=lambda r: r.ratio, default=None)


def baseline_row(
    task: Task, name: str, latency_us: float, *, tag: str, device: str, ceilings: Ceilings | None = None
) -> Experiment:
    """The row of one baseline on the task's region; without ``ceilings`` its bound stays empty."""
    found = performance(task, latency_us, ceilings)
    return Experiment(
        experiment=0,
        tag=tag,
        kernel_type=task.family,
        throughput_tflops=found.throughput_tflops,
        latency_us=latency_us,
        pct_peak=found.pct_peak,
        description=f"{name} on the reference",
        time=now(),
        task=task.name,
        backend=name,
        device=device,
        status="baseline",
        bound=found.bound or "",
    )


def verdict_row(
    task: Task,
    proposal: Proposal,
    verdict: Verdict,
    *,
    tag: str,
    device: str,
    candidate: str,
    parent: str = "",
    ceilings: Ceilings | None = None,
) -> Experiment:
    """The row of one judged candidate.  The interval is that of the comparison that decided.

    The bound is the judge's own, if it has one from counters, else what the time and ``ceilings`` tell.
    """
    best = best_baseline(verdict)
    decided = verdict.vs_parent or best
    timed = verdict.status in TIMED
    found = performance(task, verdict.latency_us, ceilings)
    return Experiment(
        experiment=0,
        tag=tag,
        kernel_type=task.family,
        throughput_tflops=found.throughput_tflops,
        latency_us=verdict.latency_us,
        pct_peak=found.pct_peak,
        speedup_vs_pytorch=_ratio(verdict.vs_eager) if timed else None,
        peak_vram_mb=verdict.peak_vram_mb,
        description=proposal.description,
        time=now(),
        task=task.name,
        backend=proposal.backend,
        device=device,
        status=verdict.status,
        reason=verdict.reason,
        candidate=candidate,
        parent=parent,
        strategy=proposal.strategy,
        speedup_vs_compile=_ratio(verdict.vs_compile) if timed else None,
        speedup_vs_best_baseline=_ratio(best) if timed else None,
        speedup_vs_parent=_ratio(verdict.vs_parent) if timed else None,
        ci_low=decided.low if decided and timed else None,
        ci_high=decided.high if decided and timed else None,
        bound=verdict.bound or found.bound or "",
        error_ratio=verdict.error_ratio,
        provenance=verdict.provenance or "",
        proposer=proposal.proposer,
        model=proposal.model,
        tokens_in=proposal.tokens_in,
        tokens_out=proposal.tokens_out,
        cost_usd=proposal.cost_usd,
        seconds=verdict.seconds + proposal.seconds,
    )


def failure_row(task: Task, failure: Failure, *, tag: str, device: str, parent: str = "") -> Experiment:
    """The row of a proposer that had no kernel to show."""
    return Experiment(
        experiment=0,
        tag=tag,
        kernel_type=task.family,
        description="no candidate",
        time=now(),
        task=task.name,
        device=device,
        status="infra_error",
        reason=failure.reason,
        parent=parent,
        strategy=failure.strategy,
        proposer=failure.proposer,
        model=failure.model,
        tokens_in=failure.tokens_in,
        tokens_out=failure.tokens_out,
        cost_usd=failure.cost_usd,
        seconds=failure.seconds,
    )


def _ratio(value: Ratio | None) -> float | None:
    return None if value is None else value.ratio
