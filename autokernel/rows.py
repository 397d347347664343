"""Rows of results.tsv from what the judge and the proposers say.  Pure functions."""

from __future__ import annotations

from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import TIMED, Experiment, Ratio, Task, Verdict
from autokernel.run_folder import now


def best_baseline(verdict: Verdict) -> Ratio | None:
    """The comparison with the fastest baseline, which is the one with the lowest speed-up."""
    ratios = [r for r in (verdict.vs_eager, verdict.vs_compile) if r is not None]
    return min(ratios, key=lambda r: r.ratio, default=None)


def throughput_tflops(task: Task, latency_us: float | None) -> float | None:
    return task.flops / latency_us / 1e6 if task.flops and latency_us else None


def pct_peak(task: Task, latency_us: float | None) -> float | None:
    """Per cent of the speed that the roofline allows, whichever bound applies."""
    return 100.0 * task.roofline_us / latency_us if task.roofline_us and latency_us else None


def baseline_row(task: Task, name: str, latency_us: float, *, tag: str, device: str) -> Experiment:
    return Experiment(
        experiment=0,
        tag=tag,
        kernel_type=task.family,
        throughput_tflops=throughput_tflops(task, latency_us),
        latency_us=latency_us,
        pct_peak=pct_peak(task, latency_us),
        description=f"{name} on the reference",
        time=now(),
        task=task.name,
        backend=name,
        device=device,
        status="baseline",
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
) -> Experiment:
    """The row of one judged candidate.  The interval is that of the comparison that decided."""
    best = best_baseline(verdict)
    decided = verdict.vs_parent or best
    timed = verdict.status in TIMED
    latency = verdict.latency_us
    return Experiment(
        experiment=0,
        tag=tag,
        kernel_type=task.family,
        throughput_tflops=throughput_tflops(task, latency),
        latency_us=latency,
        pct_peak=pct_peak(task, latency),
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
        bound=verdict.bound or "",
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
