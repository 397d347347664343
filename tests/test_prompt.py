"""Prompts are compared with the files in tests/snapshots.

After a change that is meant: AUTOKERNEL_RENEW_SNAPSHOTS=1 pytest tests/test_prompt.py, and read the diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autokernel.hardware import Ceilings
from autokernel.proposers.base import TaskState
from autokernel.proposers.clip import clip_list, clip_middle, fenced, one_line
from autokernel.proposers.evidence import bound_of, describe_evidence
from autokernel.proposers.facts import DeviceFacts, facts_of
from autokernel.proposers.prompt import (
    BUDGET,
    CORRECT,
    KNOWLEDGE,
    LEAST_OUTPUT_TOKENS,
    MAX_OUTPUT_TOKENS,
    MAX_TRIM,
    MEMORY,
    SYSTEM_LIMIT,
    TASK_LIMIT,
    TURN_LIMIT,
    Repair,
    build_request,
    correction,
    failure_text,
)
from autokernel.proposers.provider import Request
from autokernel.proposers.reflection import question
from autokernel.proposers.rules import RULES
from autokernel.records import STATUSES, TIMED, Experiment, Port, Task, Verdict
from autokernel.results import source_id

ROOT = Path(__file__).resolve().parent.parent
KERNEL = '''\
import torch
import triton
import triton.language as tl

BACKEND = "triton"


@triton.jit
def rms(x, w, out, n, BLOCK: tl.constexpr):
    """One row."""
    ...


def kernel_fn(x, w):
    ...
'''
REFERENCE = """\
class Model(nn.Module):
    def forward(self, x, w):
        return F.rms_norm(x, (4096,), w, 1e-5)
