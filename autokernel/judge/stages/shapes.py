"""Shapes that the kernel was not tuned on, where it says ``SHAPES = "any"``; others are guarded at load."""

from __future__ import annotations

from autokernel.backends import KernelSourceError, parse
from autokernel.judge.cases import Case, CaseMaker, worst_e0
from autokernel.judge.handle import WorkerFault
from autokernel.judge.held_out import shapes_of
from autokernel.judge.inputs import InputSource
from autokernel.judge.trial import Bench, StageResult, Trial, failed
from autokernel.records import Task

KINDS = ("normal", "outliers")


def run(trial: Trial) -> StageResult:
    """Only of what is promoted.  Every held-out shape has buffers, answers and eager's errors of its own."""
    if trial.tier == "screen":
        return StageResult(True, "only tried when promoted")
    if not _claims_any(trial):
        return StageResult(True, "the task's own")
    judge = trial.task_judge
    if not judge.held_out:
        return StageResult(True, "the reference takes no other shape than the task's")
    try:
        for task in judge.held_out:
            _try(trial, task)
    except WorkerFault as fault:
        return failed(fault.status, fault.reason)
    return StageResult(True, "also right on " + " and ".join(f"({shapes_of(t)})" for t in judge.held_out))


def _claims_any(trial: Trial) -> bool:
    try:
        return parse(trial.source).shapes == "any"
    except KernelSourceError:
        return False


def _try(trial: Trial, task: Task) -> None:
    judge = trial.task_judge
    maker = CaseMaker(InputSource(task, judge.device), judge.maker.reference)
    with judge.owner.preparing:
        cases = [maker.make(kind) for kind in KINDS]
    worker, outputs = trial.running
    with judge.other_bench(task, maker, len(cases)) as bench:
        bench.inputs.write_statics(cases[0].inputs)
        bench.outputs.attach(worker, bench.inputs)
        _compare(trial, bench, cases, task)
        outputs.attach(worker, judge.inputs)


def _compare(trial: Trial, bench: Bench, cases: list[Case], task: Task) -> None:
    try:
        found = trial.run_cases(cases, slots=range(len(cases)), bench=bench, first=True)
        for slot, case in enumerate(cases):
            trial.check_values(case, found[slot], maker=bench.maker, e0=worst_e0([case]))
    except WorkerFault as fault:
        fault.reason = f"on held-out shapes ({shapes_of(task)}): {fault.reason}"
        raise
