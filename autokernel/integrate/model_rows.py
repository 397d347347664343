"""Rows of results.tsv for the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autokernel.integrate.arms import Arm
from autokernel.judge.stats import paired_ratio
from autokernel.records import Experiment, Ratio
from autokernel.run_folder import now


@dataclass(frozen=True)
class ModelRows:
    """Makes rows for one run: ``tag`` is its name, ``device`` what it runs on."""

    tag: str
    device: str

    def blank(self, arm: Arm, *, backend: str, description: str) -> Experiment:
        held = arm.worker.held_bytes / 2**20 if arm.worker is not None else 0.0
        return Experiment(
            experiment=0,
            tag=self.tag,
            kernel_type="model",
            peak_vram_mb=held or None,
            description=description,
            time=now(),
            task="model",
            backend=backend,
            device=self.device,
            error_ratio=arm.agreement.error_ratio if arm.agreement else None,
            seconds=round(arm.seconds, 2),
        )

    def baseline(
        self, arm: Arm, samples: Sequence[float] | None, eager: Sequence[float] | None, description: str
    ) -> Experiment:
        """``samples`` are seconds per call, None if it did not run; ``eager`` those of the same rounds."""
        row = self.blank(arm, backend=arm.name, description=description)
        if samples is None:
            row.status, row.reason = arm.fault.status if arm.fault else "crash", arm.why_not
        else:
            row.status, row.latency_us = "baseline", median_us(samples)
            row.speedup_vs_pytorch = paired_ratio(eager, samples).ratio if eager else None
            row.reason = "" if arm.ready else f"differs from float64 more than eager does: {arm.why_not}"
        row.__post_init__()  # the status was set after construction
        return row

    def variant(
        self,
        arm: Arm,
        executor: str,
        rounds: dict[str, list[float]],
        baseline: str,
        *,
        candidate: str = "",
        parent: str = "",
        gain: Ratio | None = None,
        keep: bool = False,
        reason: str = "",
        strategy: str = "",
        vs_eager: float | None = None,
        description: str,
    ) -> Experiment:
        """The model with kernels in it, against ``baseline`` of the same ``rounds``."""
        row = self.blank(arm, backend="autokernel", description=description)
        row.candidate, row.parent, row.strategy = candidate, parent, strategy or executor
        if arm.name in rounds:
            versus = paired_ratio(rounds[baseline], rounds[arm.name])
            row.status, row.reason = ("keep" if keep else "discard"), reason
            row.latency_us = median_us(rounds[arm.name])
            row.speedup_vs_best_baseline = versus.ratio
            row.ci_low, row.ci_high = versus.low, versus.high
            row.speedup_vs_parent = gain.ratio if gain else None
            row.speedup_vs_pytorch = vs_eager
        else:
            row.status = arm.fault.status if arm.fault else "incorrect"
            row.reason = arm.why_not
        row.__post_init__()
        return row


def median_us(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] * 1e6


def interval(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f}, 95 % interval {ratio.low:.3f} to {ratio.high:.3f}"
