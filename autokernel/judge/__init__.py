"""Verdicts on candidates: correct against float64, faster by paired timing, in processes of their own.

`Judge` opens a task or spawns workers; `TaskJudge.judge` turns a kernel file into a `records.Verdict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autokernel.judge.handle import WorkerFault
    from autokernel.judge.judge import Judge
    from autokernel.judge.layout import TensorSpec
    from autokernel.judge.spawned import PairedResult, SpawnedWorker
    from autokernel.judge.task_judge import TaskError, TaskJudge

__all__ = ["Judge", "PairedResult", "SpawnedWorker", "TaskError", "TaskJudge", "TensorSpec", "WorkerFault"]

_HOMES = {
    "Judge": "judge", "PairedResult": "spawned", "SpawnedWorker": "spawned", "TaskError": "task_judge",
    "TaskJudge": "task_judge", "TensorSpec": "layout", "WorkerFault": "handle",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Lazy, so that the zygote, which needs only the worker's half, starts without the judge's.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
