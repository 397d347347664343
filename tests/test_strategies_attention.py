"""Calls of attention lose a mask that masks nothing, and only such a one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from judged_regions import first_region, judged
from test_strategies import check, proposals, regions_of
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.backends.masked_attention import mask_kind, masked_attention
from autokernel.judge import Judge
from autokernel.playbook.strategies import attention_call
from autokernel.regions.region import Region

T = 12
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
ALL = torch.ones(1, 1, T, T, dtype=torch.bool)


class Call(nn.Module):
    def __init__(self, mask: Tensor | None, **options: object) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, **self.options)  # type: ignore[arg-type]


def region_of(model: nn.Module, heads: int = 2, *more: Tensor) -> Region:
    q, k, v = (torch.randn(2, heads, T, 8) for _ in range(3))
    (region,) = regions_of(model, q, k, v, *more)
    return region


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (ALL, ["sdpa,mask-gone"]),
        (torch.zeros(T, T), ["sdpa,mask-gone"]),
        (CAUSAL, ["sdpa,mask-gone"]),
        (torch.zeros(T, T).masked_fill(~CAUSAL, -math.inf), ["sdpa,mask-gone"]),
        (torch.zeros(T, T).masked_fill(~CAUSAL, -30.0), []),
        (CAUSAL.flip(1), []),
        (CAUSAL & CAUSAL.T.flip(0), []),
        (None, []),
    ],
)
def test_a_known_mask_goes_by_its_values(mask: Tensor | None, expected: list[str]) -> None:
    region = region_of(Call(mask, scale=0.4))
    found = proposals(attention_call, region)
    assert [p.strategy for p in found] == expected
    for proposal in found:
        assert "mask=" not in proposal.source
        assert mask is not None
        assert ("is_causal=True" in proposal.source) == bool((mask != mask.flatten()[0]).any())
        check(region, proposal)


def test_dropout_is_left_alone() -> None:
    assert proposals(attention_call, region_of(Call(ALL, dropout_p=0.1))) == []


def test_on_a_gpu_the_library_s_kernels_are_offered() -> None:
    model = Call(ALL).half()
    q, k, v = (torch.randn(2, 2, T, 8).half() for _ in range(3))
    (region,) = regions_of(model, q, k, v)
    tags = [p.strategy for p in proposals(attention_call, region, "cuda")]
    assert tags == ["sdpa,cudnn_attention,mask-gone", "sdpa,flash_attention,mask-gone", "sdpa,mask-gone"]


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (ALL, "none"), (ALL[..., :1, :], "none"), (torch.zeros(2, 1, T, T), "none"), (CAUSAL, "causal"),
        (CAUSAL.expand(2, 1, T, T), "causal"), (CAUSAL[:, :T - 1], "other"), (CAUSAL[:1], "other"),
        (CAUSAL.flip(0), "other"), (torch.randn(T, T), "other"), (~ALL, "other"),
        (torch.cat([ALL, CAUSAL[None, None]]), "other"), (torch.cat([CAUSAL[None, None], ALL]), "other"),
        (torch.full((T, T), math.nan), "other"),
    ],
)  # fmt: skip
def test_what_a_mask_is(mask: Tensor, kind: str) -> None:
    assert mask_kind(mask, T, T) == kind
    q, k, v = (torch.randn(2, 4, T, 8) for _ in range(3))
    k, v = (x[:, :2, : mask.shape[-1]] for x in (k, v))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    got = masked_attention(q, k, v, mask, 0.3, True).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_look_is_one_op_under_torch_compile() -> None:
    q, k, v = (torch.randn(2, 2, T, 8) for _ in range(3))

    def double(mask: Tensor) -> Tensor:
        return masked_attention(q, k, v, mask, 0.3, False) * 2

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    for mask in (ALL, CAUSAL[None, None], ALL & (torch.arange(T) < 9)):
        torch.testing.assert_close(compiled(mask), double(mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", ["sdpa,mask-looked-at"]),
        ("llama", ["sdpa,gqa,mask-looked-at", "sdpa,mask-looked-at"]),
        ("qwen3", ["sdpa,gqa,mask-looked-at", "sdpa,mask-looked-at"]),
    ],
)
def test_judged_on_regions_of_real_models(
    name: str, expected: list[str], tmp_path: Path, cpu_judge: Judge
) -> None:
    region = first_region(name, "attention")
    found = proposals(attention_call, region)
    assert [p.strategy for p in found] == expected
    judged(cpu_judge, region, found[:1], tmp_path)
