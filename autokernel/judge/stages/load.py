"""Load the candidate in a fresh worker and call it once: compilers run here, with their own deadline."""

from __future__ import annotations

from autokernel.backends import KernelSourceError, parse
from autokernel.judge.cases import fresh_seed
from autokernel.judge.trial import SUBJECT, StageResult, Trial


def run(trial: Trial) -> StageResult:
    """The first call is on throw-away data; the seeds that decide are drawn after it."""
    judge = trial.task_judge
    trial.outputs = judge.candidate_outputs
    trial.worker = judge.start_kernel(trial.source, trial.outputs)
    inputs = judge.maker.place(judge.source.draw("normal", fresh_seed(), 1.0))
    judge.inputs.write_statics(inputs)
    judge.inputs.write(0, inputs)
    judge.inputs.arena.sync()
    if judge.device.type == "cuda" and _compiles(trial):
        judge.launcher.top_up()
    trial.worker.run(SUBJECT, [0], first=True)
    return StageResult(True)


def _compiles(trial: Trial) -> bool:
    """Whether its first call is likely to take as long as a worker takes to warm up."""
    try:
        return parse(trial.source).backend != "torch"
    except KernelSourceError:
        return False
