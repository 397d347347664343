"""The whole run: a model in, a faster model out.

    baselines   the whole model as torch gives it for free       integrate.endtoend
    tasks       capture, profile, extract                        session
    loop        the six steps, task by task                      loop
    selection   kernels into the model, one by one               integrate.endtoend
    report      the final table, report.md                       report

Every step leaves its result in the run folder, and a run that was stopped goes on from there: baselines and
experiments that results.tsv holds are not measured again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel import scheduler
from autokernel.errors import AutokernelError, UsageError
from autokernel.interrupt import Interrupt
from autokernel.loop import TaskLoop, TaskResult
from autokernel.profile_records import break_lines
from autokernel.proposers.base import Proposer
from autokernel.proposers.choice import Choice, choose
from autokernel.proposers.facts import DeviceFacts, facts_of
from autokernel.proposers.llm import LLMProposer
from autokernel.proposers.playbook import PlaybookProposer, StarterProposer
from autokernel.records import Experiment, Task
from autokernel.report.markdown import render_markdown
from autokernel.report.summary import MODEL, OURS, Summary, final_row, summarize
from autokernel.report.terminal import print_row, working
from autokernel.results import Journal, source_path, write_text_atomically
from autokernel.run_folder import RunFolder, RunRecord, run_stem
from autokernel.scheduler import Limits
from autokernel.session import Session

if TYPE_CHECKING:
    from rich.console import Console

    from autokernel.capture.source import SourceSpec
    from autokernel.hardware import Ceilings
    from autokernel.judge import Judge

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_budget(text: str) -> float:
    """``8h``, ``30m``, ``1h30m``, ``90s`` or plain seconds -> seconds.  Raises UsageError."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    elif re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        seconds = sum(float(n) * _UNITS[u] for n, _, u in re.findall(r"(\d+(\.\d+)?)([smhd])", text))
    else:
        raise UsageError(f"--budget {text!r} is no time span: write 8h, 30m, 1h30m or a number of seconds")
    if seconds <= 0:
        raise UsageError("--budget must be more than nothing")
    return seconds


@dataclass(frozen=True)
class Options:
    """How far a run goes and who proposes; what is measured is in the SourceSpec."""

    top: int = 8
    budget_s: float | None = None
    max_experiments: int | None = None
    max_usd: float | None = None
    max_tokens: int | None = None
    llm: str | None = None
    base_url: str | None = None
    price: str | None = None
    effort: str | None = None
    playbook: bool = True
    fresh: bool = False
    max_autotune: bool = False


class Stopped(AutokernelError):
    """The run was interrupted; everything measured is in its folder ``run``."""

    def __init__(self, run: Path) -> None:
        super().__init__(f"stopped; what was measured is in {run}")
        self.run = run


def optimize(spec: SourceSpec, run: Path | None, options: Options, out: Console) -> tuple[Path, Summary]:
    """Optimize the model of ``spec``; returns the run folder and what came of it.

    "Nothing helped" is a result and no error.  Raises UsageError, RunFolderError, and Stopped after Ctrl-C.
    """
    choice = asked(options)
    with ExitStack() as stack:
        judges: list[Judge] = []

        def judge() -> None:
            from autokernel.judge import Judge

            judges.append(stack.enter_context(Judge(spec.device)))

        session = stack.enter_context(Session.start(spec, run, fresh=options.fresh, out=out, beside=judge))
        try:
            announce(choice, session.journal, out)
            _run(session, judges[0], options, choice)
        except KeyboardInterrupt:
            raise Stopped(session.path) from None
        return session.path, finish(session.path, session.journal)


def chosen(options: Options) -> Choice | None:
    """The model that proposes, or None.  Raises UsageError for a choice or a limit that makes no sense."""
    choice = choose(
        options.llm,
        options.base_url,
        price=options.price,
        effort=options.effort,
        max_usd=options.max_usd,
        max_tokens=options.max_tokens,
    )
    if choice is None and not options.playbook:
        raise UsageError("--no-playbook leaves nobody to propose kernels: add --llm PROVIDER:MODEL")
    return choice


def asked(options: Options) -> Choice | None:
    """The same, ready to be asked: a missing key, too, is reported before anything is measured."""
    choice = chosen(options)
    if choice is not None:
        _ = choice.provider
    return choice


