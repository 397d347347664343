"""What a kernel takes when its inputs are in the L2 cache. It is told, and decides nothing: see `timing`.

Cold is what counts, since in a model the layers before have filled the cache with other things.  Here a
sample is one call on each of as few buffers as lie in half of the cache together, right after another such
sample, and nothing is flushed in between.  Its outputs are checked, and the judge's clock runs, as ever.
"""

from __future__ import annotations

import statistics

from autokernel.judge import clock
from autokernel.judge.clock import Sample
from autokernel.judge.contents import Contents
from autokernel.judge.handle import WorkerFault
from autokernel.judge.inputs import spec_of
from autokernel.judge.stages.timing import CandidateArm, WorkerArm
from autokernel.judge.stats import paired_ratio
from autokernel.judge.trial import StageResult, Trial, failed

ROUNDS = 30


class _Twice:
    """An arm whose samples are taken right after another one of the same calls."""

    def __init__(self, arm: WorkerArm) -> None:
        self.name, self.arm = arm.name, arm

    def sample(self, start: int) -> Sample:
        self.arm.worker.time(self.arm.subject, start)
        return self.arm.sample(start)


def run(trial: Trial) -> StageResult:
    if trial.tier != "audit":
        return StageResult(True, "not asked for")
    judge = trial.task_judge
    if judge.device.type != "cuda":
        return StageResult(True, "only a GPU's cache is flushed before a sample")
    specs = [*(spec_of(port) for port in judge.task.inputs), *judge.output_specs]
    fitting = clock.l2_bytes(judge.device) // 2 // max(1, sum(spec.extent for spec in specs))
    count = max(1, min(judge.inputs.timed, fitting))
    worker, outputs = trial.running
    baseline = judge.baseline_arms(collect=True)
    rivals = [arm.name for arm in baseline]
    if trial.layout is not None:
        baseline.append(judge.arm_like(trial.layout, graph=judge.graph))
    trusted = baseline[-1].name if trial.layout is not None else baseline[0].name
    candidate = CandidateArm("candidate", trial, worker, outputs, count)
    try:
        for arm in (*baseline, candidate):
            prepared = arm.worker.prepare(
                arm.subject, range(count), graph=judge.graph, min_sample_s=1e-9, once=True, flush=False
            )
            arm.worker.rest()
        if judge.graph and not prepared.graph:
            return StageResult(True, f"not told: {prepared.note}")
        rounds = _measure(trial, baseline, candidate, count)
    except WorkerFault as fault:
        return failed(fault.status, f"{fault.reason} (with a warm cache)")
    finally:
        judge.ready_baselines()
    ours = clock.confirmed_s(rounds.samples["candidate"], rounds.samples[trusted], judge.device)
    ratios = {name: paired_ratio(rounds.times_s(name), ours) for name in rivals}
    text = ", ".join(f"{r.ratio:.3f}x {name}" for name, r in ratios.items())
    return StageResult(True, f"{statistics.median(ours) * 1e6:.2f} us on {count} warm buffers, {text}")


def _measure(trial: Trial, baseline: list[WorkerArm], candidate: CandidateArm, count: int) -> clock.Rounds:
    judge = trial.task_judge
    contents = Contents(judge.inputs, judge.maker, [c.inputs for c in trial.cases if c.kind == "normal"])

    def check() -> None:
        if name := contents.changed():
            raise WorkerFault("rejected", f"changes its input {name!r} while it is timed")
        assert baseline[0].taken is not None
        candidate.check(contents, baseline[0].taken, count)

    judge.launcher.settle()
    return clock.interleave(
        [_Twice(arm) for arm in (*baseline, candidate)],
        ROUNDS,
        buffers=count,
        before_round=contents.deal,
        after_round=check,
        device=judge.device,
    )
