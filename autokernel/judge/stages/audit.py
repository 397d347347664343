"""What is about to ship, or is asked about by hand: calls one at a time, and two more processes.

In a sample many calls follow each other on inputs that lie there from the start, so that a kernel could work
for all of them in the first.  Here no input exists before the judge holds the output of the call before it,
and the judge's clock runs on every call.  The lower speed-up of the two is what counts.

A process may be lucky (where its memory lies, which core it is on): of three, the one that did worst counts.
One may be unlucky, too, and be seen 50 us late at every single call: where single calls contradict the others
they are made again in the next process, and what counts is the mildest contradiction.  A kernel that works
for many calls in one of them is contradicted in each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autokernel.judge import clock
from autokernel.judge.buffers import OutputBuffers
from autokernel.judge.clock import Sample
from autokernel.judge.contents import Contents
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.protocol import OutputRecord
from autokernel.judge.stages import correctness, load, timing
from autokernel.judge.stats import paired_ratio
from autokernel.judge.trial import SUBJECT, StageResult, Trial, failed
from autokernel.records import Ratio

ROUNDS = 30
"""Of single calls, on every slot once."""
NOISE = 0.15
"""Of what the judge's clock sees beside a call (70 us on a CPU) equal processes differ by so much."""
SLOTS = {"cpu": 1000, "cuda": 20}
"""At most so many are called one at a time."""
ALONE_SHARE, ALONE_US = 0.25, 0.5
"""On a GPU, a call by itself may take so much longer than one of many, beyond what that costs eager."""
PROCESSES = 2
"""Beside the first one."""
AGAIN = 1.1
"""Single calls that take so many times as long as they should are looked at again in the next process."""


class Singles(NamedTuple):
    """What calls that come one at a time say.  ``factor``: they take so many times as long as many calls bear
    out (1 if not longer); ``counts`` is said as well if that is so."""

    said: str
    factor: float = 1.0
    counts: str = ""


def run(trial: Trial) -> StageResult:
    if trial.tier != "audit":
        return StageResult(True, "not asked for")
    try:
        singles = [_one_at_a_time(trial)]
    except WorkerFault as fault:
        return failed(fault.status, f"{fault.reason} (one call at a time)")
    worker, _ = trial.running
    worker.close()
    done, latencies_us = [trial.ratios], [trial.latency_us or 0.0]
    for _ in range(PROCESSES):
        again = Trial(trial.task_judge, trial.source, "promote", trial.parent)
        try:
            for stage in (load, correctness, timing):
                result = stage.run(again)
                if not result.passed:
                    return replace(result, text=f"in another process: {result.text}")
            if min(found.factor for found in singles) > AGAIN:
                singles.append(_one_at_a_time(again))
        except WorkerFault as fault:
            return failed(fault.status, f"in another process: {fault.reason}")
        finally:
            again.close()
        done.append(again.ratios)
        latencies_us.append(again.latency_us or 0.0)
        trial.error_ratio = max(trial.error_ratio or 0.0, again.error_ratio or 0.0)
    spread = ", ".join(f"{r['eager'].ratio:.3f}x" for r in done)
    mildest = min(range(len(singles)), key=lambda process: singles[process].factor)
    said, factor, counts = singles[mildest]
    if factor > 1:
        said += counts
        latencies_us[mildest] *= factor
        done[mildest] = {name: _scaled(ratio, 1 / factor) for name, ratio in done[mildest].items()}
    trial.latency_us = max(latencies_us)
    trial.ratios = {name: _worst([r[name] for r in done if name in r]) for name in trial.ratios}
    return StageResult(True, f"{said}; {1 + PROCESSES} processes: {spread} eager")


def _worst(ratios: list[Ratio]) -> Ratio:
    return min(ratios, key=lambda ratio: ratio.lower_bound)


class StepArm:
    """A subject that is called once at a time; its outputs are taken before the next one's inputs exist."""

    def __init__(self, name: str, worker: Worker, subject: int, outputs: OutputBuffers) -> None:
        self.name, self.worker, self.subject, self.outputs = name, worker, subject, outputs
        self.taken = outputs.rows().clone()
        self.records: dict[int, list[OutputRecord]] = {}

    def sample(self, contents: Contents, start: int, count: int) -> Sample:
        """The first ``count`` slots once, from ``start`` on; a sample is the typical step, ``count`` times.

        One step in ten or more ends while the judge's core is another's, and is seen milliseconds late.  In a
        sum that would be half of the samples, and in one process rather than in another.
        """
        inputs = contents.inputs
        self.outputs.poison()

        def before(slot: int) -> None:
            contents.write(slot)
            inputs.arena.sync()

        def after(slot: int) -> None:
            self.taken[slot].copy_(self.outputs.rows()[slot])
            self.outputs.arena.sync()

        order = [(start + i) % count for i in range(count)]
        made = self.worker.steps(self.subject, order, before, after)
        self.records = self.worker.collect(self.subject)
        self.worker.rest()
        return typical_step(made)


