from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from autokernel import memory, scheduler
from autokernel.errors import UsageError
from autokernel.loop import MAX_INFRA_ERRORS, TaskLoop
from autokernel.proposers.base import TaskState
from autokernel.proposers.playbook import StarterProposer
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import Experiment, Port, Ratio, Task, Verdict
from autokernel.results import Journal, read_results, source_id
from autokernel.scheduler import Limits, count_experiments

EAGER, COMPILED = 20.0, 10.0


def ratio(value: float) -> Ratio:
    return Ratio(value, value * 0.99, value * 1.01, value * 0.99, 30)


class FakeJudge:
    """Judges by a comment in the source: ``# us=8`` is correct and takes 8 µs, ``# status=crash`` fails.

    A screening flatters a ``# flattered`` source, as a lucky measurement would.
    """

    def __init__(self) -> None:
        self.baselines = {"eager": EAGER, "compile": COMPILED}
        self.baseline_failures: dict[str, str] = {}
        self.calls: list[tuple[str, str | None, str]] = []
        self.opened = self.closed = 0
        self.swept: list[int] = []
        self.hook: Callable[[str], None] = lambda source: None

    def open(self, task: Task) -> FakeJudge:
        self.opened += 1
        return self

    def close(self) -> None:
        self.closed += 1

    def sweep(self, sources: Sequence[Path]) -> list[Verdict]:
        self.swept.append(len(sources))
        verdicts = []
        for source in sources:
            text = source.read_text()
            self.hook(text)
            verdicts.append(Verdict("discard", "a point", latency_us=latency_of(text), seconds=0.1))
        return verdicts

    def judge(self, source: Path, *, parent: Path | None = None, tier: str = "screen") -> Verdict:
        text = source.read_text()
        self.hook(text)
        self.calls.append((source.stem, parent.stem if parent else None, tier))
        failed = re.search(r"# status=(\w+)", text)
        if failed:
            return Verdict(failed[1], reason=f"it is {failed[1]}", seconds=0.5)  # type: ignore[arg-type]
        us = latency_of(text)
        if "# flattered" in text and tier == "screen":
            us /= 2
        vs_parent = ratio(latency_of(parent.read_text()) / us) if parent else None
        deciding = vs_parent or ratio(COMPILED / us)
        return Verdict(
            "keep" if deciding.lower_bound > 1.005 else "discard",
            latency_us=us,
            vs_eager=ratio(EAGER / us),
            vs_compile=ratio(COMPILED / us),
            vs_parent=vs_parent,
            seconds=1.0,
            error_ratio=1.1,
            provenance="custom",
        )


def latency_of(text: str) -> float:
    found = re.search(r"# us=([\d.]+)", text)
    assert found, text
    us = float(found[1])
    block = re.search(r"^BLOCK = (\d+)", text, re.MULTILINE)
    return us + abs(int(block[1]) - 128) / 64 if block else us


def kernel(us: float | None = None, *, status: str = "", extra: str = "") -> str:
    verdict = f"# status={status}" if status else f"# us={us}"
    return f'BACKEND = "torch"\n{verdict}\n{extra}\ndef kernel_fn(x): return x\n'


class Script:
    """A proposer that says what it is given, in order."""

    def __init__(self, *ideas: str | Failure, name: str = "script", patience: int | None = None) -> None:
        self.ideas, self.name, self.patience = list(ideas), name, patience
        self.states: list[TaskState] = []

    def propose(self, state: TaskState) -> Proposal | Failure | None:
        self.states.append(state)
        if not self.ideas:
            return None
        idea = self.ideas.pop(0)
        if isinstance(idea, Failure):
            return idea
        return Proposal(idea, "trick", "a trick", "torch", proposer=self.name, tokens_in=10, tokens_out=2)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    folder = tmp_path / "tasks" / "01-norm-ffffffff"
    folder.mkdir(parents=True)
    port = Port("x", (4, 8), "float32", (8, 1))
    made = Task(1, "norm", "f" * 32, "cpu", 2, [], [port], [port], flops=4e6, roofline_us=2.0, share=0.3)
    made.save(folder)
    (folder / "kernel.py").write_text(kernel(15))
    (folder / "reference.py").write_text("class Model: ...\n")
    return made


