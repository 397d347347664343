"""``autokernel bench``: one kernel file against one task, judged and logged.

A kernel of a task that lies in a run folder is an experiment of that run: its row, its source and the
baselines go where the loop's own go, it is compared with the best kept kernel of the task, and memory is
asked before and after.  No file is put in place or taken back here; what to do is said.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel import memory
from autokernel.errors import UsageError
from autokernel.proposers.clip import clip_middle, one_line
from autokernel.proposers.proposal import Proposal
from autokernel.records import COLUMNS, TIMED, Experiment, Task, Verdict
from autokernel.results import FILE_NAME, Journal, source_id, source_path, store_source
from autokernel.rows import baseline_row, best_baseline, verdict_row
from autokernel.run_folder import read_run_json
from autokernel.tuner import POINT, TUNED

if TYPE_CHECKING:
    from autokernel.hardware import Ceilings, Device

NO_SLOWER = 0.98
"""A kernel is as fast as another when it is at least this fast with 95 % confidence."""
SIMPLER = 0.9
"""Simpler is at most this part of the other's lines: each such keep may cost speed, so they must be few."""
PRINTED = 4000
"""Characters that are shown of what a kernel printed."""
STARTER, UNNAMED = "starter", "by-hand"


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


def run_of(task: Path) -> Path | None:
    """The run folder that a task folder lies in (``<run>/tasks/<task>`` with a run.json), if it is in one."""
    tasks = task.resolve().parent
    if tasks.name != "tasks" or not (tasks.parent / "run.json").is_file():
        return None
    near = task.parent.parent  # the way the user spelled it, where that is the same folder
    return near if near.resolve() == tasks.parent else tasks.parent


def tags(text: str) -> str:
    """``Fused pass, OpenMP`` -> ``fused-pass,openmp``: the form that memory compares.  Raises UsageError."""
    found = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in text.split(",")]
    if bad := {POINT, TUNED, STARTER} & set(found):
        raise UsageError(f"--strategy {sorted(bad)[0]}: that tag is the loop's own; name the mechanism")
    return ",".join(dict.fromkeys(t for t in found if t))


@dataclass
class Bench:
    """One verdict, its row, the results.tsv it was logged to, and what to do now, as lines for a reader."""

    verdict: Verdict
    row: Experiment
    log: Path
    advice: list[str] = field(default_factory=list)