def count_spent(choice: Choice, journal: Journal) -> None:
    """What earlier commands on this run spent counts, too."""
    for row in journal.rows:
        choice.spending.add(row.tokens_in, row.tokens_out, row.cost_usd)


def announce(choice: Choice | None, journal: Journal, out: Console) -> None:
    """Say who is asked, and under which limits."""
    if choice is not None:
        count_spent(choice, journal)
        out.print(choice.describe(), markup=False)


def _run(session: Session, judge: Judge, options: Options, choice: Choice | None) -> None:
    from autokernel import hardware
    from autokernel.integrate.endtoend import EndToEnd, KeptKernel
    from autokernel.integrate.selection import counted

    started = time.monotonic()
    out = session.out
    with Interrupt(out.print) as interrupt:

        def journal_row(row: Experiment) -> Experiment:
            row = session.journal.append(row)
            print_row(row, out)
            interrupt.check()
            return row

        def whole_model() -> EndToEnd:
            """With the rows of this moment: what the journal holds isn't measured again."""
            return EndToEnd(
                session.loaded,
                session.path,
                judge,
                journal_row,
                graphs=session.graphs,
                rows=session.journal.rows,
                rows_are_old=session.resumed,
                max_autotune=options.max_autotune,
                say=lambda text: out.print(text, markup=False, style="dim"),
            )

        if session.extracted() is None:
            for line in break_lines(session.graphs().breaks):  # captured now: the judge is still starting
                out.print(line, markup=False)
        with working("Measuring the baselines of the whole model …", out):
            whole_model().baselines()
        interrupt.check()
        plans = scheduler.plan(session.tasks(options.top))
        interrupt.check()
        if session.loaded.spec.device.startswith("cuda"):
            times = {p.task.fingerprint: session.journal.baselines(p.task.name) for p in plans}
            new = [p.task for p in plans if p.effort != "skip" and not times[p.task.fingerprint]]
            if new:
                with working(f"Compiling the references of {counted(new, 'task')} …", out):
                    times |= judge.prepare(new)
                interrupt.check()
            plans = scheduler.reordered(plans, times)
        limits = limits_of(options, session.journal, started, interrupt)
        ceilings = hardware.ceilings(hardware.detect(session.loaded.spec.device))  # the profile's, cached
        results = run_tasks(
            plans,
            session.journal,
            judge.open,
            proposers_of(
                options,
                choice,
                session.context_of,
                facts_of(session.loaded.spec.device, ceilings),
                session.path,
                limits,
                out,
            ),
            limits=limits,
            tag=session.folder.name,
            device=session.device,
            out=out,
            ceilings=ceilings,
        )
        judge.release()
        interrupt.check()
        entrants = [(r.task, r.entrant) for r in results if r.entrant is not None]
        if selection_is_current(session.journal.rows, [row for _, row in entrants], session.path):
            return
        kernels = [
            KeptKernel(
                task,
                source_path(task.dir, row.candidate),
                row.speedup_vs_best_baseline or 1.0,
                tuple(
                    source_path(task.dir, other.candidate)
                    for other in scheduler.alternatives(session.journal.of_task(task.name), row)
                ),
            )
            for task, row in entrants
        ]
        with working(f"Trying {counted(kernels, 'kernel')} in the whole model …", out):
            whole_model().select(kernels)


def selection_is_current(rows: Sequence[Experiment], entrants: Sequence[Experiment], run: Path) -> bool:
    """Whether the run's last whole-model measurement came after every kernel that is to be tried in it."""
    final = final_row([r for r in rows if r.task == MODEL and r.backend == OURS])
    if final is None:
        return False
    if final.status == "keep" and not (run / "optimized" / "manifest.json").exists():
        return False
    return all(row.experiment < final.experiment for row in entrants)


def proposers_of(
    options: Options,
    choice: Choice | None,
    context_of: Callable[[Task], Any] | None,
    facts: DeviceFacts,
    run: Path,
    limits: Limits,
    out: Console,
) -> list[Proposer]:
    """Who is asked, in order.  A language model only when one was chosen."""
    proposers: list[Proposer] = [StarterProposer()]
    if options.playbook and context_of is not None:
        proposers.append(PlaybookProposer(context_of))
    if choice is not None:
        record = None if choice.name == "replay" else run / "llm.jsonl"
        proposers.append(
            LLMProposer(
                choice.provider,
                device=facts,
                spending=choice.spending,
                record=record,
                say=lambda text: out.print(text, markup=False),
                stop=lambda: bool(limits.reached(())),  # a pause ends with the time budget, or with Ctrl-C
            )
        )
    return proposers


