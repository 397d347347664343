"""Shapes that a kernel was not written for: which there are, and that they are tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judge_tasks import LINEARS, RMS_NORM, linears_task, make_task, rms_task, write_kernel

from autokernel.judge import Judge
from autokernel.judge.held_out import RECIPES, held_out, shapes_of
from autokernel.judge.inputs import InputSource
from autokernel.judge.subjects import load_reference
from autokernel.records import Task

pytestmark = pytest.mark.usefixtures("few_rounds")

CPU = torch.device("cpu")


def variants(task: Task) -> list[Task]:
    return held_out(task, load_reference(task.dir / "reference.py", CPU), CPU)


def test_sizes_of_the_recipes() -> None:
    assert {name: recipe(64) for name, recipe in RECIPES.items()} == {
        "one more": 65, "one less": 63, "odd": 33, "prime": 47,
    }  # fmt: skip
    assert [recipe(2) for recipe in RECIPES.values()] == [3, 1, 1, 1]


def test_a_size_is_varied_wherever_it_stands(tmp_path: Path) -> None:
    assert [shapes_of(t) for t in variants(rms_task(tmp_path / "a"))] == [
        "65x257, 257", "63x255, 255", "33x129, 129", "47x191, 191",
    ]  # fmt: skip
    first = variants(linears_task(tmp_path / "b"))[0]
    assert shapes_of(first) == "65x129, 97x129, 33x129"
    assert [p.shape for p in first.outputs] == [(65, 97), (65, 33)]


def test_what_the_reference_has_written_out_stays(tmp_path: Path) -> None:
    reference = LINEARS.replace("x, wa)", "x.view(-1, 128), wa)")
    inputs = {n: (torch.randn(*s), "parameter") for n, s in (("wa", (96, 128)), ("wb", (32, 128)))}
    task = make_task(tmp_path / "a", reference, {"x": (torch.randn(64, 128), "activation"), **inputs})
    assert shapes_of(variants(task)[0]) == "65x128, 97x128, 33x128"
    mask = {"x": (torch.randn(64, 64), "activation"), "m": (torch.ones(64, 64), "constant")}
    reference = RMS_NORM.replace("weight", "m")
    assert variants(make_task(tmp_path / "b", reference, mask)) == []


def test_strides_keep_their_order_and_weights_their_kind(tmp_path: Path) -> None:
    values = {
        "x": (torch.randn(6, 5).t(), "activation"),
        "var": (torch.rand(6) + 0.5, "buffer"),
        "index": (torch.randint(0, 6, (9,)), "activation"),
    }
    reference = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, var, index): return (x / var.sqrt()).t()[index]
"""
    task = make_task(tmp_path, reference, values, high={"index": 6})
    less = variants(task)[1]
    assert [(p.shape, p.stride, p.high) for p in less.inputs] == [
        ((4, 5), (1, 4), None), ((5,), (1,), None), ((8,), (1,), 5),
    ]  # fmt: skip
    x, var, index = InputSource(less, CPU).draw("normal", 1, 1.0)
    assert x.shape == (4, 5) and int(index.max()) < 5
    assert set(var.tolist()) <= set(values["var"][0].tolist())


KERNEL = """
SHAPES = "{}"
def kernel_fn(x, weight):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / {} + 1e-5) * weight
"""


@pytest.mark.parametrize(
    ("claim", "divisor", "status", "detail"),
    [
        ("any", "x.shape[-1]", "keep|discard", "also right on (65x257, 257) and "),
        ("any", "256", "incorrect", "on held-out shapes (65x257, 257): the output on normal inputs"),
        ("fixed", "256", "keep|discard", "the task's own"),
    ],
)
def test_only_a_claim_is_tested(
    tmp_path: Path, judge_of: Callable[[str], Judge], claim: str, divisor: str, status: str, detail: str
) -> None:
    kernel = write_kernel(tmp_path, KERNEL.format(claim, divisor))
    with judge_of("cpu").open(rms_task(tmp_path / "task")) as judge:
        screened, verdict = judge.judge(kernel), judge.judge(kernel, tier="promote")
        assert screened.correct and "only tried when promoted" in screened.stages["shapes"][1]
        assert verdict.status in status.split("|") and detail in verdict.stages["shapes"][1], verdict
        assert judge.judge(kernel).correct, "the task's own buffers are mapped again"


def test_timing_goes_on_with_the_tasks_own_buffers(tmp_path: Path, judge_of: Callable[[str], Judge]) -> None:
    kernel = write_kernel(tmp_path, KERNEL.format("any", "x.shape[-1]"))
    with judge_of("cpu").open(rms_task(tmp_path / "task", 4, 8)) as judge:
        verdict = judge.judge(kernel, tier="promote")
    assert verdict.correct and verdict.latency_us is not None and verdict.stages["timing"][0], verdict
