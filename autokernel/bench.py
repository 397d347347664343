"""``autokernel bench``: one kernel file against one task, judged and logged."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autokernel.errors import UsageError
from autokernel.proposers.proposal import Proposal
from autokernel.records import COLUMNS, Experiment, Task, Verdict
from autokernel.results import FILE_NAME, Journal, source_id
from autokernel.rows import verdict_row


def read_kernel(path: Path) -> tuple[str, str, str]:
    """Source and backend of a kernel file, and what is wrong with its syntax (empty when nothing is).

    Raises UsageError for what can't be a kernel at all: no readable text, an unknown backend, no entry
    point.  The file is parsed, never run.
    """
    from autokernel import backends

    try:
        info = backends.read_kernel(path)
    except backends.KernelSourceError as error:
        if isinstance(error.__cause__, SyntaxError):
            return backends.read_source(path), "", str(error)
        raise UsageError(str(error)) from None
    return info.source, info.backend, ""


@contextlib.contextmanager
def open_task(task: Path | None, reference: Path | None, device: str | None) -> Iterator[Task]:
    """The task of ``--task`` or ``--ref``.  Raises UsageError when it is no good."""
    if task is not None:
        if not (task / "task.json").is_file():
            raise UsageError(f"{task} is not a task folder: it has no task.json")
        try:
            loaded = Task.load(task)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{task}/task.json is damaged: {error}") from None
        yield replace(loaded, device=device) if device else loaded
        return
    from autokernel import hardware
    from autokernel.reference_task import make_task

    assert reference is not None
    where = str(hardware.torch_device(device or default_device()))
    with tempfile.TemporaryDirectory(prefix="autokernel-bench-") as folder:
        yield make_task(reference, Path(folder), where)


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def bench(
    kernel: Path, *, task: Path | None, reference: Path | None, device: str | None, run: Path | None
) -> tuple[Verdict, Experiment, Path]:
    """Judge ``kernel`` and log the row; returns the verdict, the row and where it was logged.

    The log is ``results.tsv`` of the run folder ``run``, or of the current folder.
    """
    if (task is None) == (reference is None):
        raise UsageError("give either --task DIR or --ref FILE")
    source, backend, syntax = read_kernel(kernel)
    if run is not None and not run.is_dir():
        raise UsageError(f"no such run folder: {run}")
    with open_task(task, reference, device) as opened:
        from autokernel import hardware

        where = hardware.detect(opened.device)
        journal = Journal((run or Path()) / FILE_NAME)
        if syntax:
            verdict = Verdict("compile_error", reason=syntax, stages={"parse": (False, syntax)})
        else:
            verdict = _judge(kernel.resolve(), opened)
        timed = verdict.latency_us is not None and opened.bytes is not None
        proposal = Proposal(source, "", f"bench of {kernel}", backend, proposer="hand")
        row = verdict_row(
            opened,
            proposal,
            verdict,
            tag=run.name if run else "bench",
            device=where.name,
            candidate=source_id(source),
            ceilings=hardware.ceilings(where) if timed else None,
        )
        return verdict, journal.append(row), journal.path


def _judge(kernel: Path, task: Task) -> Verdict:
    from autokernel.judge import Judge

    with Judge(task.device) as judge:
        opened = judge.open(task)
        try:
            return opened.judge(kernel, tier="audit")
        finally:
            opened.close()


def exit_code(verdict: Verdict) -> int:
    """0 correct, 1 not, 2 when the environment failed and nothing is known of the kernel."""
    if verdict.status == "infra_error":
        return 2
    return 0 if verdict.correct else 1


def to_json(verdict: Verdict, row: Experiment) -> dict[str, Any]:
    """One object: the columns of results.tsv, and ``stages``."""
    data = asdict(row)
    stages = {name: {"passed": passed, "reason": reason} for name, (passed, reason) in verdict.stages.items()}
    return {**{name: data[name] for name in COLUMNS}, "stages": stages}
