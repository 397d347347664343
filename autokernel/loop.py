"""The six steps for one task, in this order, each round until nothing is left to try:

    1. recall       what memory knows of this family                     autokernel.memory
    2. hypothesize  the next proposer that has an idea                   autokernel.proposers
    3. edit         the idea's whole kernel.py into attempts/<sha12>.py  autokernel.results
    4. verify       is it correct, in a process of its own               autokernel.judge (screen)
    5. benchmark    is it faster; measured again on fresh seeds if so,   autokernel.judge (promote)
                    and its SPACE searched                               autokernel.tuner
    6. decide       keep or discard: a row in the journal, kernel.py;    autokernel.results
                    what the proposer learns from it                     autokernel.memory

One call of the judge does 4 and 5.  The journal is the only state: a round that was interrupted leaves no
row and is done again, a source that has a verdict is not tried twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from autokernel import memory, scheduler
from autokernel.errors import AutokernelError
from autokernel.hardware import Ceilings
from autokernel.proposers.base import Learner, Proposer, TaskState
from autokernel.proposers.playbook import backend_of
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import TIMED, Experiment, Task, Verdict
from autokernel.results import Journal, source_id, source_path, store_source, write_text_atomically
from autokernel.rows import baseline_row, failure_row, verdict_row
from autokernel.scheduler import Limits
from autokernel.tuner import POINT, TUNED, SpaceError, defaults_of, space_of, tune

TUNER = "tuner"
TUNE_BUDGET = 12
WORTH_TUNING = 0.7
"""A correct kernel slower than this part of the best baseline's speed isn't tuned: numbers won't save it."""
MAX_INFRA_ERRORS = 3


class TaskJudge(Protocol):
    """What the loop needs of `autokernel.judge`'s judge of one task."""

    @property
    def baselines(self) -> dict[str, float]: ...

    @property
    def baseline_failures(self) -> dict[str, str]: ...

    def judge(
        self, source: Path, *, parent: Path | None = None, tier: Literal["screen", "promote"] = "screen"
    ) -> Verdict: ...

    def sweep(self, sources: Sequence[Path]) -> list[Verdict]: ...

    def close(self) -> None: ...


@dataclass
class TaskResult:
    """How the loop on one task ended.

    ``kept`` is the source of the best kept kernel and ``row`` its row, if there is one.  ``entrant`` is the
    row of the kernel to try in the whole model (see `scheduler.model_candidate`), ``why`` what ended it.
    """

    task: Task
    kept: Path | None = None
    row: Experiment | None = None
    entrant: Experiment | None = None
    why: str = ""

    @property
    def speedup(self) -> float | None:
        return self.row.speedup_vs_best_baseline if self.row else None


class _Refused(Exception):
    """The judge can't open this task: its reference doesn't run, say.  It ends the task, not the run."""