def typical_step(made: Sequence[Sample]) -> Sample:
    """A sample of as many calls, each of which took as long as the (lower) median one."""
    claimed_s = statistics.median_low([step.claimed_s for step in made])
    gated_s = statistics.median_low([step.gated_s for step in made])
    return Sample(claimed_s * len(made), gated_s * len(made), len(made))


def _one_at_a_time(trial: Trial) -> Singles:
    """Call one at a time in ``trial``'s process, and hold that against its figures."""
    judge = trial.task_judge
    candidate, eager, alike = _step_rounds(trial)
    if wrong := clock.gate_fault(candidate, eager):
        raise WorkerFault("rejected", wrong)
    ours = clock.confirmed_s(candidate, eager, judge.device, noise=NOISE)
    if judge.device.type == "cuda" and not alike:
        return Singles("right one call at a time, but timed in no CUDA graph")
    if judge.device.type == "cuda":
        return _alone(trial, statistics.median(ours) * 1e6, eager)
    single = paired_ratio([s.per_call_s for s in eager], ours).ratio
    factor = max(1.0, trial.ratios["eager"].ratio / single)
    return Singles(f"{single:.3f}x eager one call at a time", factor, ", which is what counts")


def _alone(trial: Trial, alone_us: float, eager: list[Sample]) -> Singles:
    """Hold a GPU's single calls against the calls in a sample.

    There a call by itself takes longer than one of many, eager's, too: by how much is known from eager, of
    which both are measured, and it is no part of the kernel.
    """
    latency_us = trial.latency_us
    assert latency_us is not None
    among_us = latency_us * trial.ratios["eager"].ratio
    start_us = max(0.0, statistics.median(s.per_call_s for s in eager) * 1e6 - among_us)
    own_us = alone_us - start_us
    said = f"{own_us:.2f} us one call at a time, and {start_us:.2f} us that eager takes longer then, too"
    if own_us <= (1 + ALONE_SHARE) * latency_us + ALONE_US:
        return Singles(said)
    counts = f"; {own_us:.2f} us is what counts, not the {latency_us:.2f} us of many calls"
    return Singles(said, own_us / latency_us, counts)


def _step_rounds(trial: Trial) -> tuple[list[Sample], list[Sample], bool]:
    """Samples of the candidate and of eager, round by round, on the same contents in both; and whether both
    are launched the same way, in a CUDA graph or not."""
    judge = trial.task_judge
    worker, outputs = trial.running
    baseline = judge.baseline_arms(collect=True)[0]
    assert baseline.outputs is not None
    arms = [
        StepArm("eager", baseline.worker, baseline.subject, baseline.outputs),
        StepArm("candidate", worker, SUBJECT, outputs),
    ]
    slots = range(min(judge.inputs.timed, SLOTS[judge.device.type]))
    graphs = set[bool]()
    for arm in arms:
        graphs.add(arm.worker.prepare(arm.subject, slots, graph=judge.graph, each=True).graph)
        arm.worker.rest()
    eager, candidate = arms
    check = timing.CandidateArm("candidate", trial, worker, outputs, len(slots))
    contents = Contents(judge.inputs, judge.maker, trial.cases[0].inputs)
    found: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    judge.launcher.settle()
    for number in range(-1, ROUNDS):  # the first is never typical
        contents.draw()
        start = random.randrange(len(slots))
        with clock.beside_workers(judge.device):
            for arm in random.sample(arms, len(arms)):
                time.sleep(clock.PAUSE_S)
                sample = arm.sample(contents, start, len(slots))
                if number >= 0:
                    found[arm.name].append(sample)
        check.records, check.taken = candidate.records, candidate.taken
        expected = baseline.outputs.straight(eager.taken, eager.records, len(slots))
        check.check(contents, expected, len(slots))
    return found["candidate"], found["eager"], len(graphs) == 1


def _scaled(ratio: Ratio, factor: float) -> Ratio:
    return Ratio(
        ratio.ratio * factor, ratio.low * factor, ratio.high * factor, ratio.lower_bound * factor, ratio.pairs
    )
