"""Is it faster: paired, interleaved timing against the baselines, with every timed output checked."""

from __future__ import annotations

import random
import statistics

import torch
from torch import Tensor

from autokernel.judge import clock
from autokernel.judge.buffers import PATTERNS, OutputBuffers
from autokernel.judge.cases import Case
from autokernel.judge.clock import Arm, Sample
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.stats import paired_ratio
from autokernel.judge.trial import SUBJECT, StageResult, Trial, failed

ROUNDS = {"screen": 30, "promote": 100}
CONTENTS = 3
FLOOR = 0.95
FLAG_OVER_COMPILE = 5.0


class WorkerArm:
    """One subject of one worker, as something to time.

    ``collects``: every sample hands its outputs over in the same exchange, so that the judge's clock sees
    both.  All arms of a comparison do or none does; an arm without output areas copies nothing.
    """

    def __init__(self, name: str, worker: Worker, subject: int, *, collects: bool = False) -> None:
        self.name, self.worker, self.subject, self.collects = name, worker, subject, collects

    def sample(self, start: int) -> Sample:
        return self.worker.time(self.subject, start, collect=self.collects)


class CheckedArm(WorkerArm):
    """An untrusted arm: what its timed calls return is compared with its own verified outputs.

    ``rows`` holds, per content, the bytes of the verified outputs as they lay in the output arena. Bytes
    that differ (an atomic sum) are not yet wrong: such outputs are compared with float64 again.
    """

    def __init__(self, name: str, trial: Trial, worker: Worker, outputs: OutputBuffers) -> None:
        super().__init__(name, worker, SUBJECT, collects=True)
        self.trial, self.buffers = trial, outputs
        self.cases = timing_cases(trial)
        self.rows = self._verify()
        self.taken = outputs.rows()

    def sample(self, start: int) -> Sample:
        sample = super().sample(start)
        self.taken = self.buffers.rows().clone()
        self.buffers.arena.sync()  # it is ours before the worker is asked for anything else
        return sample

    def _verify(self) -> Tensor:
        inputs = self.trial.task_judge.inputs
        rows = []
        for start in range(0, len(self.cases), inputs.count):
            batch = self.cases[start : start + inputs.count]
            for slot, case in enumerate(batch):
                inputs.write(slot, case.inputs)
            self.buffers.poison()
            inputs.arena.sync()
            slots = range(len(batch))
            ran = self.worker.run(SUBJECT, slots, pattern=PATTERNS[0], first=True)
            for slot, case in enumerate(batch):
                self.trial.check_form(ran.outputs.get(slot, []), case)
                self.trial.check_values(case, self.buffers.outputs(slot), " (before timing)")
            rows.append(self.buffers.rows()[: len(batch)].clone())
        self.buffers.poison()
        return torch.cat(rows)

    def check(self, contents: list[int], expected_slots: list[int]) -> None:
        """Raise WorkerFault unless the latest sample's outputs are those of the slots' current contents."""
        records = self.worker.collect(SUBJECT)
        if missing := [s for s in expected_slots if s not in records]:
            raise WorkerFault("rejected", f"timed calls without a result (buffers {missing[:4]})")
        for slot in expected_slots:
            self.trial.check_form(records[slot], self.cases[contents[slot]])
        index = torch.tensor(expected_slots, device=self.rows.device)
        wanted = torch.tensor([contents[s] for s in expected_slots], device=self.rows.device)
        if torch.equal(self.taken[index], self.rows[wanted]):
            return
        for slot in expected_slots:
            outputs = self.buffers.outputs(slot, self.taken)
            self.trial.check_values(self.cases[contents[slot]], outputs, " (in a timed call)")


def timing_cases(trial: Trial) -> list[Case]:
    """What the timed buffers hold: normal data, as secret as any, and the captured activations."""
    kinds = {"normal", "captured"}
    return [c for c in trial.cases if c.kind in kinds][-CONTENTS:]