@dataclass
class TaskLoop:
    """The loop of one task.  ``open_judge`` is called only when there is something to judge: opening a
    task measures its baselines, which a resumed run that has nothing left to try needn't pay for.
    ``on_row`` is told of every row as it is written.  ``ceilings`` are the device's, for the rows' bound."""

    task: Task
    journal: Journal
    open_judge: Callable[[Task], TaskJudge]
    proposers: Sequence[Proposer]
    tag: str
    device: str
    limits: Limits = field(default_factory=Limits)
    on_row: Callable[[Experiment], None] = lambda row: None
    tune_budget: int = TUNE_BUDGET
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        self._judge: TaskJudge | None = None
        self._infra_errors = 0
        self._swept: dict[str, Verdict] = {}
        self._verdicts: dict[str, Verdict] = {}

    def run(self) -> TaskResult:
        """All rounds.  A failing candidate is a row; what is raised is our own bug, or the disk's."""
        self._restore()
        why = ""
        try:
            self._finish_tuning()
            while not (why := self._ended()):
                state = self.recall()
                idea = self.hypothesize(state)
                if idea is None:
                    why = "nothing left to try"
                    break
                if isinstance(idea, Failure):
                    self._append(failure_row(self.task, idea, tag=self.tag, device=self.device))
                    continue
                candidate = self.edit(idea)
                if candidate is None:
                    continue
                verdict = self.verify_and_benchmark(candidate)
                self.learn(state, idea, candidate, verdict)
                row = self.decide(idea, candidate, verdict)
                self._tune(row)
        except _Refused as error:
            why = f"it can't be judged: {error}"
            refusal = Failure(f"the task can't be judged: {error}", proposer="judge")
            self._append(failure_row(self.task, refusal, tag=self.tag, device=self.device))
        finally:
            if self._judge is not None:
                self._judge.close()
                self._judge = None
        return self.result(why)

    # 1
    def recall(self) -> TaskState:
        rows = self.journal.of_task(self.task.name)
        base = self._base(rows)
        current = self._source(base.candidate) if base else None
        return TaskState(
            task=self.task,
            reference=_read(self.task.dir / "reference.py"),
            current=_read(current) if current else _read(self.task.dir / "kernel.py"),
            current_latency_us=base.latency_us if base else None,
            ahead=bool(base and base.status == "keep"),
            baselines=self.journal.baselines(self.task.name),
            history=rows,
            tried=frozenset(self.journal.tried(self.task.name)),
            recall=memory.describe(
                memory.recall(self.journal.rows, self.task),
                memory.reflections(self.journal.path.parent, self.task),
            ),
            verdicts=self._verdicts,
        )

    # 2
    def hypothesize(self, state: TaskState) -> Proposal | Failure | None:
        for proposer in self.proposers:
            stagnant = scheduler.stagnant_rounds(state.history, proposer.name)
            if proposer.patience is not None and stagnant >= proposer.patience:
                continue
            idea = proposer.propose(state)
            if idea is not None:
                return idea
        return None

    # 3
    def edit(self, proposal: Proposal) -> Path | None:
        """The candidate's file; None for a source that has had its verdict, which gets a row without one."""
        name = source_id(proposal.source)
        if name in self.journal.tried(self.task.name):
            verdict = Verdict("discard", reason=f"the same file as an earlier attempt, {name}")
            self._append(self._row(proposal, verdict, candidate=name))
            return None
        return store_source(self.task.dir, proposal.source)[1]

    # 4 and 5
    def verify_and_benchmark(self, candidate: Path) -> Verdict:
        """Screened first; what looks faster is measured again on fresh seeds, and only that counts."""
        judge = self._opened()
        verdict = judge.judge(candidate, parent=self._parent(), tier="screen")
        if verdict.status != "keep":
            return verdict
        screened = verdict.seconds
        verdict = judge.judge(candidate, parent=self._parent(), tier="promote")
        verdict.seconds += screened
        return verdict

    def learn(self, state: TaskState, proposal: Proposal, candidate: Path, verdict: Verdict) -> None:
        """What its proposer makes of the verdict goes to memory, before the row: its cost is in the row."""
        self._verdicts[candidate.stem] = verdict
        for proposer in self.proposers:
            if proposer.name != proposal.proposer or not isinstance(proposer, Learner):
                continue
            if not self.limits.reached(self.journal.rows):
                row = self._row(proposal, verdict, candidate=candidate.stem)
                if (lesson := proposer.learn(state, proposal, row)) is not None:
                    memory.remember(self.journal.path.parent, lesson)

    # 6
    def decide(self, proposal: Proposal, candidate: Path, verdict: Verdict) -> Experiment:
        base = self._base(self.journal.of_task(self.task.name))
        parent = base.candidate if base else ""
        if verdict.status == "keep" and proposal.proposer == "starter" and proposal.backend == "torch":
            verdict.status = "discard"
            verdict.reason = f"the region's own code, so that any difference is noise; {verdict.reason}"
        row = self._append(self._row(proposal, verdict, candidate=candidate.stem, parent=parent))
        if row.status == "keep":
            write_text_atomically(self.task.dir / "kernel.py", proposal.source)
        elif proposal.proposer == "hand":
            self._restore()
        return row

    def result(self, why: str) -> TaskResult:
        row = self._kept()
        entrant = scheduler.model_candidate(self.journal.of_task(self.task.name))
        return TaskResult(self.task, self._source(row.candidate) if row else None, row, entrant, why)

    # The SPACE of a kernel that was just judged.
    def _tune(self, row: Experiment) -> None:
        """Search the SPACE of a correct candidate, and judge the best point as a candidate of its own.

        Every point is a row; none of them is kept by its screening alone.
        """
        speed = row.speedup_vs_best_baseline
        if row.status not in ("keep", "discard") or speed is None or speed < WORTH_TUNING:
            return
        source = _read(self._source(row.candidate))
        try:
            if not space_of(source):
                return
            tuned = tune(
                source,
                lambda text: self._measure_point(row, text),
                budget=self.tune_budget,
                start_latency_us=row.latency_us,
                precompile=self._sweep,
                should_stop=lambda: bool(self.limits.reached(self.journal.rows)),
            )
        except SpaceError as error:
            bad = Verdict("compile_error", reason=f"its SPACE can't be searched: {error}")
            self._append(
                self._row(self._point(row, source, TUNED, ""), bad, candidate="", parent=row.candidate)
            )
            return
        if self.limits.stop():
            return  # the search is taken up again by the next command
        values = ", ".join(f"{name}={value}" for name, value in tuned.values.items())
        text = f"best of {len(tuned.measured)} points of its SPACE: {values}"
        proposal = self._point(row, tuned.source, f"{row.strategy},{TUNED}".strip(","), text)
        if tuned.values == defaults_of(source):
            same = Verdict("discard", reason="the values in the file are the best")
            self._append(self._row(proposal, same, candidate="", parent=row.candidate))
            return
        candidate = store_source(self.task.dir, tuned.source)[1]
        verdict = self.verify_and_benchmark(candidate)
        kept = self._append(self._row(proposal, verdict, candidate=candidate.stem, parent=row.candidate))
        if kept.status == "keep":
            write_text_atomically(self.task.dir / "kernel.py", tuned.source)

    def _measure_point(self, row: Experiment, text: str) -> float | None:
        name = source_id(text)
        for earlier in self.journal.of_task(self.task.name):
            if earlier.candidate == name and earlier.status != "infra_error":
                return earlier.latency_us
        if name not in self._swept:
            self._sweep([text])
        verdict = self._swept.pop(name)
        proposal = self._point(row, text, f"{row.strategy},{POINT}".strip(","), "a point of its SPACE")
        self._append(self._row(proposal, verdict, candidate=name, parent=row.candidate))
        return verdict.latency_us

    def _sweep(self, texts: Sequence[str]) -> None:
        """Verdicts of points that have none yet, all from one worker."""
        known = {r.candidate for r in self.journal.of_task(self.task.name) if r.status != "infra_error"}
        files = [store_source(self.task.dir, text)[1] for text in texts if source_id(text) not in known]
        for file, verdict in zip(files, self._opened().sweep(files), strict=True):
            self._swept[file.stem] = verdict

    def _finish_tuning(self) -> None:
        """Take up the search that an interruption cut short: the last candidate whose SPACE has no result."""
        rows = self.journal.of_task(self.task.name)
        attempts = [r for r in rows if r.proposer not in ("", TUNER)]
        if not attempts or self.limits.reached(self.journal.rows):
            return
        last = attempts[-1]
        done = any(r.parent == last.candidate and TUNED in r.strategy.split(",") for r in rows)
        if not done and last.candidate and self._source(last.candidate).exists():
            self._tune(last)

    @staticmethod
    def _point(row: Experiment, source: str, strategy: str, description: str) -> Proposal:
        return Proposal(source, strategy, description, row.backend or backend_of(source), proposer=TUNER)

    # Helpers.
    def _ended(self) -> str:
        if self._infra_errors >= MAX_INFRA_ERRORS:
            return f"{self._infra_errors} infrastructure errors in a row"
        kept = self._kept()
        finished = scheduler.finished(self.task, kept.latency_us if kept else None)
        return self.limits.reached(self.journal.rows) or finished

    def _opened(self) -> TaskJudge:
        if self._judge is None:
            try:
                self._judge = self.open_judge(self.task)
            except AutokernelError as error:
                raise _Refused(str(error)) from error
            known = {r.backend for r in self.journal.of_task(self.task.name) if r.status == "baseline"}
            for name, latency_us in self._judge.baselines.items():
                if name not in known:
                    row = baseline_row(
                        self.task, name, latency_us, tag=self.tag, device=self.device, ceilings=self.ceilings
                    )
                    self._append(row)
        return self._judge

    def _row(self, proposal: Proposal, verdict: Verdict, *, candidate: str, parent: str = "") -> Experiment:
        return verdict_row(
            self.task,
            proposal,
            verdict,
            tag=self.tag,
            device=self.device,
            candidate=candidate,
            parent="" if parent == candidate else parent,
            ceilings=self.ceilings,
        )

    def _append(self, row: Experiment) -> Experiment:
        row = self.journal.append(row)
        self._infra_errors = self._infra_errors + 1 if row.status == "infra_error" else 0
        self.on_row(row)
        return row

    def _kept(self) -> Experiment | None:
        """The last keep: each was better than the one before."""
        rows = [r for r in self.journal.of_task(self.task.name) if r.status == "keep"]
        return rows[-1] if rows else None

    def _base(self, rows: Sequence[Experiment]) -> Experiment | None:
        """What the next edit starts from: the kept kernel, else the fastest correct one."""
        kept = self._kept()
        if kept is not None:
            return kept
        correct = [r for r in rows if r.candidate and r.status in TIMED and r.latency_us is not None]
        return min(correct, key=lambda r: r.latency_us or 0.0, default=None)

    def _parent(self) -> Path | None:
        """What a candidate is compared with: a kept kernel, never a mere starter (then: the baselines)."""
        kept = self._kept()
        return self._source(kept.candidate) if kept else None

    def _source(self, candidate: str) -> Path:
        return source_path(self.task.dir, candidate)

    def _restore(self) -> None:
        """Make kernel.py the kept kernel again, unless it holds an edit that was never judged."""
        kept = self._kept()
        path = self.task.dir / "kernel.py"
        if kept is None:
            return
        text = _read(path)
        best = self._source(kept.candidate)
        if source_id(text) in self.journal.tried(self.task.name) and source_id(text) != kept.candidate:
            write_text_atomically(path, _read(best))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
