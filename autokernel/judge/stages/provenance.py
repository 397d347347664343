"""Whose code ran: the candidate's own, a library's, or both. A label on the verdict, and never a fault."""

from __future__ import annotations

from autokernel.judge import trace
from autokernel.judge.handle import WorkerFault
from autokernel.judge.trial import SUBJECT, StageResult, Trial


def run(trial: Trial) -> StageResult:
    """Only of what is promoted; after everything that is timed, since a profiler slows what runs after it."""
    if trial.tier == "screen":
        return StageResult(True, "only looked at when promoted")
    worker, _ = trial.running
    try:
        told = worker.trace(SUBJECT, 0)
    except WorkerFault as fault:
        return StageResult(True, f"unknown: {fault.reason.splitlines()[0]}")
    source = trial.source.read_text(encoding="utf-8", errors="surrogateescape")
    trial.provenance, text = trace.classify(told, source, trial.task_judge.device)
    return StageResult(True, text)