def run(trial: Trial) -> StageResult:
    judge = trial.task_judge
    worker, outputs = trial.running
    try:
        candidate = CheckedArm("candidate", trial, worker, outputs)
        prepared = judge.ready(worker, SUBJECT)
    except WorkerFault as fault:
        return failed(fault.status, fault.reason)
    if prepared.note:
        trial.notes.append(f"timed as plain launches ({prepared.note})")
    baseline = judge.baseline_arms(collects=True)
    arms: list[WorkerArm] = [*baseline, candidate]
    calls = {candidate.name: prepared.calls}
    if trial.parent is not None:
        _add_parent(trial, arms, calls)
    judge.launcher.settle()
    try:
        rounds = _measure(trial, arms, calls, ROUNDS[trial.tier])
    except WorkerFault as fault:
        return failed(fault.status, fault.reason)
    return _conclude(trial, rounds, [a.name for a in arms])


def _add_parent(trial: Trial, arms: list[WorkerArm], calls: dict[str, int]) -> None:
    """The parent in a worker of its own. One that fails now is left out, and the verdict says so."""
    judge = trial.task_judge
    assert trial.parent is not None
    try:
        buffers = judge.parent_outputs
        worker = judge.parent_worker(trial.parent)
        arm = CheckedArm("parent", trial, worker, buffers)
        calls[arm.name] = judge.ready(worker, SUBJECT).calls
        arms.append(arm)
    except WorkerFault as fault:
        trial.notes.append(f"the parent could not be measured ({fault.reason.splitlines()[0]})")


def _measure(trial: Trial, arms: list[WorkerArm], calls: dict[str, int], rounds: int) -> clock.Rounds:
    """Interleaved rounds; the buffers' contents are dealt anew before every block."""
    inputs = trial.task_judge.inputs
    cases = timing_cases(trial)
    contents = [0] * inputs.count

    def deal() -> None:
        for slot in range(inputs.count):
            contents[slot] = random.SystemRandom().randrange(len(cases))
            inputs.write(slot, cases[contents[slot]].inputs)
        inputs.arena.sync()

    def check(arm: Arm, start: int) -> None:
        if isinstance(arm, CheckedArm):
            count = min(inputs.count, calls[arm.name])
            first = 0 if count == inputs.count else start
            arm.check(contents, [(first + i) % inputs.count for i in range(count)])

    result = clock.interleave(
        arms,
        rounds,
        buffers=inputs.count,
        after=check,
        between=deal,
        device=trial.task_judge.device,
    )
    for slot in range(inputs.count):
        if name := inputs.changed_input(slot, cases[contents[slot]].inputs):
            raise WorkerFault("rejected", f"changes its input {name!r} while it is timed")
    return result


def _conclude(trial: Trial, rounds: clock.Rounds, names: list[str]) -> StageResult:
    judge = trial.task_judge
    trusted = next(n for n in names if n not in ("candidate", "parent"))
    if wrong := clock.gate_fault(rounds.samples["candidate"], rounds.samples[trusted]):
        return failed("rejected", wrong)
    ours = clock.confirmed_s(rounds.samples["candidate"], rounds.samples[trusted])
    trial.latency_us = statistics.median(ours) * 1e6
    if ours != rounds.times_s("candidate"):
        claimed = rounds.median_us("candidate")
        trial.notes.append(f"flagged: claims {claimed:.2f} us, which the judge's own clock does not bear out")
    floor = judge.task.roofline_us
    if floor and trial.latency_us < FLOOR * floor:
        text = f"{trial.latency_us:.2f} us is below the roofline of {floor:.2f} us"
        if judge.device.type == "cuda":
            trial.latency_us = None
            return failed("rejected", text)
        trial.notes.append(f"flagged: {text}")
    trial.ratios = {n: paired_ratio(rounds.times_s(n), ours) for n in names if n != "candidate"}
    if "compile" in trial.ratios and trial.ratios["compile"].ratio > FLAG_OVER_COMPILE:
        trial.notes.append(f"flagged: {trial.ratios['compile'].ratio:.1f}x over torch.compile")
    text = ", ".join(f"{r.ratio:.3f}x {n} (at least {r.lower_bound:.3f})" for n, r in trial.ratios.items())
    return StageResult(True, "; ".join([f"{trial.latency_us:.2f} us, {text}", *trial.notes]))
