"""Counting work on FX graphs, against counts made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autokernel import roofline
from autokernel.hardware import Ceilings


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """Trace to torch-level FX with real values as metadata, the way a region's subgraph looks."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    return found[0]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


CASES = {
    "linear": (
        lambda x, w, b: F.linear(x, w, b),
        [(2, 5, 8), (3, 8), (3,)],
        2 * 10 * 8 * 3,
        80 + 24 + 3 + 30,
    ),
    "matmul": (lambda a, b: a @ b, [(4, 5, 6), (6, 7)], 2 * 4 * 5 * 6 * 7, 120 + 42 + 140),
    "matmul broadcast": (
        lambda a, b: torch.matmul(a, b),
        [(5, 6), (3, 6, 7)],
        2 * 3 * 5 * 6 * 7,
        30 + 126 + 105,
    ),
    "vector": (lambda a, b: a @ b, [(6,), (6,)], 2 * 6, 13),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5, 24 + 40 + 30),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5, 30 + 24 + 40 + 30),
    "addmm": (torch.addmm, [(5,), (3, 4), (4, 5)], 2 * 3 * 4 * 5, 5 + 12 + 20 + 15),
    "square": (lambda a: a @ a, [(6, 6)], 2 * 6 * 6 * 6, 72),
    "einsum": (
        lambda a, b: torch.einsum("bik,bkj->bij", a, b),
        [(2, 3, 4), (2, 4, 5)],
        2 * 120,
        24 + 40 + 30,
    ),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=2),
        [(1, 4, 6, 6), (8, 2, 3, 3)],
        2 * (8 * 36) * (2 * 9),
        144 + 144 + 288,
    ),
    "conv_transpose": (
        lambda x, w: F.conv_transpose1d(x, w),
        [(1, 4, 6), (4, 3, 5)],
        2 * (4 * 6) * (3 * 5),
        24 + 60 + 30,
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [(1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 10)],
        2 * 2 * 4 * 6 * (8 + 10),
        64 + 96 + 120 + 80,
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)],
        2 * 2 * 10 * (8 + 8),
        4 * 64,
    ),
    "pointwise": (lambda a, b: (a + b).relu(), [(4, 5), (4, 5)], 0, 60),
    "chain keeps nothing inside": (lambda a: ((a * 2).exp() + 1).sum(), [(4, 5)], 0, 21),
    "only the used slice": (lambda x, w: F.linear(x, w)[:, :2], [(3, 8), (6, 8)], 2 * 3 * 8 * 2, 24 + 48 + 6),
    "used part of an input": (lambda x, t: x * t[:4], [(4, 5), (100, 5)], 0, 20 + 20 + 20),
    "both halves of an input": (lambda x: x[:2] * x[2:], [(4, 5)], 0, 20 + 10),
    "views are free": (lambda x: x.view(2, 10).t().reshape(20) + 1, [(4, 5)], 0, 40),
    "expanded": (lambda x, y: x.expand(6, 5) * y, [(1, 5), (6, 5)], 0, 5 + 30 + 30),
}


@pytest.mark.parametrize("name", CASES)
def test_counts(name: str) -> None:
    function, shapes, flops, elements = CASES[name]
    gm = graph_of(function, *[rand(*shape) for shape in shapes])
    assert roofline.flops_of(gm) == pytest.approx(flops)
    assert roofline.bytes_of(gm) == pytest.approx(4 * elements)


def test_one_operand_read_twice_counts_once() -> None:
    gm = graph_of(lambda x: (x * x, x + 1), rand(10))
    assert roofline.bytes_of(gm) == 4 * 30


def test_an_output_that_is_a_view_of_another_is_not_written_twice() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y.view(2, 5)

    assert roofline.bytes_of(graph_of(function, rand(10))) == 4 * 20


def test_constants_are_free() -> None:
    gm = graph_of(lambda x, mask: x.masked_fill(mask, 0.0), rand(8, 8), torch.ones(8, 8, dtype=torch.bool))
    assert roofline.bytes_of(gm) == 2 * 256 + 64
    assert roofline.bytes_of(gm, ["activation", "constant"]) == 2 * 256


def test_embedding_reads_the_rows_that_are_looked_up() -> None:
    gm = graph_of(F.embedding, torch.randint(0, 10**6, (1, 4)), rand(10**6, 8))
    assert roofline.bytes_of(gm) == pytest.approx(4 * 8 + 2 * (4 * 8 * 4), rel=1e-3)
    # More look-ups than rows read the table once.
    gm = graph_of(F.embedding, torch.randint(0, 4, (1, 4000)), rand(4, 8))
    assert roofline.bytes_of(gm) == pytest.approx(4000 * 8 + 4 * 8 * 4 + 4000 * 8 * 4)


def test_masked_scores_scale_attention_by_hand_but_not_linears() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear((q @ k.transpose(-2, -1)).softmax(-1) @ k, w)

    gm = graph_of(function, rand(4, 8), rand(4, 8), rand(8, 8))
    product, linear = 2 * 4 * 4 * 8, 2 * 4 * 8 * 8
    assert roofline.flops_of(gm) == 2 * product + linear
    assert roofline.flops_of(gm, kept=0.5) == product + linear


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (1, 1), (3, 5), (5, 3)])
def test_causal_share(queries: int, keys: int) -> None:
    mask = torch.ones(queries, keys).tril()
    assert roofline.causal_share(queries, keys) == pytest.approx(float(mask.mean()))


def test_flops_by_dtype() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w).bfloat16(), w.bfloat16())

    assert roofline.flops_by_dtype(graph_of(function, rand(2, 4), rand(4, 4))) == {
        "float32": 64,
        "bfloat16": 64,
    }


CEILINGS = Ceilings(1e12, {"float32": 1e12, "tf32": 4e12, "bfloat16": 1e13})


def test_the_roofline_is_the_longer_of_the_two() -> None:
    assert roofline.roofline_us(1e6, 5e6, "float32", CEILINGS) == pytest.approx(5.0)
    assert roofline.roofline_us(9e6, 5e6, "float32", CEILINGS) == pytest.approx(9.0)
    assert roofline.roofline_us(8e6, 1e6, "float32", CEILINGS, allow_tf32=True) == pytest.approx(2.0)
    assert roofline.roofline_us({"float32": 4e6, "bfloat16": 1e7}, 0, "float32", CEILINGS) == pytest.approx(
        5.0
    )


def test_what_was_not_measured_is_not_guessed() -> None:
    assert roofline.roofline_us(1e6, 1e6, "float32", Ceilings(None, {"float32": 1e12})) is None
    assert roofline.roofline_us(1e9, 3e6, "float8_e4m3fn", CEILINGS) == pytest.approx(3.0)


def test_head_room_and_amdahl() -> None:
    assert roofline.head_room(10.0, 4.0) == 2.5
    assert roofline.head_room(3.0, 4.0) == 1.0
    assert roofline.head_room(None, 4.0) is None and roofline.head_room(4.0, None) is None
    assert roofline.amdahl_bound(0.5, 2.0) == pytest.approx(1 / 0.75)
    assert roofline.amdahl_bound(0.0, 9.0) == 1.0
    assert roofline.amdahl_bound(0.5, None) is None
    assert roofline.intensity(10, 5) == 2 and roofline.intensity(10, 0) is None


def test_module_calls_count_like_functions() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    assert roofline.flops_of(graph_of(model, rand(3, 8))) == 2 * 3 * 8 * 4 + 2 * 3 * 4 * 2