"""

H200 = DeviceFacts(
    "NVIDIA H200",
    "cuda",
    "sm_90",
    132,
    150754820096,
    62914560,
    registers=65536,
    shared_bytes=233472,
    block_shared_bytes=232448,
    threads=2048,
    versions="torch 2.11.0, triton 3.6.0",
    backends=("torch", "triton"),
    ceilings=Ceilings(4.02e12, {"float16": 7.1e14, "float32": 5.0e13, "tf32": 3.9e14}, 1.9),
)
CPU = DeviceFacts(
    "AMD EPYC",
    "cpu",
    "AVX512",
    2,
    24 << 30,
    32 << 20,
    caches=("L1d 32KiB", "L2 1024KiB", "L3 32768KiB"),
    compiler="g++ 12.2.0",
    versions="torch 2.15.0",
    backends=("torch", "cpp"),
    ceilings=Ceilings(3.4e10, {"float32": 1.9e11}, 4.3),
)
PAGES = (
    "## Read each row once [rows-once]\n**Signs.** dram bound, below 70 % of the copy.\n\n"
    "Keep the row in registers."
)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``snapshot(name, text)``: text is what tests/snapshots/NAME.txt holds."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "snapshots" / f"{name}.txt"
        if os.environ.get("AUTOKERNEL_RENEW_SNAPSHOTS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path}: AUTOKERNEL_RENEW_SNAPSHOTS=1 writes it"
        assert text == path.read_text(encoding="utf-8")

    return compare


def make_task(device: str = "cuda", **changes) -> Task:
    dtype = "float16" if device == "cuda" else "float32"
    x = Port("x", (8, 1024, 4096), dtype, (4194304, 4096, 1))
    weight = Port("w", (4096,), dtype, (1,), role="parameter")
    fields = {
        "rank": 3,
        "family": "norm",
        "fingerprint": "1a2b3c4d" + "0" * 24,
        "device": device,
        "call_count": 65,
        "module_paths": ["layers.0.norm"],
        "inputs": [x, weight],
        "outputs": [x],
        "share": 0.071,
        "device_time_us": 6200.0,
        "flops": 1.0e8,
        "bytes": 134225920.0,
        "roofline_us": 33.4,
        "head_room": 2.86,
        "amdahl_bound": 1.048,
    }
    return Task(**{**fields, **changes})  # type: ignore[arg-type]


def row(number: int, status: str, **changes) -> Experiment:
    return Experiment(
        **{"experiment": number, "tag": "t", "kernel_type": "norm", "status": status, **changes}
    )


def make_history() -> list[Experiment]:
    return [
        row(1, "baseline", backend="eager", latency_us=95.5, bound="mixed", pct_peak=35.0),
        row(2, "baseline", backend="compile", latency_us=52.1, bound="dram", pct_peak=64.1),
        row(
            3,
            "discard",
            backend="triton",
            candidate=source_id(KERNEL),
            strategy="starter",
            proposer="starter",
            description="the starter",
            latency_us=58.7,
            speedup_vs_best_baseline=0.888,
            pct_peak=56.9,
            bound="dram",
            provenance="custom",
            reason="0.888x compile (lower bound 0.885, not above 1.005)",
        ),
        row(4, "discard", candidate="a1", strategy="trick,point", proposer="tuner", latency_us=59.0),
        row(
            5,
            "discard",
            candidate="a2",
            strategy="starter,tuned",
            proposer="tuner",
            backend="triton",
            description="best of 12 points of its SPACE: BLOCK=4096",
            latency_us=57.0,
            speedup_vs_best_baseline=0.91,
        ),
        row(6, "infra_error", candidate="a3", proposer="openai", reason="full disk"),
        row(
            7,
            "incorrect",
            backend="triton",
            candidate="a4",
            strategy="two-rows",
            proposer="openai",
            description="two rows per program (bound by dram; predicted 45 µs)",
            reason="output 0: 7.1x eager's\nerror",
        ),
    ]


def make_state(device: str = "cuda", **changes) -> TaskState:
    verdicts = {
        source_id(KERNEL): Verdict(
            "discard",
            latency_us=58.7,
            stages={
                "static": (True, ""),
                "resources": (
                    True,
                    "rms: 40 registers, none spilled, 1024 bytes shared, 4 warps, occupancy 75 % at most",
                ),
            },
        ),
    }
    fields = {
        "task": make_task(device),
        "reference": REFERENCE,
        "current": KERNEL,
        "current_latency_us": 58.7,
        "baselines": {"eager": 95.5, "compile": 52.1},
        "history": make_history(),
        "verdicts": verdicts,
        "recall": "- fuse: positive, kept 1 of 2, at best 1.30× the best baseline",
    }
    return TaskState(**{**fields, **changes})  # type: ignore[arg-type]


def everything(request: Request) -> str:
    parts = [f"===== system\n{request.system}", f"===== task\n{request.task}"]
    return "\n\n".join([*parts, *(f"===== {t['role']}\n{t['content']}" for t in request.turns), ""])


# --- snapshots -------------------------------------------------------------------------------------------


def test_an_edit_on_a_gpu(snapshot: Callable[[str, str], None]) -> None:
    request = build_request(make_state(), H200, knowledge=PAGES)
    assert request == build_request(make_state(), H200, knowledge=PAGES), "pure"
    snapshot("prompt_edit_gpu", everything(request))


def test_an_edit_on_a_cpu(snapshot: Callable[[str, str], None]) -> None:
    task = make_task("cpu", share=None, head_room=None, amdahl_bound=None, call_count=1)
    state = make_state(
        "cpu", task=task, history=make_history()[:2], recall="", current_latency_us=None, verdicts={}
    )
    snapshot("prompt_edit_cpu", everything(build_request(state, CPU)))


def test_a_repair(snapshot: Callable[[str, str], None]) -> None:
    failed = row(
        8,
        "compile_error",
        candidate="f1",
        strategy="vectorize",
        proposer="openai",
        backend="cpp",
        description="eight rows at once",
        reason="kernel.cpp:12:3: error: expected ';'",
    )
    repair = Repair(failed, "broken = 1\n", failed.reason)
    state = make_state("cpu", history=[*make_history(), failed])
    snapshot("prompt_repair", build_request(state, CPU, repair=repair).turns[-1]["content"])


def test_corrections_and_reflections(snapshot: Callable[[str, str], None]) -> None:
    verdict = row(
        9,
        "keep",
        candidate="f2",
        latency_us=41.0,
        speedup_vs_best_baseline=1.27,
        pct_peak=81.0,
        speedup_vs_parent=1.43,
        bound="dram",
        reason="1.43x the parent (lower bound 1.42)",
    )
    failed = row(10, "timeout", candidate="f3", reason="no answer within 60 s")
    parts = [
        correction("block 1: the file has no line 'x'; the closest is line 3: 'y'", "unusable"),
        correction("the reply was cut off", "truncated"),
        correction("That is the same file as attempt 0123456789ab, which ended as discard", "repeat"),
        question(verdict),
        question(failed, failed.reason),
    ]
    snapshot("prompt_turns", "\n\n---\n\n".join(parts) + "\n")


# --- what is in it ---------------------------------------------------------------------------------------


def test_only_what_runs_here_is_offered() -> None:
    for facts, wanted, barred in ((CPU, '"torch", "cpp"', '"triton"'), (H200, '"torch", "triton"', '"cpp"')):
        told = re.search(r"^BACKEND can be (.*) here", facts.describe(), re.MULTILINE)
        assert told and told[1] == wanted and barred not in facts.describe()
    bare = replace(CPU, compiler="", backends=("torch",), missing=("No C++ here (no compiler).",))
    assert 'BACKEND can be "torch" here' in bare.describe() and "No C++ here" in bare.describe()


def test_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of("cpu", CPU.ceilings)
    assert facts.kind == "cpu" and facts.name and facts.units and "torch" in facts.backends
    assert "triton" not in facts.backends, "its interpreter on a CPU says nothing about time"
    assert "34 GB/s" in facts.describe() and "float32 190" in facts.describe()
    from autokernel.backends import cpp_backend

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cpp_backend, "compiler", lambda: None)
    bare = facts_of("cpu")
    assert bare.backends == ("torch",) and "No C++ here" in bare.describe() and not bare.compiler


def test_a_name_alone_will_do_for_a_device() -> None:
    text = build_request(make_state(), "NVIDIA H200").system
    assert "NVIDIA H200" in text and '"torch", "triton"' in text
    assert '"torch", "cpp"' in build_request(make_state("cpu"), "a CPU").system


def test_the_task_part_is_the_same_whatever_was_tried() -> None:
    before = build_request(make_state(history=make_history()[:3]), H200, knowledge=PAGES)
    after = build_request(make_state(current="x = 1\n", recall="", ahead=True), H200, knowledge=PAGES)
    assert (before.system, before.task) == (after.system, after.task)
    assert before.task.startswith("# Task 03-norm-1a2b3c4d\n"), "by this line a recording finds its task"


def test_infra_errors_and_points_of_a_search_are_no_attempts() -> None:
    text = build_request(make_state(), H200).turns[0]["content"]
    assert "full disk" not in text and "59.00" not in text
    assert "[starter,tuned]" in text, "the result of a search is one"


def test_a_plan_that_could_not_be_repaired_shows_its_error() -> None:
    text = build_request(make_state(), H200).turns[0]["content"]
    assert "# The last attempt failed: incorrect\noutput 0: 7.1x eager's\nerror" in text
    later = [*make_history(), row(8, "discard", candidate="b", proposer="openai", latency_us=50.0)]
    assert "The last attempt failed" not in build_request(make_state(history=later), H200).turns[0]["content"]


def test_what_a_crashed_worker_printed_is_shown() -> None:
    failed = row(8, "crash", candidate="c", reason="the process ended (SIGSEGV)")
    state = make_state(verdicts={"c": Verdict("crash", failed.reason, log="Fatal: line 3 in kernel_fn")})
    assert failure_text(state, failed).endswith("printed:\nFatal: line 3 in kernel_fn")
    assert failure_text(make_state(), failed) == failed.reason, "after a resume the row is all there is"


def test_evidence_on_a_cpu_is_measured_against_its_ceilings() -> None:
    task = make_task("cpu", flops=1e6, bytes=2e6, roofline_us=60.0)
    current = row(3, "keep", candidate=source_id(KERNEL), latency_us=100.0, pct_peak=60.0, bound="dram")
    text = describe_evidence(make_state("cpu", task=task, history=[current], verdicts={}), CPU)
    assert text == (
        "current kernel.py: 60 % of the roofline's speed; 20 GB/s of 34 GB/s; 10 GFLOP/s of 190 GFLOP/s; "
        "bound: dram"
    )
    assert "20 GB/s;" in describe_evidence(make_state("cpu", task=task, history=[current]), DeviceFacts("x"))
    short = replace(current, latency_us=12.0)
    assert "launches weigh" in describe_evidence(make_state("cpu", task=task, history=[short]), CPU)


def test_counters_come_before_what_the_compiler_says() -> None:
    stages = {"resources": (True, "40 registers"), "counters": (True, "dram 91 %"), "audit": (True, "no")}
    state = make_state(verdicts={source_id(KERNEL): Verdict("discard", latency_us=1.0, stages=stages)})
    assert describe_evidence(state, H200).endswith("counters: dram 91 %\nresources: 40 registers")


def test_the_bound_that_picks_the_knowledge() -> None:
    assert bound_of(make_state(), H200) == "dram", "the best baseline's"
    assert bound_of(make_state(history=[]), H200) == "dram", "by the two floors"
    heavy = make_task(flops=1e15)
    assert bound_of(make_state(task=heavy, history=[]), H200) == "compute"
    assert bound_of(make_state(history=[]), DeviceFacts("x")) == "mixed"


# --- the rules are those of program.md -------------------------------------------------------------------


def contract_section() -> str:
    text = (ROOT / "program.md").read_text(encoding="utf-8")
    found = re.search(
        r"^#+ [^\n]*contract of `?kernel\.py`?[^\n]*\n(.*?)(?=^#+ |\Z)", text, re.M | re.S | re.I
    )
    assert found, "program.md has no section on the contract of kernel.py"
    return found[1]


def names_in(text: str) -> set[str]:
    """What stands in backticks: the first word of each, without arguments."""
    return {
        m[1]
        for m in re.finditer(r"`(?:from )?([A-Za-z_][\w.]*)", text)
        if not m[1].endswith((".py", ".json"))
    }


def test_program_md_and_the_prompt_tell_the_same_contract() -> None:
    section = contract_section()
    words = " ".join(RULES.split())
    for name in names_in(section):
        assert re.search(rf"\b{re.escape(name)}\b", words), f"program.md has {name}, the prompt doesn't"
    told = " ".join(section.split())
    for name in ("BACKEND", "kernel_fn", "prepack", "SPACE", "SPACE_FITS", "COMPILE", "forward"):
        assert re.search(rf"\b{name}\b", told) and re.search(rf"\b{name}\b", words), name
    for rule in ("freshly allocated", "any strides", "16 bytes", "autokernel.backends", "math", "ctypes"):
        assert rule in told and rule in words, rule


def test_the_prompt_names_what_the_judge_lets_through() -> None:
    from autokernel.backends import BACKENDS
    from autokernel.judge.stages.static import ALLOWED_IMPORTS

    for name in {*ALLOWED_IMPORTS, *(f'"{b}"' for b in BACKENDS)} - {"__future__"}:
        assert name in RULES, name


# --- its size --------------------------------------------------------------------------------------------

TEXT = st.one_of(
    st.text(max_size=30),
    st.builds(
        lambda piece, n: piece * n,
        st.sampled_from(["a", "`", "é\n", "\n", "word ", "```\n", "x" * 300 + "\n"]),
        st.integers(0, 60_000),
    ),
)
NUMBER = st.one_of(st.none(), st.floats(1e-9, 1e30))
ROWS = st.builds(
    lambda status, us, **texts: row(1, status, latency_us=us if status in TIMED else None, **texts),
    st.sampled_from(STATUSES),
    NUMBER,
    strategy=TEXT,
    description=TEXT,
    reason=TEXT,
    backend=TEXT,
    candidate=st.sampled_from(["", "x", source_id("current")]),
    proposer=st.sampled_from(["tuner", "llm"]),
)


@settings(max_examples=80, deadline=None)
@given(
    st.builds(
        TaskState,
        task=st.builds(
            lambda n, flops, size: make_task(
                inputs=[Port("x" * n, (1,) * (n % 90), "float16", (1,) * (n % 90))] * n,
                flops=flops,
                bytes=size,
            ),
            st.integers(0, 400),
            NUMBER,
            NUMBER,
        ),
        reference=TEXT,
        current=st.one_of(TEXT, st.just("current")),
        recall=TEXT,
        current_latency_us=NUMBER,
        history=st.lists(ROWS, max_size=30),
        baselines=st.dictionaries(TEXT, st.floats(1e-9, 1e30), max_size=9),
        verdicts=st.just({"x": Verdict("crash", log="z\n" * 50_000)}),
    ),
    st.one_of(st.sampled_from([H200, CPU]), st.builds(DeviceFacts, TEXT, versions=TEXT, compiler=TEXT)),
    TEXT,
    st.one_of(st.none(), st.builds(Repair, ROWS, TEXT, TEXT)),
    st.integers(0, MAX_TRIM),
)
def test_no_input_makes_a_prompt_longer_than_its_budget(
    state: TaskState, facts: DeviceFacts, knowledge: str, repair: Repair | None, trim: int
) -> None:
    request = build_request(state, facts, knowledge=knowledge, repair=repair, trim=trim)
    assert len(request.system) <= SYSTEM_LIMIT
    assert len(request.task) <= TASK_LIMIT
    assert len(request.turns) == 1 and len(request.turns[0]["content"]) <= TURN_LIMIT
    assert (
        request.task.startswith("# Task 03-norm-1a2b3c4d\n")
        and "# Asked for: " in request.turns[0]["content"]
    )


def test_the_whole_is_some_thirty_thousand_tokens_at_most() -> None:
    assert SYSTEM_LIMIT + TASK_LIMIT + TURN_LIMIT < 115_000
    assert len(correction("x" * 90_000, "unusable")) <= BUDGET["ask"]
    assert correction("x", "unusable").startswith(CORRECT)
    assert len(question(row(1, "crash"), "x" * 90_000)) < 4_500


def test_trimming_leaves_out_more_and_more() -> None:
    state = make_state(reference="r = 1\n" * 2000, history=make_history() * 4)
    steps = [build_request(state, H200, knowledge=PAGES, trim=trim) for trim in range(MAX_TRIM + 1)]
    texts = [everything(s) for s in steps]
    assert all(len(a) > len(b) for a, b in pairwise(texts))
    gone = [KNOWLEDGE, None, MEMORY, "# Evidence"]
    for step, heading in enumerate(gone, start=1):
        if heading:
            assert heading in texts[step - 1] and heading not in texts[step]
    assert texts[1].count("\n- [") > texts[2].count("\n- [") == 3, "the oldest attempts"
    assert "left out" not in texts[4] and "left out" in texts[5], "the reference"
    limits = [s.max_output_tokens for s in steps]
    assert limits[:2] == [MAX_OUTPUT_TOKENS] * 2 and limits[-1] == LEAST_OUTPUT_TOKENS


def test_a_long_source_is_clipped_in_the_middle_and_says_so() -> None:
    source = "first = 1\n" + "x = 1\n" * 20_000 + "last = 1\n"
    text = build_request(make_state(current=source), H200).turns[0]["content"]
    assert "first = 1" in text and "last = 1" in text and "edit it with search/replace blocks" in text


# --- clipping --------------------------------------------------------------------------------------------


@given(st.text(max_size=3000), st.integers(0, 2000))
def test_clipped_texts_fit(text: str, limit: int) -> None:
    assert len(clip_middle(text, limit)) <= limit
    assert len(clip_list(text.split("a"), limit)) <= limit
    assert len(one_line(text, limit + 1)) <= limit + 1 and "\n" not in one_line(text)
    if len(text) <= limit:
        assert clip_middle(text, limit) == text


def test_both_ends_of_a_compilers_message_stay() -> None:
    text = "kernel.cpp:3: error: first\n" + "note: more\n" * 2000 + "compilation terminated.\n1 error"
    clipped = clip_middle(text, 1000)
    assert clipped.startswith("kernel.cpp:3: error: first\n") and clipped.endswith("terminated.\n1 error")
    assert "characters left out" in clipped


def test_a_list_drops_its_oldest() -> None:
    assert clip_list(["one", "two", "three"], 10, newest_last=True) == "two\nthree"
    assert clip_list(["one", "two", "three"], 10) == "one\ntwo"


def test_a_fence_is_longer_than_any_in_the_text() -> None:
    assert fenced("a\n````\nb").startswith("`````python\n")
