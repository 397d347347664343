"""The comparator accepts honest rounding and refuses everything else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autokernel.judge.compare import (
    Measures,
    check_structure,
    compare,
    error_of,
    is_finite,
    measure,
    nonfinite_masks_equal,
    rounded_once,
)
from autokernel.judge.layout import TensorSpec


def matmul_case(dtype, seeds: int = 5, n: int = 256) -> tuple[Tensor, Tensor, Tensor, Tensor, Measures]:
    """x, w, float64's answer, eager's answer, and eager's largest error over the seeds."""
    e0 = Measures()
    for seed in range(seeds):
        gen = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(n, n, generator=gen).to(dtype) for _ in range(2))
        exact, eager = x.double() @ w.double(), x @ w
        e0 = e0.largest(error_of(eager, exact))
    return x, w, exact, eager, e0


def judged(actual, exact, eager, e0, **more):
    return compare(actual, exact, eager, e0, label="the output", **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_honest_variants_pass(dtype) -> None:
    x, w, exact, eager, e0 = matmul_case(dtype)
    split = (x.float()[:, :128] @ w.float()[:128] + x.float()[:, 128:] @ w.float()[128:]).to(dtype)
    for variant in (eager, exact.to(dtype), split):
        result = judged(variant, exact, eager, e0)
        assert result.ok and result.ratio is not None and result.ratio < 2.5, result.reason


def test_sequential_fp32_sums_pass() -> None:
    x, w, exact, eager, e0 = matmul_case(torch.float32)
    total = torch.zeros(256, 256)
    for k in range(256):
        total += x[:, k : k + 1] * w[k : k + 1]
    assert judged(total, exact, eager, e0).ok


CHEATS = {
    "fp16 accumulation": lambda x, w, exact: sum_narrow(x, w),
    "drops the last 1/64 of K": lambda x, w, exact: x[:, :-4] @ w[:-4],
    "zeros": lambda x, w, exact: torch.zeros_like(exact, dtype=x.dtype),
    "the mean": lambda x, w, exact: exact.mean().to(x.dtype).expand(exact.shape),
    "one tile missing": lambda x, w, exact: zero_tile(exact.to(x.dtype)),
    "one wrong element": lambda x, w, exact: one_off(exact.to(x.dtype)),
}


def sum_narrow(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(256, 256, dtype=x.dtype)
    for k in range(256):
        total += x[:, k : k + 1] * w[k : k + 1]
    return total


def zero_tile(t: Tensor) -> Tensor:
    t = t.clone()
    t[64:128, 192:] = 0
    return t


def one_off(t: Tensor) -> Tensor:
    t = t.clone()
    t[17, 99] += 1
    return t


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cheats_fail(cheat, dtype) -> None:
    if cheat == "fp16 accumulation" and dtype != torch.float16:
        pytest.skip("is honest in float32")
    x, w, exact, eager, e0 = matmul_case(dtype)
    result = judged(CHEATS[cheat](x, w, exact), exact, eager, e0)
    assert not result.ok and "eager's own" in result.reason


def test_bf16_behind_fp32_fails_by_far() -> None:
    x, w, exact, eager, e0 = matmul_case(torch.float32)
    result = judged((x.bfloat16() @ w.bfloat16()).float(), exact, eager, e0)
    assert not result.ok and result.ratio is not None and result.ratio > 1000


def test_the_reason_says_which_measure_and_where() -> None:
    _, _, exact, eager, e0 = matmul_case(torch.float16)
    reason = judged(one_off(eager), exact, eager, e0).reason
    assert "element [17, 99]" in reason and "limit 4x" in reason and "row 0, column 64" in reason
    reason = judged(zero_tile(eager), exact, eager, e0).reason
    assert "Frobenius" in reason and "row 64, column 192" in reason


def test_worst_tile_sees_what_the_other_measures_miss() -> None:
    gen = torch.Generator().manual_seed(0)
    exact = torch.randn(512, 512, generator=gen).double()
    exact[:64, :64] *= 1e-3
    eager = exact.float()
    wrong = eager.clone()
    wrong[:64, :64] *= 1 + 1e-5
    e0 = error_of(eager, exact)
    assert "worst tile" in judged(wrong, exact, eager, e0).reason


def test_pure_data_movement_must_be_exact() -> None:
    exact = torch.randn(8, 8)
    e0 = error_of(exact.clone(), exact.double())
    assert e0.zero
    moved = torch.nextafter(exact, torch.tensor(math.inf))
    assert judged(exact.clone(), exact.double(), exact, e0, exact_required=True).ok
    result = judged(moved, exact.double(), exact, e0, exact_required=True)
    assert not result.ok and "must be exact" in result.reason


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_where_eager_happens_to_be_exact_one_rounding_is_no_error(dtype: torch.dtype, seed: int) -> None:
    """As in attention on large numbers: the softmax is 0 or 1, and eager hands out a row of v as it is."""
    torch.manual_seed(seed)
    exact = 1000 * torch.randn(64, 64).to(dtype)
    eager, step = exact.clone(), torch.finfo(dtype).eps
    some = torch.rand(64, 64) < (1.0 if dtype == torch.float32 else 0.2)
    once = torch.where(some, torch.nextafter(exact, torch.full_like(exact, math.inf)), exact)
    far = (exact.double() * (1 + 8 * step)).to(dtype)
    half = exact.clone()
    half[3, :32] = 0
    never, rarely = Measures(), Measures(*[1e-3 * step] * 3)
    for e0 in (never, rarely):
        assert judged(once, exact.double(), eager, e0).ok
        assert not judged(once, exact.double(), eager, e0, exact_required=True).ok
        for wrong in (far, half):
            result = judged(wrong, exact.double(), eager, e0)
            assert not result.ok and "eager's own" in result.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_that_leeway_is_no_more_than_eagers_usual_error(dtype: torch.dtype) -> None:
    exact = torch.randn(256, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    usual, floor = error_of(exact.to(dtype), exact), rounded_once(exact, dtype, torch.isfinite(exact))
    assert 0.9 * usual.frobenius < floor.frobenius <= usual.frobenius
    assert floor.peak <= 1.2 * usual.peak and floor.tile <= usual.tile


def test_a_handful_of_elements_may_round_once() -> None:
    exact = torch.tensor([1 / 3], dtype=torch.float64)
    eager = exact.float()
    lucky = Measures(1e-12, 1e-12, 1e-12)
    neighbour = torch.nextafter(eager, torch.tensor([1.0]))
    assert judged(neighbour, exact, eager, lucky).ok
    assert not judged(eager * (1 + 1e-5), exact, eager, lucky).ok


def test_nonfinite_values_must_stand_where_float64_has_them() -> None:
    exact = torch.randn(4, 70).double()
    exact[0, 1], exact[1, 2], exact[2, 3] = math.nan, math.inf, -math.inf
    eager, e0 = exact.float(), Measures(1e-7, 1e-7, 1e-7)
    assert judged(eager.clone(), exact, eager, e0).ok
    for place, value in (((3, 3), math.nan), ((0, 1), 0.0), ((1, 2), -math.inf), ((2, 3), -3e38)):
        wrong = eager.clone()
        wrong[place] = value
        result = judged(wrong, exact, eager, e0)
        assert not result.ok and f"element [{place[0]}, {place[1]}]" in result.reason


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int8, torch.bool]
)
def test_finite_is_known_of_every_type(dtype: torch.dtype) -> None:
    values = (
        torch.tensor([1.0, math.nan, 0.0]).to(dtype)
        if dtype.is_floating_point
        else torch.ones(3, dtype=dtype)
    )
    assert is_finite(values).tolist() == [True, not dtype.is_floating_point, True]


def test_being_finite_where_only_eager_overflowed_is_no_fault() -> None:
    exact = torch.full((4, 70), 1e5, dtype=torch.float64)
    eager = exact.half()  # inf
    e0 = Measures(1e-3, 1e-3, 1e-3)
    assert not nonfinite_masks_equal(eager, exact)
    assert judged(torch.full_like(eager, 65504), exact, eager, e0).ok
    assert judged(eager.clone(), exact, eager, e0).ok


def test_complex_outputs() -> None:
    gen = torch.Generator().manual_seed(0)
    exact = torch.randn(70, 70, generator=gen, dtype=torch.complex128)
    eager = exact.to(torch.complex64)
    e0 = error_of(eager, exact)
    assert judged(eager * (1 + 1e-7), exact, eager, e0).ok
    assert not judged(eager.conj(), exact, eager, e0).ok
    assert not judged(eager.real.to(torch.complex64), exact, eager, e0).ok


def test_integers_are_exact_but_where_float64_is_on_the_edge() -> None:
    exact = torch.arange(100)
    assert judged(exact.clone(), exact, exact, Measures()).ok
    wrong = exact.clone()
    wrong[7] = 0
    result = judged(wrong, exact, exact, Measures(), fragile=lambda: torch.ones(100, dtype=torch.bool))
    assert not result.ok and "[7] is 0, expected 7" in result.reason  # eager made no mistake at all
    eager = exact.clone()
    eager[3] = 4
    budget = error_of(eager, exact)
    edge = torch.zeros(100, dtype=torch.bool)
    edge[7] = True
    assert judged(wrong, exact, eager, budget, fragile=lambda: edge).ok
    assert not judged(wrong, exact, eager, budget, fragile=lambda: torch.zeros_like(edge)).ok


def spec(shape, stride=None, dtype=torch.float16) -> TensorSpec:
    plain = TensorSpec(dtype, tuple(shape), tuple(shape)).contiguous()
    return plain if stride is None else TensorSpec(dtype, tuple(shape), tuple(stride))


def test_structure() -> None:
    want = spec((2, 3, 4))
    assert check_structure(spec((2, 3, 4)), want, "it") == ""
    assert check_structure(spec((2, 3, 4), (24, 8, 1)), want, "it") == ""  # padded rows, same order
    assert "shape" in check_structure(spec((2, 12)), want, "it")
    assert "float32" in check_structure(spec((2, 3, 4), dtype=torch.float32), want, "it")
    assert "order" in check_structure(spec((2, 3, 4), (12, 1, 3)), want, "it")
    assert "broadcast" in check_structure(spec((2, 3, 4), (0, 4, 1)), want, "it")
    assert check_structure(spec((1, 3), (99, 1)), spec((1, 3)), "it") == ""  # size 1: no order
    assert check_structure(spec((2, 3)), spec((2, 3), (0, 1)), "it") == ""  # eager broadcasts, we need not


def test_measures_of_equal_and_empty_tensors() -> None:
    x = torch.randn(3, 5).double()
    assert measure(x.clone(), x)[0] == Measures()
    assert measure(torch.empty(0, 4), torch.empty(0, 4).double())[0] == Measures()
    zero = torch.zeros(4, 4).double()
    assert measure(zero.clone(), zero)[0] == Measures()
    assert measure(zero + 1, zero)[0].peak == math.inf
    scalar = torch.tensor(2.0).double()
    assert measure(torch.tensor(2.5), scalar)[0].frobenius == pytest.approx(0.25)


def test_huge_values_do_not_overflow_the_measures() -> None:
    exact = torch.full((64, 64), 1e200, dtype=torch.float64)
    assert measure(exact * (1 + 1e-6), exact)[0].frobenius == pytest.approx(1e-6)