def bench(
    kernel: Path,
    *,
    task: Path | None,
    reference: Path | None,
    device: str | None,
    run: Path | None,
    strategy: str = "",
    note: str = "",
    agent: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Judge ``kernel`` and log the row.

    It goes to the results.tsv of ``run``, else of the run that the task lies in, else of the current folder.
    ``strategy`` are tags that name the mechanism, ``note`` says why, ``agent`` who proposes it (empty: a
    person).
    ``say`` is told what memory knows, before the judge begins and after it.
    """
    if (task is None) == (reference is None):
        raise UsageError("give either --task DIR or --ref FILE")
    strategy = tags(strategy)
    source, backend, syntax = read_kernel(kernel)
    if run is not None and not run.is_dir():
        raise UsageError(f"no such run folder: {run}")
    if run is None and task is not None:
        run = run_of(task)
    with open_task(task, reference, device) as opened:
        from autokernel import hardware

        where = hardware.detect(opened.device)
        _check_same_device(run, where.name)
        journal = Journal((run or Path()) / FILE_NAME)
        attempt = _Attempt(opened, journal, kernel, source, backend, strategy, note, agent)
        say(f"results go to {journal.path}")
        for line in attempt.recall():
            say(line)
        tag = run.name or run.resolve().name if run else "bench"
        row = attempt.judge(syntax, tag, where, in_run=run is not None and task is not None)
        for line in attempt.recall(after=True):
            say(line)
        return Bench(attempt.verdict, row, journal.path, attempt.advice(row) if task is not None else [])


def _check_same_device(run: Path | None, name: str) -> None:
    """One table holds the times of one device."""
    if run is None or not (run / "run.json").is_file():
        return
    measured = (read_run_json(run).get("device") or {}).get("name")
    if measured and measured != name:
        raise UsageError(
            f"{run} was measured on {measured}, here it is {name}: choose another folder with --run"
        )


@dataclass
class _Attempt:
    """A kernel file on its way into a journal."""

    task: Task
    journal: Journal
    kernel: Path
    source: str
    backend: str
    strategy: str
    note: str
    agent: str
    verdict: Verdict = field(default_factory=lambda: Verdict("infra_error"))

    def __post_init__(self) -> None:
        self.candidate = source_id(self.source)
        rows = self.journal.of_task(self.task.name)
        self.earlier = [r for r in rows if r.candidate == self.candidate and r.status != "infra_error"]
        self.first = not any(r.candidate and r.candidate != self.candidate for r in rows)
        self.best = self._best(rows)

    def _best(self, rows: list[Experiment]) -> Experiment | None:
        """The last keep (each was better than the one before), else the fastest correct kernel."""
        there = [r for r in rows if r.candidate and source_path(self.task.dir, r.candidate).exists()]
        kept = [r for r in there if r.status == "keep"]
        if kept:
            return kept[-1]
        timed = [r for r in there if r.status in TIMED and r.latency_us is not None]
        return min(timed, key=lambda r: r.latency_us or 0.0, default=None)

    @property
    def parent(self) -> Path | None:
        """The kept kernel that this one is compared with; without one, the baselines are what to beat."""
        best = self.best
        if best is None or best.status != "keep" or best.candidate == self.candidate:
            return None
        return source_path(self.task.dir, best.candidate)

    @property
    def is_starter(self) -> bool:
        """kernel.py as it was extracted, as far as the journal tells: nothing else has been tried."""
        return self.first and not self.strategy and self.kernel.resolve() == self._own_file

    @property
    def _own_file(self) -> Path:
        return (self.task.dir / "kernel.py").resolve()

    def recall(self, *, after: bool = False) -> list[str]:
        """What memory has on mechanisms that share a tag with this one; before, also that it was tried."""
        lines = []
        if self.earlier and not after:
            row = self.earlier[-1]
            reason = one_line(row.reason, 300)
            lines.append(f"this very file has a verdict: row {row.experiment}, {row.status}: {reason}")
        known = memory.recall(self.journal.rows, self.task)
        wanted = set(self.strategy.split(",")) - {""}
        alike = [m for m in known if wanted & set(m.strategy.split(","))]
        if alike:
            return lines + [f"memory of {self.task.family}: {one_line(str(m), 300)}" for m in alike]
        if not after:
            text = (
                f"nothing on {self.strategy}" if wanted else "no --strategy TAGS given, so nothing to look up"
            )
            others = ", ".join(m.strategy for m in known[:8])
            lines.append(f"memory of {self.task.family}: {text}" + (f"; tried: {others}" if others else ""))
        return lines

    def judge(self, syntax: str, tag: str, where: Device, *, in_run: bool) -> Experiment:
        """The verdict and its row.  In a run the baselines and the source are recorded as well."""
        from autokernel import hardware

        ceilings = hardware.ceilings(where) if self.task.bytes is not None else None
        if syntax:
            self.verdict = Verdict("compile_error", reason=syntax, stages={"parse": (False, syntax)})
        else:
            self.verdict, baselines = self._measured(in_run)
            if in_run:
                self._log_baselines(baselines, tag, where.name, ceilings)
        if in_run:
            store_source(self.task.dir, self.source)
        row = verdict_row(
            self.task,
            self._proposal(),
            self.verdict,
            tag=tag,
            device=where.name,
            candidate=self.candidate,
            parent="" if self.best is None or self.best.candidate == self.candidate else self.best.candidate,
            ceilings=ceilings if self.verdict.latency_us is not None else None,
        )
        return self.journal.append(row)

    def _proposal(self) -> Proposal:
        description = self.note or f"bench of {self.kernel}"
        if self.is_starter:
            return Proposal(self.source, STARTER, description, self.backend, proposer=STARTER)
        who = "agent" if self.agent else "hand"
        strategy = self.strategy or UNNAMED
        return Proposal(self.source, strategy, description, self.backend, proposer=who, model=self.agent)

    def _measured(self, in_run: bool) -> tuple[Verdict, Mapping[str, float]]:
        """In a run only what is about to be kept is audited, as it may ship; else everything is."""
        from autokernel.judge import Judge

        with Judge(self.task.device) as judge:
            opened = judge.open(self.task)
            try:
                kernel, parent = self.kernel.resolve(), self.parent if in_run else None
                if in_run:
                    verdict = opened.judge(kernel, parent=parent, tier="promote")
                    if verdict.status != "keep" and not self._simpler(verdict, opened.delta):
                        return verdict, opened.baselines
                verdict = opened.judge(kernel, parent=parent, tier="audit")
                if in_run:
                    self._decide(verdict, opened.delta)
                return verdict, opened.baselines
            finally:
                opened.close()

    def _decide(self, verdict: Verdict, delta: float) -> None:
        """What the judge can't know: a region's own code wins by luck only, and less code is better."""
        if verdict.status == "keep" and self.is_starter and self.backend == "torch":
            verdict.status = "discard"
            verdict.reason = f"the region's own code, so that any difference is noise; {verdict.reason}"
        elif reason := self._simpler(verdict, delta):
            verdict.status, verdict.reason = "keep", reason

    def _simpler(self, verdict: Verdict, delta: float) -> str:
        if self.parent is None:
            return ""
        return equal_but_simpler(verdict, delta, self.source, self.parent.read_text(encoding="utf-8"))

    def _log_baselines(
        self, baselines: Mapping[str, float], tag: str, device: str, ceilings: Ceilings | None
    ) -> None:
        known = self.journal.baselines(self.task.name)
        for name, us in baselines.items():
            if name not in known:
                row = baseline_row(self.task, name, us, tag=tag, device=device, ceilings=ceilings)
                self.journal.append(row)

    def advice(self, row: Experiment) -> list[str]:
        """What to do with the file; nothing is copied here."""
        own = self.task.dir / "kernel.py"
        if row.status == "keep":
            if self.kernel.resolve() == self._own_file:
                return [f"{own} is the task's best now: leave it as it is"]
            return [f"the task's best now; put it in place: cp {self.kernel} {own}"]
        if self.best is None or self.best.candidate == self.candidate:
            return []
        best = source_path(self.task.dir, self.best.candidate)
        speed = (
            "" if self.best.latency_us is None else f", {self.best.latency_us:.2f} µs when it was measured"
        )
        what = (
            "the best kept kernel"
            if self.best.status == "keep"
            else "no kernel is kept yet; the fastest correct one"
        )
        return [f"{what}: row {self.best.experiment}{speed}; to go on from it: cp {best} {own}"]


def equal_but_simpler(verdict: Verdict, delta: float, source: str, parent: str) -> str:
    """Why a kernel that is no faster than its parent is kept all the same; empty when it is not.

    It is no slower (`NO_SLOWER`), still beats the best baseline, and has clearly less code (`SIMPLER`).
    """
    from autokernel.judge.stats import faster

    ratio, best = verdict.vs_parent, best_baseline(verdict)
    if verdict.status != "discard" or ratio is None or best is None:
        return ""
    ours, theirs = code_lines(source), code_lines(parent)
    if ratio.low < NO_SLOWER or not faster(best, delta) or ours > SIMPLER * theirs:
        return ""
    return (
        f"as fast as its parent ({ratio.ratio:.3f}x, at least {ratio.low:.3f}) in {ours} lines, not {theirs}"
    )


def code_lines(source: str) -> int:
    """Lines that are neither empty nor a comment, those of C++ in strings included (``#pragma`` is code)."""
    lines = [line.strip() for line in source.splitlines()]
    return sum(1 for line in lines if line and not line.startswith(("# ", "#:", "//")) and line != "#")


def printed(verdict: Verdict) -> str:
    """What a kernel that is wrong has printed, for whoever repairs it; ``""`` for a right one, or nothing."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in verdict.log.strip())
    return f"it printed:\n{clip_middle(text, PRINTED)}" if text and not verdict.correct else ""


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
