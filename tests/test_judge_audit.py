"""The audit: calls that are released one at a time, and three processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from judge_tasks import LINEARS, MERGED, make_task, rms_task, write_kernel

from autokernel.judge import Judge, TaskJudge
from autokernel.judge.clock import Sample
from autokernel.judge.contents import Contents
from autokernel.judge.stages import STAGES, audit, correctness, load, timing
from autokernel.judge.trial import SUBJECT, StageResult, Trial
from autokernel.records import Ratio

GOOD = """
def kernel_fn(x, weight):
    {}
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
"""
STEPPING = "sys = __import__('sys')\n    if sys._getframe(2).f_code.co_name == 'steps': {}"


@pytest.fixture(scope="module")
def norm(tmp_path_factory: pytest.TempPathFactory, judge_of: Callable[[str], Judge]) -> Iterator[TaskJudge]:
    with judge_of("cpu").open(rms_task(tmp_path_factory.mktemp("task"))) as judge:
        yield judge


def test_an_honest_kernel_and_what_is_said_of_it(
    norm: TaskJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = write_kernel(tmp_path, GOOD.format("pass"))
    assert norm.judge(kernel).stages["audit"] == (True, "not asked for")
    monkeypatch.setattr(audit, "PROCESSES", 1)
    verdict = norm.judge(kernel, tier="audit")
    assert verdict.correct, verdict
    passed, said = verdict.stages["audit"]
    assert passed and re.search(r"x eager one call at a time.*; 2 processes: \S+x, \S+x eager", said), said
    assert verdict.vs_eager is not None and verdict.provenance == "library"


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize(
    ("deed", "status", "reason"),
    [
        ("raise RuntimeError('not like this')", "crash", "not like this.*one call at a time"),
        ("return x", "incorrect", "shares an input's memory.*one call at a time"),
        ("return torch.zeros_like(x)", "incorrect", "in a timed call.*one call at a time"),
        ("__import__('os')._exit(0)", "crash", "ended .exit code 0. while being timed call by call"),
        ("__import__('os').write(4, b'x' * 9)", "rejected", "neither a step nor the end of them"),
        ("__import__('os').write(4, bytes([1]) * 99)", "incorrect|rejected", "NaN|channel"),
    ],
)
def test_what_goes_wrong_only_then(
    norm: TaskJudge, tmp_path: Path, deed: str, status: str, reason: str
) -> None:
    verdict = norm.judge(write_kernel(tmp_path, GOOD.format(STEPPING.format(deed))), tier="audit")
    assert verdict.status in status.split("|") and re.search(reason, verdict.reason, re.DOTALL), verdict
    assert verdict.latency_us is None
    assert norm.judge(write_kernel(tmp_path, GOOD.format("pass"), "good.py")).correct


FORGED = """
import torch
BACKEND = "torch"
def kernel_fn(x, weight):
    frame = __import__("sys")._getframe(2)
    if frame.f_code.co_name == "steps":
        slots = frame.f_locals["args"]["slots"]
        while frame.f_code.co_name != "serve":
            frame = frame.f_back
        there = frame.f_globals
        reply = there["Reply"](doubles=[1e-6] * len(slots))
        request = frame.f_locals["request"]
        __import__("os").write(4, there["GIVEN_UP"] + reply.pack(request.op, request.nonce))
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
"""


def test_a_forged_reply_in_the_middle_of_steps_is_a_verdict(norm: TaskJudge, tmp_path: Path) -> None:
    verdict = norm.judge(write_kernel(tmp_path, FORGED.replace("import torch\n", "", 1)), tier="audit")
    assert verdict.status == "rejected" and "steps that were never made" in verdict.reason, verdict
    assert norm.judge(write_kernel(tmp_path, GOOD.format("pass"), "good.py")).correct


def test_an_input_does_not_exist_before_the_last_output_is_held(norm: TaskJudge, tmp_path: Path) -> None:
    outputs = norm.candidate_outputs
    worker = norm.start_kernel(write_kernel(tmp_path, GOOD.format("pass")), outputs)
    contents = Contents(norm.inputs, norm.maker, norm._statics)
    worker.prepare(SUBJECT, range(norm.inputs.timed), graph=False, each=True)
    contents.deal()
    before = [[value.clone() for value in values] for values in contents.values]
    contents.draw()
    seen: list[tuple[str, int]] = []
    order = [2, 0, 1] if norm.inputs.timed > 2 else [0]  # a busy host's calls are long, and few are timed

    def write(slot: int) -> None:
        assert not norm.inputs.changed_input(slot, before[slot]), "still what was there"
        seen.append(("released", slot))
        contents.write(slot)

    def take(slot: int) -> None:
        seen.append(("held", slot))
        assert norm.maker.check(contents.case(slot), outputs.outputs(slot)).ok

    try:
        made = worker.steps(SUBJECT, order, write, take)
    finally:
        worker.close()
    assert seen == [(what, slot) for slot in order for what in ("released", "held")]
    assert all(0 < s.claimed_s < s.gated_s and s.calls == 1 for s in made)


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize(("factors", "expected"), [([3.0, 1.0], 1.0), ([3.0, 2.0], 2.0), ([1.05], 1.05)])
def test_a_contradiction_is_looked_at_again_in_the_next_process(
    norm: TaskJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: list[float], expected: float
) -> None:
    """A process that the judge's clock sees late is no kernel's fault; what is slow in each process is."""
    left = list(factors)
    monkeypatch.setattr(audit, "PROCESSES", 1)
    monkeypatch.setattr(audit, "_one_at_a_time", lambda _: audit.Singles("alone", left.pop(0), ", slowly"))
    monkeypatch.setitem(STAGES, "timing", _timed)
    monkeypatch.setattr(timing, "run", _timed)
    verdict = norm.judge(write_kernel(tmp_path, GOOD.format("pass")), tier="audit")
    assert verdict.correct and not left, verdict
    assert verdict.vs_eager is not None and verdict.vs_eager.ratio == pytest.approx(4.0 / expected)
    assert verdict.latency_us == pytest.approx(10.0 * expected)
    assert ("slowly" in verdict.stages["audit"][1]) == (expected > 1)


def _timed(trial: Trial) -> StageResult:
    trial.latency_us, trial.ratios = 10.0, {"eager": Ratio(4.0, 4.0, 4.0, 4.0, 100)}
    return StageResult(True)


def test_of_three_processes_the_worst_counts() -> None:
    ratios = [Ratio(r, r - 0.02, r + 0.02, r - 0.01, 100) for r in (1.3, 1.1, 1.2)]
    assert audit._worst(ratios) == ratios[1]
    half = audit._scaled(ratios[0], 0.5)
    assert (half.ratio, half.low, half.high, half.lower_bound) == (0.65, 0.64, 0.66, 0.645)


def test_a_step_that_is_seen_late_is_not_the_kernels() -> None:
    """The judge's core was another's at the end of one step in six: three of four samples would have it."""
    made = [Sample(4e-4, 5.4e-4, 1) for _ in range(5)] + [Sample(4e-4, 4e-3, 1)]
    assert audit.typical_step(made) == Sample(6 * 4e-4, 6 * 5.4e-4, 6)


def test_work_that_most_steps_do_not_claim_is_seen() -> None:
    made = [Sample(1e-4, 9e-4, 1) for _ in range(4)] + [Sample(4e-4, 5e-4, 1) for _ in range(2)]
    assert audit.typical_step(made) == Sample(6 * 1e-4, 6 * 9e-4, 6)


def test_single_calls_agree_with_many_for_an_honest_kernel(tmp_path: Path, judge_of) -> None:
    """Outputs of 400 kB: what is slow beside them must not be laid at the kernel's door."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 256, generator=generator)
    weights = {n: (torch.randn(256, 256, generator=generator) / 16, "parameter") for n in ("wa", "wb")}
    task = make_task(tmp_path / "t", LINEARS, {"x": (x, "activation"), **weights}, family="sibling_linears")
    kernel = write_kernel(tmp_path, MERGED.replace("96, 32", "256, 256").replace(
        "a.contiguous(), b.contiguous()", "a, b"
    ))  # fmt: skip
    said = []
    with judge_of("cpu").open(task) as judge:
        for _ in range(3):  # a busy host may spoil one or two; what is laid at its door always, all of them
            trial = Trial(judge, kernel, "audit", None)
            try:
                assert all(stage.run(trial).passed for stage in (load, correctness, timing))
                before = trial.ratios["eager"].ratio
                found = audit._one_at_a_time(trial)
                said.append(f"{before:.2f} among many; {found}")
            finally:
                trial.close()
            if found.factor < 1 / 0.7:
                return
    pytest.fail("\n".join(said))


def test_a_sample_that_is_one_call_is_stepped_through_as_well(tmp_path: Path, judge_of) -> None:
    text = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.special.digamma(x * x + 1.5)
"""
    x = torch.randn(768, 1024, generator=torch.Generator().manual_seed(0))
    task = make_task(tmp_path / "t", text, {"x": (x, "activation")}, family="pointwise")
    kernel = write_kernel(tmp_path, "def kernel_fn(x):\n    return torch.special.digamma(x * x + 1.5)\n")
    with judge_of("cpu").open(task) as judge:
        assert judge.calls == 1
        trial = Trial(judge, kernel, "audit", None)
        try:
            assert all(stage.run(trial).passed for stage in (load, correctness, timing))
            assert "x eager one call at a time" in audit._one_at_a_time(trial).said
        finally:
            trial.close()
