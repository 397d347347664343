"""Form and values of the outputs on secret data, with poisoned memory, and inputs left alone."""

from __future__ import annotations

from autokernel.judge.buffers import PATTERNS
from autokernel.judge.cases import Case, worst_e0
from autokernel.judge.handle import WorkerFault
from autokernel.judge.inputs import distributions_for
from autokernel.judge.trial import StageResult, Trial, failed

SEEDS = {"screen": 2, "promote": 5, "audit": 5}
ONCE = {"zero rows", "small rows", "small", "wide", "nan"}


def run(trial: Trial) -> StageResult:
    judge = trial.task_judge
    make_cases(trial)
    count = judge.inputs.count
    try:
        for start in range(0, len(trial.cases), count):
            batch = trial.cases[start : start + count]
            for pattern in PATTERNS if trial.tier != "screen" else PATTERNS[:1]:
                outputs = trial.run_cases(batch, slots=range(len(batch)), pattern=pattern)
                for slot, case in enumerate(batch):
                    trial.check_values(case, outputs[slot])
        if trial.tier != "screen":
            _check_views(trial)
    except WorkerFault as fault:
        return failed(fault.status, fault.reason)
    return StageResult(True, f"{len(trial.cases)} cases, at most {trial.error_ratio or 0:.3g}x eager's error")


def make_cases(trial: Trial) -> None:
    """Draw the cases (fresh secret seeds) and eager's own error on each kind of data."""
    maker = trial.task_judge.maker
    by_kind: dict[str, list[Case]] = {
        kind: [maker.make(kind) for _ in range(1 if kind in ONCE else SEEDS[trial.tier])]
        for kind in distributions_for(trial.task_judge.task, trial.tier)
    }
    if trial.task_judge.source.has_captured:
        by_kind["captured"] = [maker.make("captured")]
    # Cases with static inputs of their own ("integers" on a linear op) can't share a run with the others.
    trial.cases = [c for kind, cases in by_kind.items() if kind != "integers" for c in cases]
    trial.e0 = {kind: worst_e0(cases) for kind, cases in by_kind.items()}
    trial.task_judge.inputs.write_statics(trial.cases[0].inputs)


def _check_views(trial: Trial) -> None:
    case = trial.cases[0]
    for name, slot in trial.task_judge.inputs.views.items():
        outputs = trial.run_cases([case], slots=[slot])
        trial.check_values(case, outputs[slot], context=f" (inputs {name})")