def limits_of(options: Options, journal: Journal, started: float, interrupt: Interrupt) -> Limits:
    """``--budget`` counts the time of earlier commands on this run too, as the journal tells it."""
    deadline = None
    if options.budget_s is not None:
        spent = sum(row.seconds or 0.0 for row in journal.rows)
        deadline = started + max(options.budget_s - spent, 0.0)
    return Limits(options.max_experiments, deadline, lambda: interrupt.requested)


def run_tasks(
    plans: Sequence[scheduler.Plan],
    journal: Journal,
    open_judge: Callable[[Task], Any],
    proposers: Sequence[Proposer],
    *,
    limits: Limits,
    tag: str,
    device: str,
    out: Console,
    ceilings: Ceilings | None = None,
) -> list[TaskResult]:
    """The loop over all tasks, in the scheduler's order."""
    results = []
    for number, plan in enumerate(plans, start=1):
        head = f"[{number}/{len(plans)}] {plan.task.name}"
        if plan.effort == "skip":
            out.print(f"{head}: not worth it: {plan.why}", markup=False, style="dim")
            continue
        out.print(f"{head}{f': only its starter: {plan.why}' if plan.why else ''}", markup=False)
        loop = TaskLoop(
            plan.task,
            journal,
            open_judge,
            list(proposers) if plan.effort == "full" else [StarterProposer()],
            tag=tag,
            device=device,
            limits=limits,
            on_row=lambda row: print_row(row, out),
            ceilings=ceilings,
        )
        result = loop.run()
        out.print(f"  {plan.task.name}: {result.why}", markup=False, style="dim")
        results.append(result)
        if limits.stop():
            break
    return results


def finish(path: Path, journal: Journal) -> Summary:
    """The summary of a run; also written as report.md."""
    summary = summarize(journal.rows)
    write_text_atomically(path / "report.md", render_markdown(summary))
    return summary


def optimize_kernel(
    kernel: Path, reference: Path, device: str, run: Path | None, options: Options, out: Console
) -> tuple[Path, Summary]:
    """Optimize one kernel file against a reference: the loop on a single task, and no whole model.

    The user's file is the starter; the best kernel ends up in the task folder's kernel.py.
    """
    from autokernel.judge import Judge

    choice = asked(options)
    started = time.monotonic()
    with RunFolder(run or Path("runs") / run_stem(str(kernel)), fresh=options.fresh) as folder:
        task, where = kernel_task(folder, kernel, reference, device)
        journal = folder.journal()
        announce(choice, journal, out)
        try:
            with Judge(device) as judge, Interrupt(out.print) as interrupt:
                limits = limits_of(options, journal, started, interrupt)
                run_tasks(
                    [scheduler.Plan(task, "full")],
                    journal,
                    judge.open,
                    proposers_of(options, choice, None, facts_of(device), folder.path, limits, out),
                    limits=limits,
                    tag=folder.name,
                    device=where,
                    out=out,
                )
                interrupt.check()
        except KeyboardInterrupt:
            raise Stopped(folder.path) from None
        return folder.path, finish(folder.path, journal)


def kernel_task(folder: RunFolder, kernel: Path, reference: Path, device: str) -> tuple[Task, str]:
    """The task of one kernel file, made in ``folder`` or found there, and the device's name."""
    from autokernel import hardware
    from autokernel.reference_task import make_task
    from autokernel.results import source_id

    try:
        source = kernel.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the kernel {kernel}: {error}") from None
    where = hardware.detect(device)
    record = RunRecord(
        arguments={"model": str(kernel), "ref": str(reference), "device": device},
        identity=source_id(source + reference.read_text(encoding="utf-8", errors="replace")),
        versions={k: str(v) for k, v in hardware.versions().items() if v is not None},
        device=where.to_json(),
    )
    task_dir = folder.tasks_dir / "01-other"
    if not folder.claim(record) or not (task_dir / "task.json").exists():
        make_task(reference, task_dir, device)
        write_text_atomically(task_dir / "kernel.py", source)
    return Task.load(task_dir), where.name