@pytest.fixture
def judge() -> FakeJudge:
    return FakeJudge()


def loop(task: Task, judge: FakeJudge, *proposers: object, **options) -> TaskLoop:
    journal = options.pop("journal", None) or Journal(task.dir.parent.parent / "results.tsv")
    return TaskLoop(task, journal, judge.open, list(proposers), tag="t", device="dev", **options)  # type: ignore[arg-type]


def statuses(run: TaskLoop) -> list[str]:
    return [r.status for r in run.journal.rows]


def test_starter_then_better_then_worse(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, StarterProposer(), Script(kernel(8), kernel(9), kernel(4)))
    result = run.run()
    assert statuses(run) == ["baseline", "baseline", "discard", "keep", "discard", "keep"]
    assert result.kept is not None and result.kept.read_text() == kernel(4) and result.speedup == 2.5
    assert (task.dir / "kernel.py").read_text() == kernel(4)
    assert result.why == "nothing left to try"
    assert judge.opened == judge.closed == 1
    starter, eight, nine, four = run.journal.rows[2:]
    assert (starter.strategy, starter.proposer, starter.parent) == ("starter", "starter", "")
    assert eight.parent == starter.candidate and eight.speedup_vs_parent is None, "never against a starter"
    assert four.parent == nine.parent == eight.candidate and four.speedup_vs_parent == 2.0
    assert four.speedup_vs_pytorch == 5.0 and four.speedup_vs_compile == four.speedup_vs_best_baseline == 2.5
    assert four.ci_low == pytest.approx(1.98), "the interval of the comparison that decided"
    assert four.throughput_tflops == pytest.approx(1.0) and four.pct_peak == pytest.approx(50.0)
    assert (four.tokens_in, four.provenance, four.device, four.tag) == (10, "custom", "dev", "t")
    assert four.seconds == 2.0, "screening and promotion"


def test_what_looks_faster_is_measured_again_before_it_counts(task: Task, judge: FakeJudge) -> None:
    lucky = kernel(12, extra="# flattered")
    run = loop(task, judge, Script(lucky))
    assert run.run().kept is None
    assert [tier for _, _, tier in judge.calls] == ["screen", "promote"]
    row = run.journal.rows[-1]
    assert row.status == "discard" and row.latency_us == 12.0, "only the second number is published"


@pytest.mark.parametrize("status", ["incorrect", "compile_error", "crash", "timeout", "rejected"])
def test_a_failing_candidate_is_a_row_with_its_reason(task: Task, judge: FakeJudge, status: str) -> None:
    script = Script(kernel(status=status), kernel(8))
    run = loop(task, judge, script)
    assert run.run().kept is not None
    row = run.journal.rows[2]
    assert row.status == status and row.reason == f"it is {status}" and row.latency_us is None
    assert any(r.reason == f"it is {status}" for r in script.states[1].history), (
        "the next prompt can quote it"
    )
    assert (task.dir / "attempts" / f"{row.candidate}.py").read_text() == kernel(status=status)


def test_the_state_that_proposers_see(task: Task, judge: FakeJudge) -> None:
    script = Script(kernel(14), kernel(8))
    loop(task, judge, StarterProposer(), script).run()
    first, second, third = script.states
    assert first.current == kernel(15) and not first.ahead and first.current_latency_us == 15
    assert first.baselines == {"eager": EAGER, "compile": COMPILED}
    assert second.current == kernel(14) and not second.ahead, "the fastest correct one, though not kept"
    assert third.current == kernel(8) and third.ahead
    assert "trick: positive" in third.recall
    assert third.tried == {source_id(kernel(u)) for u in (15, 14, 8)}


def test_resume_tries_nothing_twice_and_needs_no_judge(task: Task, judge: FakeJudge) -> None:
    loop(task, judge, StarterProposer(), Script(kernel(8), kernel(9))).run()
    before = (task.dir.parent.parent / "results.tsv").read_bytes()
    again = FakeJudge()
    result = loop(task, again, StarterProposer(), Script()).run()
    assert again.opened == 0 and result.speedup == 1.25
    assert (task.dir.parent.parent / "results.tsv").read_bytes() == before


