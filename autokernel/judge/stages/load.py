"""Load the candidate in a fresh worker and call it once: compilers run here, with their own deadline."""

from __future__ import annotations

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
    trial.worker.run(SUBJECT, [0], first=True)
    return StageResult(True)
