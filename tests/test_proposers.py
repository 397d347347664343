from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from autokernel.proposers.base import TaskState
from autokernel.proposers.edit import extract_edit
from autokernel.proposers.playbook import PlaybookProposer, StarterProposer, backend_of
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.proposers.provider import Reply
from autokernel.records import Experiment, Port, Task
from autokernel.results import source_id

KERNEL = 'BACKEND = "torch"\n\n\ndef kernel_fn(x):\n    return x.relu()\n'


def make_task(folder: Path = Path()) -> Task:
    port = Port("x", (4, 8), "float16", (8, 1))
    weight = Port("w", (8,), "float16", (1,), role="parameter")
    return Task(
        rank=1,
        family="norm",
        fingerprint="f" * 32,
        device="cpu",
        call_count=25,
        module_paths=["h.0.ln_1"],
        inputs=[port, weight],
        outputs=[port],
        flops=1e6,
        bytes=2e6,
        roofline_us=3.5,
        dir=folder,
    )


def make_state(folder: Path = Path(), **changes) -> TaskState:
    return TaskState(task=make_task(folder), reference="class Model: ...", current=KERNEL, **changes)


# --- from reply to file ----------------------------------------------------------------------------------


def block(code: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{code}\n{fence}\n"


def test_a_good_reply() -> None:
    text = "**STRATEGY:** Split-K, fused epilogue\nDESCRIPTION: bound by latency: split K.\n" + block(KERNEL)
    edit = extract_edit(Reply(text))
    assert edit.source == KERNEL and not edit.problem
    assert edit.strategy == "split-k,fused-epilogue"
    assert edit.description == "bound by latency: split K"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(""), "empty"),
        (Reply(" \n\t"), "empty"),
        (Reply("I can't help with that.", finish="refused"), "refused: I can't help"),
        (Reply("Sorry, no."), "neither a python block"),
        (Reply("```python\n" + KERNEL), "cut off"),
        (Reply(block(KERNEL), finish="length"), "cut off"),
        (Reply(block("x = 1")), "no python block"),
        (Reply(block("void kernel_fn();", "cpp")), "neither a python block"),
        (Reply(block(KERNEL) + block(KERNEL + "# two")), "2 different files"),
        (Reply(block(KERNEL + "#" * 300_000)), "characters long"),
    ],
)
def test_replies_without_a_usable_file(reply: Reply, problem: str) -> None:
    edit = extract_edit(reply)
    assert edit.source is None and problem in edit.problem


def test_the_file_is_taken_whatever_the_fence() -> None:
    cpp = KERNEL + 'SOURCE = """\n```not a fence```\n"""\n'
    for text in (
        block(KERNEL, ""),
        block(KERNEL, "py", "~~~"),
        block(cpp, "python", "````"),
        "Plan:\n" + block("for (;;) {}", "cpp") + "Then:\n" + block(KERNEL),
        block(KERNEL) * 2,
        block(KERNEL).replace("\n", "\r\n"),
    ):
        edit = extract_edit(Reply(text))
        assert edit.source is not None and edit.source.startswith(KERNEL.rstrip()), edit.problem


# --- starter and playbook --------------------------------------------------------------------------------


def test_the_starter_is_proposed_once_and_later_edits_by_hand(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    first = StarterProposer().propose(make_state(tmp_path))
    assert first is not None and first.strategy == "starter" and first.backend == "torch"
    tried = frozenset({source_id(KERNEL)})
    assert StarterProposer().propose(make_state(tmp_path, tried=tried)) is None
    (tmp_path / "kernel.py").write_text(KERNEL + "# mine\n")
    history = [Experiment(1, "t", "norm", status="discard", candidate=source_id(KERNEL))]
    edited = StarterProposer().propose(make_state(tmp_path, tried=tried, history=history))
    assert edited is not None and edited.strategy == "by-hand" and edited.source.endswith("# mine\n")


def strategy(name: str, families: tuple[str, ...], propose) -> SimpleNamespace:
    return SimpleNamespace(NAME=name, FAMILIES=families, propose=propose)


def test_the_playbook_asks_the_strategies_of_the_family_in_order() -> None:
    def give(*sources: str):
        return lambda ctx: [Proposal(s, "s", str(ctx), "torch") for s in sources]

    def fail(ctx: object) -> list[Proposal]:
        raise ValueError("oops")

    strategies = [
        strategy("one", ("norm", "rope"), give("a", "tried")),
        strategy("broken", ("norm",), fail),
        strategy("other", ("attention",), give("never")),
        strategy("all", ("*",), give("b")),
    ]
    playbook = PlaybookProposer(lambda task: "context", strategies)  # type: ignore[arg-type,return-value]
    state = make_state(tried=frozenset({source_id("tried")}))
    ideas = [playbook.propose(state) for _ in range(4)]
    assert isinstance(ideas[0], Proposal) and ideas[0].source == "a" and ideas[0].description == "context"
    assert isinstance(ideas[1], Failure) and "broken failed: ValueError: oops" in ideas[1].reason
    assert isinstance(ideas[2], Proposal) and ideas[2].source == "b"
    assert ideas[3] is None


def test_no_context_is_built_for_a_family_without_strategies() -> None:
    def never(task: Task):
        raise AssertionError("built")

    assert PlaybookProposer(never, [strategy("x", ("rope",), None)]).propose(make_state()) is None


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        (KERNEL, "torch"),
        ("BACKEND = 3", ""),
        ("def f(:", ""),
        ("x = 1", "torch"),
        ("x = 1\nBACKEND = 'cpp'", "cpp"),
    ],
)
def test_backend_of(source: str, backend: str) -> None:
    assert backend_of(source) == backend