def test_resume_goes_on_with_the_kept_kernel(task: Task, judge: FakeJudge) -> None:
    loop(task, judge, StarterProposer(), Script(kernel(8))).run()
    (task.dir / "kernel.py").write_text(kernel(15))  # killed after the row, before the file
    script = Script(kernel(4))
    run = loop(task, judge, StarterProposer(), script)
    run.run()
    assert script.states[0].current == kernel(8) and script.states[0].ahead
    row = run.journal.rows[-1]
    assert row.parent == source_id(kernel(8)) and row.speedup_vs_parent == 2.0
    assert statuses(run).count("baseline") == 2, "baselines are logged once"


def test_an_edit_by_hand_is_judged_and_never_lost(task: Task, judge: FakeJudge) -> None:
    loop(task, judge, StarterProposer(), Script(kernel(8))).run()
    (task.dir / "kernel.py").write_text(kernel(9, extra="# by hand"))
    run = loop(task, judge, StarterProposer())
    run.run()
    row = run.journal.rows[-1]
    assert (row.strategy, row.status) == ("by-hand", "discard")
    assert "# by hand" in (task.dir / "attempts" / f"{row.candidate}.py").read_text()
    assert (task.dir / "kernel.py").read_text() == kernel(8), "kernel.py is the current best again"


def test_the_same_file_again_is_logged_but_not_judged(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, Script(kernel(8), kernel(8), patience=9))
    run.run()
    row = run.journal.rows[-1]
    assert row.status == "discard" and "same file" in row.reason and row.tokens_in == 10
    assert len(judge.calls) == 2, "screen and promote of the first"


def test_patience_counts_rounds_without_a_keep(task: Task, judge: FakeJudge) -> None:
    script = Script(kernel(12), kernel(8), kernel(9), kernel(9.5), kernel(4), name="llm", patience=2)
    run = loop(task, judge, script)
    assert run.run().why == "nothing left to try"
    assert statuses(run)[2:] == ["discard", "keep", "discard", "discard"]
    assert loop(task, judge, script).run().speedup == 1.25, "and a resumed run doesn't start counting anew"
    assert len(script.ideas) == 1


def test_a_task_near_its_roofline_is_finished(task: Task, judge: FakeJudge) -> None:
    script = Script(kernel(2.1), kernel(2.05))
    result = loop(task, judge, script).run()
    assert "within 10% of its roofline" in result.why and len(script.ideas) == 1


def test_infra_errors_count_against_nothing_and_end_the_task(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, Script(*[Failure("dead API", proposer="script")] * 9, patience=2))
    result = run.run()
    assert statuses(run) == ["infra_error"] * MAX_INFRA_ERRORS and "infrastructure" in result.why
    assert judge.opened == 0
    broken = loop(task, judge, Script(kernel(status="infra_error"), kernel(8)))
    assert broken.run().kept is not None, "one error alone is passed over"
    assert source_id(kernel(status="infra_error")) not in broken.journal.tried(task.name)


def test_max_experiments_is_of_the_whole_run(task: Task, judge: FakeJudge) -> None:
    limits = Limits(max_experiments=2)
    run = loop(task, judge, Script(kernel(12), kernel(11), kernel(8)), limits=limits)
    assert "--max-experiments 2" in run.run().why
    assert count_experiments(run.journal.rows) == 2
    assert loop(task, judge, Script(kernel(8)), limits=limits).run().kept is None
    assert loop(task, judge, Script(kernel(8)), limits=Limits(max_experiments=3)).run().kept is not None


