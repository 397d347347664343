"""The float64 oracle really computes in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autokernel.judge import oracle


class RMSNorm(nn.Module):
    """Casts on its own, in each of the ways that models do."""

    def __init__(self, cast, back) -> None:
        super().__init__()
        self.cast, self.back = cast, back

    def forward(self, x, weight):
        h = self.cast(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.back(h, x) * weight


CASTS = {
    "to": lambda x: x.to(torch.float32),
    "to-keyword": lambda x: x.to(dtype=torch.float32),
    "to-device-dtype": lambda x: x.to("cpu", torch.float32),
    "float": lambda x: x.float(),
    "type": lambda x: x.type(torch.float32),
    "type-name": lambda x: x.type("torch.FloatTensor"),
    "aten": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float32),
}
BACKS = {
    "type_as": lambda h, x: h.type_as(x),
    "half": lambda h, x: h.half(),
    "to-other": lambda h, x: h.to(x),
    "dtype": lambda h, x: h.to(x.dtype),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("back", BACKS)
def test_a_norm_with_its_own_casts_is_exact(cast, back) -> None:
    x, weight = torch.randn(16, 64).half(), torch.randn(64).half()
    got = oracle.exact(RMSNorm(CASTS[cast], BACKS[back]), [x, weight])
    d = x.double()
    want = d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert got.dtype == torch.float64
    assert ((got - want).norm() / want.norm()).item() < 1e-12
    eager = oracle.eager(RMSNorm(CASTS[cast], BACKS[back]), [x, weight])
    assert ((eager.double() - want).norm() / want.norm()).item() > 1e-5


class Function(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x @ torch.full((8, 8), 1 / 3, dtype=torch.float16),
        lambda x: x + torch.tensor(1 / 3),
        lambda x: x * torch.arange(8).float() / 7,
        lambda x: torch.where(x > 0, x, torch.zeros((), dtype=torch.float16)) / 3,
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: x.new_full((8,), 0.1, dtype=torch.bfloat16) + x,
        lambda x: torch.zeros_like(x, dtype=torch.bfloat16) + x / 3,
        lambda x: F.gelu(x) + F.silu(x),
    ],
)
def test_factories_and_dtype_arguments_are_widened(fn) -> None:
    x = torch.randn(8, 8).half()
    got = oracle.exact(Function(fn), [x])
    assert got.dtype == torch.float64
    narrow = got.to(torch.bfloat16).double()
    assert (narrow - got).abs().max() > 0  # it holds digits that no narrow type does


def test_autocast_is_off_both_ways_of_entering() -> None:
    def with_context(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w

    def as_captured(x, w):
        mode = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, None)
        y = x @ w
        torch.amp.autocast_mode._exit_autocast(mode)
        return y

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for fn in (with_context, as_captured):
        got = oracle.exact(Function(fn), [x, w])
        assert torch.allclose(got, x.double() @ w.double(), rtol=1e-13, atol=0)
        assert oracle.eager(Function(fn), [x, w]).dtype == torch.bfloat16


def test_complex_rope_in_complex128() -> None:
    def rope(x, freqs):
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * freqs).flatten(-2).type_as(x)

    x, freqs = torch.randn(4, 8).half(), torch.polar(torch.ones(4), torch.rand(4))
    got = oracle.exact(Function(rope), [x, freqs])
    z = torch.view_as_complex(x.double().reshape(4, 4, 2)) * freqs.to(torch.complex128)
    assert torch.equal(got, torch.view_as_real(z).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_default_eps_of_rms_norm_is_that_of_the_users_dtype(dtype) -> None:
    x = torch.full((2, 8), 1e-4, dtype=dtype)
    got = oracle.exact(Function(lambda x: F.rms_norm(x, (8,))), [x])
    d = x.double()
    want = d / (d.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    assert torch.allclose(got, want, rtol=1e-12)
    eager = oracle.eager(Function(lambda x: F.rms_norm(x, (8,))), [x])
    assert torch.allclose(eager.double(), want, rtol=2e-3)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("freqs", torch.polar(torch.ones(8), torch.rand(8)))
        self.scale = torch.tensor(1 / 3)

    def forward(self, x, *, shift):
        y = self.norm(self.linear(x).float()) * self.scale
        return torch.view_as_real(y * self.freqs), y + shift


def test_a_whole_module_with_complex_buffers_and_keywords() -> None:
    model = Whole().eval()
    wide = oracle.widen_module(model)
    assert wide.freqs.dtype == torch.complex128 and wide.linear.weight.dtype == torch.float64
    assert wide.norm.num_batches_tracked.dtype == torch.int64
    assert model.linear.weight.dtype == torch.float32  # the user's own model is left alone
    x, shift = torch.randn(4, 8), torch.ones(8)
    a, b = oracle.exact(wide, [x], {"shift": shift})
    y = F.batch_norm(
        F.linear(x.double(), wide.linear.weight, wide.linear.bias),
        wide.norm.running_mean, wide.norm.running_var, wide.norm.weight, wide.norm.bias,
    ) * model.scale.double()  # fmt: skip
    assert torch.allclose(a, torch.view_as_real(y * wide.freqs), rtol=1e-13, atol=1e-15)
    assert torch.allclose(b, y + 1, rtol=1e-13, atol=0)


def test_integers_and_flags_are_left_alone() -> None:
    def lookup(index, table):
        return F.embedding(index, table), index.to(torch.int32), torch.arange(3)

    rows, ints, counted = oracle.exact(Function(lookup), [torch.tensor([1, 0]), torch.randn(3, 4).bfloat16()])
    assert (rows.dtype, ints.dtype, counted.dtype) == (torch.float64, torch.int32, torch.int64)
    assert torch.get_default_dtype() == torch.float32 and torch.ones(1).dtype == torch.float32


def test_what_has_no_float64_form_says_so() -> None:
    with pytest.raises(oracle.NoWideForm, match="reinterprets"):
        oracle.exact(Function(lambda x: x.view(torch.int16)), [torch.randn(4).half()])
    assert torch.get_default_dtype() == torch.float32
