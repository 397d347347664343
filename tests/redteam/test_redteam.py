"""Every cheat is caught and for the right reason, no honest kernel is refused, and a cheat leaves no trace.

Each file goes through the same path as any candidate.  After each cheat an honest kernel is judged on the
same task by the same judge.  One judge and one `TaskJudge` per task serve the whole module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autokernel.judge import Judge, TaskError, TaskJudge
from autokernel.judge.launch import Deadlines, guards_here
from autokernel.judge.stages import timing
from autokernel.records import STATUSES, Verdict
from redteam import page, tasks
from redteam.table import AFTERWARDS, CHEATS, HONEST, OPEN, PROBLEM_FAULTS, Line

HERE = Path(__file__).parent
GAIN = 1.25
"""What equal kernels may differ by in one measurement on a busy machine; the cheats aim at several times."""
FORMS = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]),
]  # fmt: skip


LACKING = sorted(guard for guard, why_not in guards_here().items() if why_not)


def _cases(table: dict[str, Line]) -> list[object]:
    found = []
    for name, line in table.items():
        for device, marks in (("cpu", FORMS[0]), ("cuda", FORMS[1])):
            if line.forms not in ("both", {"cpu": "cpu", "cuda": "gpu"}[device]):
                continue
            extra = [] if device == "cpu" else list(marks.marks)  # type: ignore[attr-defined]
            if line.sandbox:
                extra.append(pytest.mark.skipif(bool(LACKING), reason=f"lacks {', '.join(LACKING)}"))
            if line.slow or line.gap:
                extra.append(pytest.mark.slow)
            found.append(pytest.param(device, name, marks=extra, id=f"{name}-{device}"))
    return found


@pytest.fixture(scope="module")
def open_task(
    tmp_path_factory: pytest.TempPathFactory, judge_of: Callable[[str], Judge]
) -> Iterator[Callable[[str, str], TaskJudge]]:
    """(device, task) -> its TaskJudge, opened once."""
    opened: dict[tuple[str, str], TaskJudge] = {}

    def get(device: str, name: str) -> TaskJudge:
        if (device, name) not in opened:
            folder = tmp_path_factory.mktemp("redteam-task")
            opened[device, name] = judge_of(device).open(
                (tasks.GOOD | tasks.MORE | tasks.FAULTY)[name](folder, device)
            )
        return opened[device, name]

    yield get
    for task in opened.values():
        task.close()


def _judge(judge: TaskJudge, path: Path, *, hangs: bool = False, audit: bool = False) -> Verdict:
    launcher = judge.owner.launcher
    launcher.deadlines = Deadlines(compile_s=3, run_s=3) if hangs else Deadlines(compile_s=60, run_s=20)
    try:
        return judge.judge(path, tier="audit" if audit else "promote")
    finally:
        launcher.deadlines = Deadlines()


def _expect(verdict: Verdict, line: Line) -> None:
    assert verdict.status in line.statuses, verdict
    assert re.search(line.reason, verdict.reason), verdict.reason
    assert verdict.correct or verdict.latency_us is None
    if line.timing and verdict.latency_us is not None:
        said = re.search(line.timing, verdict.stages["timing"][1])
        assert said and 1.05 * float(said[1]) < verdict.latency_us, verdict
    if line.provenance:
        assert verdict.provenance == line.provenance, verdict


def _settle(verdict: Verdict, line: Line) -> None:
    """As expected; or, for a known gap, through without being noticed (then an expected failure)."""
    if not line.gap:
        return _expect(verdict, line)
    with pytest.raises(AssertionError):  # otherwise the gap is closed: delete its text
        _expect(verdict, line)
    assert verdict.correct, verdict
    pytest.xfail(line.gap)


@pytest.mark.parametrize("device, name", _cases(CHEATS))
def test_cheat(open_task: Callable[[str, str], TaskJudge], device: str, name: str) -> None:
    line = CHEATS[name]
    judge = open_task(device, line.task)
    verdict = _judge(judge, HERE / "cheats" / f"{name}.py", hangs=line.status == "timeout", audit=line.audit)
    with pytest.MonkeyPatch.context() as patch:
        if not line.like:  # that it is judged right is enough, its speed is no matter
            patch.setitem(timing.ROUNDS, "screen", 5)
        honest = judge.judge(HERE / "honest" / f"{line.like or AFTERWARDS[line.task]}.py")
    assert honest.correct, honest
    _settle(verdict, line)
    if line.like and verdict.correct:
        assert verdict.vs_eager is not None and honest.vs_eager is not None
        assert verdict.vs_eager.ratio < GAIN * honest.vs_eager.ratio, (verdict, honest)


@pytest.mark.parametrize("device, name", _cases(HONEST))
def test_honest(open_task: Callable[[str, str], TaskJudge], device: str, name: str) -> None:
    line = HONEST[name]
    verdict = _judge(open_task(device, line.task), HERE / "honest" / f"{name}.py")
    assert verdict.correct, verdict
    _expect(verdict, line)


@pytest.mark.slow
@pytest.mark.parametrize("device, name", _cases(OPEN))
def test_open(open_task: Callable[[str, str], TaskJudge], device: str, name: str) -> None:
    _settle(_judge(open_task(device, OPEN[name].task), HERE / "open" / f"{name}.py"), OPEN[name])


@pytest.mark.parametrize("device", FORMS)
@pytest.mark.parametrize("name", PROBLEM_FAULTS)
def test_problem_fault(open_task: Callable[[str, str], TaskJudge], device: str, name: str) -> None:
    with pytest.raises(TaskError, match=PROBLEM_FAULTS[name]):
        open_task(device, name)


def test_table_and_files_agree() -> None:
    for folder, table in (("cheats", CHEATS), ("honest", HONEST), ("open", OPEN)):
        assert {p.stem for p in (HERE / folder).glob("*.py")} == set(table)
        for name, line in table.items():
            assert line.forms in ("cpu", "gpu", "both") and line.task in tasks.GOOD | tasks.MORE
            assert set(line.status.split("|")) <= {*STATUSES, "correct"}
            assert (line.forms == "gpu") == name.endswith("_gpu")
    assert set(PROBLEM_FAULTS) == set(tasks.FAULTY)
    assert set(AFTERWARDS) >= set(tasks.GOOD) | {line.task for line in CHEATS.values()}


@pytest.mark.parametrize("path", sorted(HERE.glob("*/*.py")), ids=lambda p: p.stem)
def test_docstrings_say_what_and_which_defence(path: Path) -> None:
    head = path.read_text().split('"""')[1].strip().splitlines()
    expected = "Must pass" if path.parent.name == "honest" else "Defence"
    assert len(head) >= 2 and any(line.startswith(expected) for line in head), head


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.current(), "run python tests/redteam/page.py"
