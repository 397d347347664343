"""Small rows and columns beside large ones are held against their own size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autokernel.judge.compare import compare, error_of
from autokernel.judge.slices import columns_of, lost, rows_of


def gated(*, column: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """A product whose rows (or columns) go from 1e-12 to 1; float64's answer, eager's, and the scales."""
    gen = torch.Generator().manual_seed(int(column))
    x, w = (torch.randn(192, 192, generator=gen).to(dtype) for _ in range(2))
    scale = torch.logspace(-12, 0, 192, dtype=torch.float64)
    scale = scale[None] if column else scale[:, None]
    return (x.double() @ w.double()) * scale, ((x @ w).double() * scale).to(dtype), scale


def judged(actual: Tensor, exact: Tensor, eager: Tensor):
    return compare(actual, exact, eager, error_of(eager, exact), label="the output")


@pytest.mark.parametrize("column", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_lost_in_small_slices_is_seen(dtype: torch.dtype, column: bool) -> None:
    exact, eager, scale = gated(column=column, dtype=dtype)
    assert judged(eager, exact, eager).ok and judged(exact.to(dtype), exact, eager).ok
    small = (scale < 1e-9).expand(exact.shape)
    for cheat in (torch.zeros_like(eager), (exact * 1.5).to(dtype)):
        result = judged(torch.where(small, cheat, eager), exact, eager)
        if column and dtype == torch.bfloat16:  # there a column may be off by what the output may
            assert result.ok
        else:
            name = "column" if column else "row"
            assert not result.ok and f"of 192 {name}s are wrong on their own scale" in result.reason


def test_less_precision_for_small_rows_is_seen_in_float32() -> None:
    exact, eager, scale = gated(column=False)
    small = (scale < 1e-6).expand(exact.shape)
    result = judged(torch.where(small, eager.bfloat16().float(), eager), exact, eager)
    assert not result.ok and "96 of 192 rows" in result.reason, result.reason


def test_what_cancels_is_held_against_eager_in_the_same_row() -> None:
    """Half of the rows are a difference of equal sums: noise, in eager and in a kernel."""
    gen = torch.Generator().manual_seed(3)
    a, b = torch.randn(64, 4096, generator=gen), torch.randn(64, 4096, generator=gen)
    exact = torch.randn(128, 64, generator=gen).double()
    exact[::2] = (a.double().sum(1) - a.flip(1).double().sum(1))[:, None] + 1e-9 * exact[::2]
    noise = 1e-6 * torch.randn(128, 64, generator=gen, dtype=torch.float64)
    eager, other = (exact + noise).float(), (exact - 2 * noise + 1e-7 * b[:, :128].T.double()).float()
    assert judged(other, exact, eager).ok, judged(other, exact, eager).reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_a_row_is_one_number_luck_is_no_fault(dtype: torch.dtype) -> None:
    """Attention on small inputs: every query gets the mean of the values.  A mean that is broadcast."""
    for seed in range(40):
        gen = torch.Generator().manual_seed(seed)
        v = torch.randn(512, 256, generator=gen).to(dtype)
        exact = v.double().mean(0).expand(300, 256)
        eager = v.float().mean(0).to(dtype).expand(300, 256)
        other = (v.float().view(8, 64, 256).sum(1).sum(0) / 512 * (1 + 6e-8)).to(dtype).expand(300, 256)
        for turned in (False, True):
            args = [(t.T.contiguous() if turned else t.contiguous()) for t in (other, exact, eager)]
            assert judged(*args).ok, (seed, turned, judged(*args).reason)


def test_an_exponential_is_known_to_one_rounding_of_its_argument() -> None:
    """e^-h as 2^(-h / ln 2): the product is rounded, which e^-80 is off by some 80 roundings for."""
    h = torch.linspace(0, 80, 256)[:, None] + torch.rand(256, 64, generator=torch.Generator().manual_seed(0))
    exact, eager, other = torch.exp(-h.double()), torch.exp(-h), torch.exp2(-h * 1.4426950408889634)
    assert judged(other, exact, eager).ok
    wrong = torch.exp2(-h * 1.4427)  # a constant of five digits
    assert not judged(wrong, exact, eager).ok


def test_rows_too_small_for_normal_numbers_may_be_zeros() -> None:
    exact, eager, _ = gated(column=False)
    exact, eager = exact * 1e-28, (exact * 1e-28).float()
    flushed = torch.where(eager.abs() < torch.finfo(torch.float32).tiny, 0.0, eager)
    assert not torch.equal(flushed, eager) and judged(flushed, exact, eager).ok


def test_what_a_row_and_a_column_is() -> None:
    def shape(tensor: Tensor | None) -> tuple[int, ...] | None:
        return None if tensor is None else tuple(tensor.shape)

    assert shape(rows_of(torch.zeros(2, 3, 80))) == (6, 80)
    assert shape(rows_of(torch.zeros(5, 3, 8, 8))) == (15, 64)
    assert shape(rows_of(torch.zeros(90, 8))) is None  # eight elements are luck, and the rest is everything
    assert shape(columns_of(torch.zeros(90, 8))) == (8, 90)
    assert shape(columns_of(torch.zeros(5, 64, 7))) == (35, 64)
    assert shape(columns_of(torch.zeros(2, 3, 80))) is None
    assert rows_of(torch.zeros(())) is None and columns_of(torch.zeros(100)) is None
    x = torch.arange(5 * 64 * 7).view(5, 64, 7)
    folded = columns_of(x)
    assert folded is not None and torch.equal(folded[9], x[1, :, 2])
    none = torch.zeros(3, 0)
    assert lost(none, none.double(), none, none.bool(), limit=4, typical=1e-7) == ""


def test_nothing_is_lost_where_numbers_are_not_finite_or_complex() -> None:
    exact = torch.randn(70, 70, dtype=torch.complex128)
    eager = exact.to(torch.complex64)
    assert judged(eager, exact, eager).ok
    small = eager.clone()
    small[:9] *= 1e-9
    exact[:9] *= 1e-9
    assert judged(small, exact, small).ok
    zero = small.clone()
    zero[:9] = 0
    assert "9 of 70 rows" in judged(zero, exact, small).reason
    exact, eager = exact.real.clone(), small.real.clone()
    for tensor in (exact, eager):
        tensor[5], tensor[:, 6] = float("nan"), float("inf")
    assert judged(eager, exact, eager).ok
