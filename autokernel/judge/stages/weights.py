"""Static inputs changed in place: whatever a kernel still remembers of the old ones is a wrong answer."""

from __future__ import annotations

from autokernel.judge.handle import WorkerFault
from autokernel.judge.inputs import distributions_for
from autokernel.judge.trial import SUBJECT, StageResult, Trial, failed


def run(trial: Trial) -> StageResult:
    """New weights go through the same path as at load: changed in place, packed again, called."""
    judge = trial.task_judge
    if all(p.role in ("activation", "constant") for p in judge.task.inputs):
        return StageResult(True, "no static inputs")
    worker, _ = trial.running
    kinds = ["normal"]
    if "integers" in distributions_for(judge.task, trial.tier):
        kinds.append("integers")
    original = trial.cases[0].inputs
    try:
        for kind in kinds:
            case = judge.maker.make(kind, fresh_statics=True)
            case.flags.append("weights changed in place")
            trial.e0.pop(kind, None)  # eager's error depends on the weights, too
            judge.inputs.write_statics(case.inputs)
            judge.inputs.arena.sync()
            worker.repack(SUBJECT)
            outputs = trial.run_cases([case], slots=[0])
            trial.check_values(case, outputs[0])
    except WorkerFault as fault:
        return failed(fault.status, fault.reason)
    finally:
        judge.inputs.write_statics(original)
        judge.inputs.arena.sync()
    worker.repack(SUBJECT)
    return StageResult(True)
