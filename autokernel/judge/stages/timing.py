"""Is it faster: paired, interleaved timing against the baselines, with every timed output checked."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from autokernel.judge import clock
from autokernel.judge.buffers import OutputBuffers
from autokernel.judge.cases import worst_e0
from autokernel.judge.clock import Sample
from autokernel.judge.conditions import describe
from autokernel.judge.contents import Contents, suspects
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.protocol import OutputRecord
from autokernel.judge.stats import paired_ratio
from autokernel.judge.trial import SUBJECT, StageResult, Trial, failed

if TYPE_CHECKING:
    from autokernel.judge.task_judge import TaskJudge

ROUNDS = {"screen": 30, "promote": 100, "audit": 100}
FLOOR = 0.95
SPOT_SHARE = 0.2
ANEW = 20
"""After so many rounds all CUDA graphs are captured anew: their memory lies elsewhere then, which can make
equal graphs differ by a percent."""
FLAG_OVER_COMPILE = 5.0


class WorkerArm:
    """One subject of one worker, as something to time.

    ``outputs``: every sample hands its results over in the same exchange, so that the judge's clock sees
    both (all arms of a comparison do or none does); ``taken`` is the judge's copy of them, if it ``keeps``
    one.  ``calls``: how many calls a sample consists of; what an untrusted worker says about that is not
    believed.  The worker rests while it is not its turn, and has no time between seeing new contents and
    being timed on them.
    """

    def __init__(
        self,
        name: str,
        worker: Worker,
        subject: int,
        *,
        outputs: OutputBuffers | None = None,
        calls: int | None = None,
        keeps: bool = True,
    ) -> None:
        self.name, self.worker, self.subject, self.outputs, self.calls = name, worker, subject, outputs, calls
        self.keeps, self.graph = keeps, True
        self.taken: Tensor | None = None
        self.records: dict[int, list[OutputRecord]] = {}

    def sample(self, start: int) -> Sample:
        sample = self._timed(start)
        self.worker.rest()
        return sample

    def anew(self, judge: TaskJudge) -> None:
        """Have its calls captured once more, in other memory; not if they are launched one by one anyway."""
        if self.graph:
            judge.ready(self.worker, self.subject)
            self.records = {}
            self.worker.rest()

    def straight(self, count: int) -> Tensor:
        """What has been taken of the first ``count`` slots, each output contiguous in its place."""
        assert self.taken is not None and self.outputs is not None
        if not self.records:
            self.records = self.worker.collect(self.subject)  # of a trusted subject, they are always the same
            self.worker.rest()
        return self.outputs.straight(self.taken, self.records, count)

    def _timed(self, start: int) -> Sample:
        sample = self.worker.time(self.subject, start, collect=self.outputs is not None)
        if self.calls is not None:
            sample.calls = self.calls
        if self.outputs is not None and self.keeps:
            rows = self.outputs.rows()
            self.taken = rows.clone() if self.taken is None else self.taken.copy_(rows)
            self.outputs.arena.sync()  # it is ours before the worker is asked for anything else
        return sample


class CandidateArm(WorkerArm):
    """An untrusted arm; `check` compares what its timed calls returned."""

    def __init__(self, name: str, trial: Trial, worker: Worker, outputs: OutputBuffers, calls: int) -> None:
        super().__init__(name, worker, SUBJECT, outputs=outputs, calls=calls)
        self.trial = trial
        self._spot_checks = SpotChecks()

    def _timed(self, start: int) -> Sample:
        sample = super()._timed(start)
        self.records = self.worker.collect(SUBJECT)
        return sample

    def check(self, contents: Contents, eager: Tensor, count: int | None = None) -> None:
        """Raise WorkerFault unless the latest sample's outputs are right; ``eager``'s are of that round.

        ``count``: of how many slots, if not of all that are timed."""
        count = count or contents.inputs.timed
        if missing := [s for s in range(count) if s not in self.records]:
            raise WorkerFault("rejected", f"timed calls without a result (buffers {missing[:4]})")
        typical = self.trial.cases[0]
        for slot in range(count):
            self.trial.check_form(self.records[slot], typical)
        assert self.outputs is not None
        got = self.straight(count)
        further_off = suspects(self.outputs, got, eager, count, self.trial.e0["fresh"])
        for slot in further_off:
            outputs = self.outputs.outputs(slot, rows=got)
            self.trial.check_values(contents.case(slot), outputs, " (in a timed call)")
        if not further_off and self._spot_checks.due():
            with self._spot_checks:
                slot = random.SystemRandom().randrange(count)
                case, outputs = contents.case(slot), self.outputs.outputs(slot, rows=got)
                e0 = [a.largest(b) for a, b in zip(case.e0, self.trial.e0["fresh"], strict=True)]
                self.trial.check_values(case, outputs, " (in a timed call)", e0=e0)


class SpotChecks:
    """When one timed call, picked at random, is compared with float64 by every measure there is.

    Whatever the comparison with eager does not see in a call, it is not seen by in a hundred of them only if
    most calls are right.  In each round, where that takes no more than `SPOT_SHARE` of the time.
    """

    def __init__(self) -> None:
        self.spent_s, self._began, self._since = 0.0, 0.0, time.perf_counter()

    def due(self) -> bool:
        return self.spent_s <= SPOT_SHARE * (time.perf_counter() - self._since)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent_s += time.perf_counter() - self._began


def run(trial: Trial) -> StageResult:
    judge = trial.task_judge
    worker, outputs = trial.running
    baseline = judge.baseline_arms(collect=True)
    rivals = [arm.name for arm in baseline]
    trusted = rivals[0]
    try:
        prepared = judge.ready(worker, SUBJECT)
        if prepared.note:
            trial.notes.append(f"timed as plain launches ({prepared.note})")
        if judge.graph and not prepared.graph:
            baseline.append(judge.arm_launched())
            baseline[-1].graph = False
            trusted = baseline[-1].name
        candidates = [CandidateArm("candidate", trial, worker, outputs, judge.calls)]
        candidates[0].graph = prepared.graph
        if trial.parent is not None:
            candidates += (parent := _parent_arm(trial, trial.parent))
            rivals += [arm.name for arm in parent]
        judge.launcher.settle()
        rounds = _measure(trial, baseline, candidates, ROUNDS[trial.tier])
    except WorkerFault as fault:
        return failed(fault.status, fault.reason)
    return _conclude(trial, rounds, rivals, trusted)


def _parent_arm(trial: Trial, path: Path) -> list[CandidateArm]:
    """The parent in a worker of its own. One that fails now is left out, and the verdict says so."""
    judge = trial.task_judge
    try:
        worker = judge.parent_worker(path)
        prepared = judge.ready(worker, SUBJECT)
        arm = CandidateArm("parent", trial, worker, judge.parent_outputs, judge.calls)
        arm.graph = prepared.graph
        return [arm]
    except WorkerFault as fault:
        trial.notes.append(f"the parent could not be measured ({fault.reason.splitlines()[0]})")
        return []


def _measure(
    trial: Trial, baseline: list[WorkerArm], candidates: list[CandidateArm], rounds: int
) -> clock.Rounds:
    """Interleaved rounds, each on contents of its own, checked before the next."""
    judge = trial.task_judge
    normal = [c for c in trial.cases if c.kind == "normal"]
    trial.e0["fresh"] = worst_e0(normal)
    contents = Contents(judge.inputs, judge.maker, normal[0].inputs)
    eager = baseline[0]

    def check(*, statics: bool = False) -> None:
        if name := contents.changed(statics=statics):
            raise WorkerFault("rejected", f"changes its input {name!r} while it is timed")
        expected = eager.straight(judge.inputs.timed)
        for arm in candidates:
            arm.check(contents, expected)

    for arm in candidates:
        arm.worker.rest()
    arms, before = [*baseline, *candidates], itertools.count(-1)

    def deal() -> None:
        number = next(before)
        if judge.graph and number > 0 and number % ANEW == 0:
            for arm in arms:
                arm.anew(judge)
        contents.deal()

    result = clock.interleave(
        arms,
        rounds,
        buffers=judge.inputs.timed,
        before_round=deal,
        after_round=check,
        device=judge.device,
    )
    check(statics=True)
    return result


def _conclude(trial: Trial, rounds: clock.Rounds, rivals: list[str], trusted: str) -> StageResult:
    """``trusted``: the arm whose samples are taken the same way, so that its overhead is the candidate's."""
    judge = trial.task_judge
    if wrong := clock.gate_fault(rounds.samples["candidate"], rounds.samples[trusted]):
        return failed("rejected", wrong)
    ours = clock.confirmed_s(rounds.samples["candidate"], rounds.samples[trusted], judge.device)
    trial.latency_us = statistics.median(ours) * 1e6
    claimed = rounds.median_us("candidate")
    if claimed < trial.latency_us:
        doubt = "flagged: " if claimed < 0.9 * trial.latency_us else ""
        trial.notes.append(f"{doubt}by the judge's own clock, {claimed:.2f} us by the kernel's")
    floor = judge.task.roofline_us
    if floor and trial.latency_us < FLOOR * floor:
        text = f"{trial.latency_us:.2f} us is below the roofline of {floor:.2f} us"
        if judge.device.type == "cuda":
            trial.latency_us = None
            return failed("rejected", text)
        trial.notes.append(f"flagged: {text}")
    trial.ratios = {name: paired_ratio(rounds.times_s(name), ours) for name in rivals}
    if "compile" in trial.ratios and trial.ratios["compile"].ratio > FLAG_OVER_COMPILE:
        trial.notes.append(f"flagged: {trial.ratios['compile'].ratio:.1f}x over torch.compile")
    if state := describe(rounds.readings):
        trial.notes.append(state)
    text = ", ".join(f"{r.ratio:.3f}x {n} (at least {r.lower_bound:.3f})" for n, r in trial.ratios.items())
    return StageResult(True, "; ".join([f"{trial.latency_us:.2f} us, {text}", *trial.notes]))
