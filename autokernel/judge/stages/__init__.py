"""The stages a candidate goes through, in order. To add one: a file here, and a line in STAGES.

A stage is a module with ``run(trial) -> StageResult``.  The first that fails ends the trial.
"""

from __future__ import annotations

from collections.abc import Callable

from autokernel.judge.stages import (
    audit,
    correctness,
    load,
    provenance,
    resources,
    shapes,
    static,
    timing,
    weights,
)
from autokernel.judge.trial import StageResult, Trial

STAGES: dict[str, Callable[[Trial], StageResult]] = {
    "static": static.run,
    "load": load.run,
    "correctness": correctness.run,
    "weights": weights.run,
    "shapes": shapes.run,
    "timing": timing.run,
    "resources": resources.run,
    "provenance": provenance.run,
    "audit": audit.run,
}