def test_the_budget_ends_between_rows(task: Task, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict takes 15 s by a clock that only verdicts move; of 20 s there are 5 left after the first."""
    now = [100.0]
    monkeypatch.setattr("autokernel.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))

    def hook(source: str) -> None:
        now[0] += 15

    judge.hook = hook
    limits = Limits(deadline=now[0] + 20)
    run = loop(task, judge, Script(kernel(12), kernel(11), kernel(8)), limits=limits)
    assert "budget" in run.run().why
    assert statuses(run) == ["baseline", "baseline", "discard", "discard"]


def test_a_stop_finishes_the_row(task: Task, judge: FakeJudge) -> None:
    stop = False

    def hook(source: str) -> None:
        nonlocal stop
        stop = True

    judge.hook = hook
    run = loop(task, judge, Script(kernel(8), kernel(4)), limits=Limits(stop=lambda: stop))
    result = run.run()
    assert result.why == "interrupted" and statuses(run) == ["baseline", "baseline", "keep"]
    assert result.kept is not None and judge.closed == 1


def test_the_judge_is_closed_when_something_breaks(task: Task, judge: FakeJudge) -> None:
    def hook(source: str) -> None:
        raise RuntimeError("a bug of ours")

    judge.hook = hook
    with pytest.raises(RuntimeError):
        loop(task, judge, Script(kernel(8))).run()
    assert judge.closed == 1


def test_a_task_that_cannot_be_judged_is_a_row_and_not_the_end(task: Task, judge: FakeJudge) -> None:
    class Refusing(FakeJudge):
        def open(self, task: Task) -> FakeJudge:
            raise UsageError("the reference does not run")

    run = loop(task, Refusing(), Script(kernel(8)))
    result = run.run()
    assert result.kept is None and "can't be judged" in result.why
    assert statuses(run) == ["infra_error"] and "reference does not run" in run.journal.rows[0].reason
    assert loop(task, judge, Script(kernel(8))).run().kept is not None, "and it is tried again"


SPACE = 'BLOCK = 64\nSPACE = {"BLOCK": [32, 64, 128, 256]}'


def test_a_space_is_searched_and_its_best_point_judged_as_a_kernel(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, Script(kernel(8, extra=SPACE)))
    result = run.run()
    rows = run.journal.rows[2:]
    assert [r.status for r in rows] == ["keep", "discard", "discard", "discard", "keep"]
    assert rows[0].latency_us == 9.0 and rows[-1].latency_us == 8.0
    assert rows[-1].strategy == "trick,tuned" and "BLOCK=128" in rows[-1].description
    assert all(r.strategy == "trick,point" and r.parent == rows[0].candidate for r in rows[1:-1])
    assert result.kept is not None
    frozen = result.kept.read_text()
    assert "BLOCK = 128  # tuned" in frozen and "SPACE" not in frozen
    assert (task.dir / "kernel.py").read_text() == frozen
    assert judge.swept == [3]
    assert rows[-1].speedup_vs_parent == pytest.approx(9 / 8)


def test_a_hopeless_kernel_is_not_tuned(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, Script(kernel(30, extra=SPACE)))
    run.run()
    assert statuses(run) == ["baseline", "baseline", "discard"]


def test_a_search_that_was_cut_short_goes_on(task: Task, judge: FakeJudge) -> None:
    stop = False

    def hook(source: str) -> None:
        nonlocal stop
        stop = stop or "BLOCK = 32" in source

    judge.hook = hook
    first = loop(task, judge, Script(kernel(8, extra=SPACE)), limits=Limits(stop=lambda: stop))
    first.run()
    assert statuses(first)[2:] == ["keep"], "a batch that was cut short leaves no rows"
    again = FakeJudge()
    run = loop(task, again, Script())
    run.run()
    assert statuses(run)[2:] == ["keep", "discard", "discard", "discard", "keep"]
    assert again.swept == [3]
    done = FakeJudge()
    loop(task, done, Script()).run()
    assert done.opened == 0, "and it is not searched a second time"


def test_defaults_that_are_the_best_are_not_judged_again(task: Task, judge: FakeJudge) -> None:
    best = SPACE.replace("BLOCK = 64", "BLOCK = 128")
    run = loop(task, judge, Script(kernel(8, extra=best)))
    run.run()
    assert run.journal.rows[-1].reason == "the values in the file are the best"
    assert len(judge.calls) == 2 and judge.swept == [3]
    done = FakeJudge()
    loop(task, done, Script()).run()
    assert done.opened == 0


def test_a_bad_space_is_a_row(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, Script(kernel(8, extra='SPACE = {"MISSING": [1]}')))
    assert run.run().kept is not None
    assert run.journal.rows[-1].status == "compile_error" and "MISSING" in run.journal.rows[-1].reason


def test_everything_is_on_disk(task: Task, judge: FakeJudge) -> None:
    run = loop(task, judge, StarterProposer(), Script(kernel(8), kernel(status="crash")))
    run.run()
    assert read_results(task.dir.parent.parent) == run.journal.rows


# --- scheduler and memory ----------------------------------------------------------------------------------


def planned(**changes) -> Task:
    port = Port("x", (1,), "float32", (1,))
    return Task(**{"rank": 1, "family": "norm", "fingerprint": "0" * 32, "device": "cpu", "call_count": 1,
                   "module_paths": [], "inputs": [port], "outputs": [port], **changes})  # fmt: skip


def test_the_order_is_by_what_the_model_can_gain() -> None:
    tasks = [
        planned(rank=1, amdahl_bound=1.1, share=0.5),
        planned(rank=2, amdahl_bound=1.4, share=0.3),
        planned(rank=3, share=0.5),
        planned(rank=4, amdahl_bound=1.1, share=0.4),
    ]
    assert [p.task.rank for p in scheduler.plan(tasks)] == [3, 2, 1, 4]


def test_when_not_to_bother() -> None:
    assert scheduler.plan_task(planned(share=0.004)).effort == "skip"
    assert scheduler.plan_task(planned(share=0.006)).effort == "full"
    assert scheduler.plan_task(planned(share=0.3, head_room=1.05)).effort == "starter"
    assert scheduler.plan_task(planned(share=0.3, head_room=1.2)).effort == "full"
    assert scheduler.plan_task(planned()).effort == "full", "an unknown share is no reason"


def test_who_is_tried_in_the_whole_model() -> None:
    def row(number: int, status: str, speedup: float | None, high: float, **changes) -> Experiment:
        fields = {"tag": "t", "kernel_type": "norm", "status": status, "candidate": "c", "ci_high": high}
        return Experiment(**{"experiment": number, "speedup_vs_best_baseline": speedup, **fields, **changes})

    clear, near = row(1, "discard", 0.8, 0.9), row(2, "discard", 0.98, 1.02)
    starter = row(3, "discard", 1.0, 1.05, proposer="starter")
    against_parent = row(4, "discard", 1.2, 1.01, speedup_vs_parent=0.99)
    kept, better = row(5, "keep", 1.2, 1.3), row(6, "keep", 1.1, 1.15)
    assert scheduler.model_candidate([clear, starter]) is None
    assert scheduler.model_candidate([clear, near, starter]) is near
    assert scheduler.model_candidate([near, kept, against_parent, better]) is better, (
        "each beat the one before"
    )
    assert scheduler.model_candidate([row(7, "crash", None, 0.0)]) is None


def test_recall_is_by_family_and_mechanism() -> None:
    def row(**changes) -> Experiment:
        return Experiment(
            **{"experiment": 1, "tag": "t", "kernel_type": "norm", "task": "a", "candidate": "c", **changes}
        )

    rows = [
        row(status="keep", strategy="fuse", speedup_vs_best_baseline=1.3),
        row(status="discard", strategy="fuse", speedup_vs_best_baseline=0.9, task="b"),
        row(status="incorrect", strategy="fast-math", reason="7x e0"),
        row(status="discard", strategy="fuse,point", speedup_vs_best_baseline=9.0),
        row(status="infra_error", strategy="fuse", reason="full disk"),
        row(status="keep", strategy="sdpa", kernel_type="attention", speedup_vs_best_baseline=2.0),
        row(status="discard", strategy="starter", speedup_vs_best_baseline=0.5),
    ]
    memories = memory.recall(rows, planned())
    assert [(m.strategy, m.outcome, m.tried, m.kept) for m in memories] == [
        ("fuse", "positive", 2, 1),
        ("fast-math", "rejected", 1, 0),
    ]
    text = memory.describe(memories)
    assert "1.30× the best baseline" in text and "7x e0" in text and "full disk" not in text
    assert memory.describe([]) == ""
