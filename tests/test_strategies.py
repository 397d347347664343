"""Every proposal of every strategy computes what its region computes."""

from __future__ import annotations

import pytest
import torch
from small_models import SMALL, graphs_of, small
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.capture.graph import Graph, capture
from autokernel.playbook.context import StrategyContext
from autokernel.playbook.strategies import (
    STRATEGIES,
    attention_sdpa,
    fold_batch_norm,
    linear_epilogue,
    merge_linears,
    norm_library,
    pad_features,
    rope_real,
)
from autokernel.proposers.proposal import Proposal
from autokernel.records import Task
from autokernel.regions.partition import partition
from autokernel.regions.region import Region

REWRITES = [s for s in STRATEGIES if s.NAME != "generated"]


def context_of(region: Region, device: str = "cpu") -> StrategyContext:
    inputs, outputs = region.ports()
    task = Task(1, region.family, region.fingerprint, device, 1, region.module_paths, inputs, outputs)
    constants = {
        p.name: region.graph.value_of(n)
        for p, n in zip(inputs, region.inputs, strict=True)
        if p.role == "constant"
    }
    return StrategyContext(task, region.subgraph(), constants, device)


def regions_of(model: nn.Module, *inputs: Tensor) -> list[Region]:
    return [r for g in capture(model.eval(), inputs) for r in partition(g).regions]


def check(region: Region, proposal: Proposal) -> None:
    """The proposal against the region's own subgraph, in float64 so that only mistakes differ."""
    space: dict = {}
    exec(compile(proposal.source, "kernel.py", "exec"), space)
    ports, _ = region.ports()

    def wide(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(torch.complex128)
        return t.double() if t.is_floating_point() else t

    activations = [
        torch.randint(0, p.high or 2, p.shape)
        if "int" in p.dtype
        else torch.randn(p.shape, dtype=torch.float64)
        for p in ports
        if p.role == "activation"
    ]
    statics = [wide(v.detach()) for v in region.static_values()]
    with torch.no_grad():
        want = region.subgraph()(*activations, *statics)
        packed = space["prepack"](*statics) if "prepack" in space else statics
        got = space["kernel_fn"](*activations, *packed)
    wants, gots = (x if isinstance(x, tuple) else (x,) for x in (want, got))
    assert len(wants) == len(gots)
    for w, g in zip(wants, gots, strict=True):
        assert w.shape == g.shape
        torch.testing.assert_close(g.double(), w.double(), rtol=1e-5, atol=1e-6)


def proposals(strategy, region: Region, device: str = "cpu") -> list[Proposal]:
    return list(strategy.propose(context_of(region, device)))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("strategy", REWRITES, ids=lambda s: s.NAME)
def test_on_shipped_models(strategy, name: str, tmp_path) -> None:
    (graph,) = graphs_of(small(name, tmp_path))
    for group in partition(graph).by_fingerprint().values():
        if group[0].family in strategy.FAMILIES:
            for proposal in proposals(strategy, group[0]):
                check(group[0], proposal)


def strategies_that_fire(graph: Graph) -> set[tuple[str, str]]:
    return {
        (r.family, p.strategy)
        for r in partition(graph).regions
        for s in REWRITES
        if r.family in s.FAMILIES
        for p in proposals(s, r)
    }


def test_what_fires_on_llama(tmp_path) -> None:
    (graph,) = graphs_of(small("llama", tmp_path))
    assert strategies_that_fire(graph) >= {
        ("attention", "sdpa,gqa"), ("attention", "sdpa"), ("sibling_linears", "merge-linears"),
        ("gated_mlp", "merge-linears"), ("rope", "rope-real"), ("norm", "rms-norm"),
    }  # fmt: skip


class Attention(nn.Module):
    """Attention by hand with a mask applied in one of several ways."""

    def __init__(self, how: str, mask: Tensor | None, scale: float = 0.3) -> None:
        super().__init__()
        self.how, self.scale = how, scale
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "scaled query":
            q = q * self.scale
            scores = q @ k.transpose(-1, -2)
        else:
            scores = q @ k.transpose(-1, -2) * self.scale
        if self.how == "fill":
            scores = scores.masked_fill(self.mask == 0, float("-inf"))
        elif self.how == "add":
            scores = scores + self.mask
        elif self.how == "where":
            scores = torch.where(self.mask, scores, float("-inf"))
        elif self.how == "lowest":
            scores = scores.masked_fill(~self.mask, torch.finfo(scores.dtype).min)
        elif self.how == "scaled after mask":
            scores = (scores + self.mask) / 2.0
        return F.softmax(scores, dim=-1) @ v


T = 12
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
BAND = CAUSAL & torch.ones(T, T, dtype=torch.bool).triu(-3)
BIAS = torch.randn(1, 2, T, T, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("how", "mask", "kind"),
    [
        ("plain", None, "no mask"),
        ("scaled query", None, "no mask"),
        ("fill", CAUSAL.long(), "causal"),
        ("where", CAUSAL, "causal"),
        ("lowest", CAUSAL, "causal"),
        ("fill", BAND.long(), "boolean mask"),
        ("fill", torch.ones(T, T).long(), "no mask"),
        ("add", torch.zeros(T, T).masked_fill(~CAUSAL, float("-inf")), "causal"),
        ("add", BIAS, "additive mask"),
        ("scaled after mask", BIAS, "additive mask"),
        ("add", BIAS.masked_fill(~CAUSAL, float("-inf")), "additive mask"),
    ],
)
def test_masks_are_recognised_by_value(how: str, mask: Tensor | None, kind: str) -> None:
    q, k, v = (torch.randn(1, 2, T, 8) for _ in range(3))
    (region,) = regions_of(Attention(how, mask), q, k, v)
    found = proposals(attention_sdpa, region)
    assert found and f"({kind}" in found[0].description
    for proposal in found:
        check(region, proposal)


def test_a_row_that_attends_to_nothing_is_left_alone() -> None:
    mask = CAUSAL.clone()
    mask[0] = False
    q, k, v = (torch.randn(1, 2, T, 8) for _ in range(3))
    (region,) = regions_of(Attention("where", mask), q, k, v)
    assert proposals(attention_sdpa, region) == []


def test_a_mask_given_at_run_time() -> None:
    class Padded(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return F.softmax(q @ k.transpose(-1, -2) / 4.0 + mask, dim=-1) @ v

    q, k, v = (torch.randn(2, 2, T, 8) for _ in range(3))
    (region,) = regions_of(Padded(), q, k, v, torch.randn(2, 1, 1, T))
    (proposal,) = proposals(attention_sdpa, region)
    check(region, proposal)


def test_transformers_style_repeat_kv() -> None:
    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, g, t, d = k.shape
            k = k[:, :, None, :, :].expand(b, g, 3, t, d).reshape(b, g * 3, t, d)
            v = v[:, :, None, :, :].expand(b, g, 3, t, d).reshape(b, g * 3, t, d)
            return F.softmax(q @ k.transpose(2, 3) * 0.35, dim=-1) @ v

    (region,) = regions_of(
        Grouped(), torch.randn(2, 6, T, 8), torch.randn(2, 2, T, 8), torch.randn(2, 2, T, 8)
    )
    found = proposals(attention_sdpa, region)
    assert {p.strategy for p in found} == {"sdpa,gqa", "sdpa"}
    for proposal in found:
        check(region, proposal)


def test_attention_with_dropout_in_train_mode_is_left_alone() -> None:
    class Dropped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.dropout(F.softmax(q @ k.transpose(-1, -2), dim=-1), 0.1, training=True) @ v

    q = torch.randn(1, 2, T, 8)
    for region in regions_of(Dropped(), q, q.clone(), q.clone()):
        assert proposals(attention_sdpa, region) == []


def test_layer_norm_by_hand() -> None:
    class Hand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x = x + y
            mean = x.mean(-1, keepdim=True)
            var = (x - mean).pow(2).mean(-1, keepdim=True)
            return (x - mean) * torch.rsqrt(var + 1e-6) * self.weight + self.bias, x

    (region,) = regions_of(Hand(), torch.randn(4, 16), torch.randn(4, 16))
    assert region.family == "norm"
    (proposal,) = proposals(norm_library, region)
    assert proposal.strategy == "layer-norm"
    check(region, proposal)


@pytest.mark.parametrize(
    "widths, expected",
    [
        ((8, 4), ["merge-linears", "merge-linears,contiguous"]),
        ((5, 7), ["merge-linears,contiguous"]),  # views of odd widths would start at any address
        ((8, 5), ["merge-linears,contiguous"]),  # and so would every second row
    ],
)
def test_merged_linears_with_bias(widths: tuple[int, int], expected: list[str]) -> None:
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, widths[0]), nn.Linear(8, widths[1])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    (region,) = regions_of(Siblings(), torch.randn(3, 8))
    found = proposals(merge_linears, region)
    assert [p.strategy for p in found] == expected
    for proposal in found:
        check(region, proposal)


def test_pad_features_only_where_it_pays() -> None:
    """Proposed for a device and a 16-bit dtype, and only if the width is off the fast path."""

    def found(width: int, dtype: torch.dtype) -> list[Proposal]:
        model = nn.Linear(16, width, bias=False).to(dtype)
        (region,) = regions_of(model, torch.randn(4, 16, dtype=dtype))
        result = proposals(pad_features, region, "cuda")
        for proposal in result:
            check(region, proposal)
        return result

    assert len(found(29, torch.float16)) == 1
    assert found(32, torch.float16) == []
    assert found(29, torch.float32) == []


def test_gemm_epilogue_is_for_gelu_and_relu() -> None:
    def found(activation: nn.Module) -> list[str]:
        (region,) = regions_of(nn.Sequential(nn.Linear(8, 16), activation), torch.randn(4, 8))
        return [p.strategy for p in proposals(linear_epilogue, region, "cuda")]

    assert found(nn.GELU(approximate="tanh")) == ["gemm-epilogue,gelu"]
    assert found(nn.ReLU()) == ["gemm-epilogue,relu"]
    assert found(nn.Tanh()) == []


def test_rope_real_is_exact(tmp_path) -> None:
    (graph,) = graphs_of(small("llama", tmp_path))
    region = next(r for r in partition(graph).regions if r.family == "rope")
    (proposal,) = proposals(rope_real, region)
    assert "complex" not in proposal.source.split("def kernel_fn")[1]
    check(region, proposal)


class Convolutions(nn.Module):
    """A convolution, a batch norm with statistics that matter, and what may follow."""

    def __init__(
        self, kind: str, after: str, *, groups: int = 1, bias: bool = True, affine: bool = True
    ) -> None:
        super().__init__()
        make = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv_transpose2d": nn.ConvTranspose2d}[kind]
        self.conv = make(6, 8, 3, stride=2, padding=1, groups=groups, bias=bias)
        self.norm = (nn.BatchNorm1d if kind == "conv1d" else nn.BatchNorm2d)(8, eps=0.1, affine=affine)
        self.after, self.gain = after, nn.Parameter(torch.randn(8, *[1] * (1 if kind == "conv1d" else 2)))
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.3, 3)
            if affine:
                self.norm.weight.uniform_(-2, 2)
                self.norm.bias.normal_()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if "residual" in self.after:
            y = y + other if "first" in self.after else other + y
        if "scale" in self.after:
            y = y * self.gain
        return torch.relu(y) if "relu" in self.after else y


@pytest.mark.parametrize(
    ("kind", "after", "options", "fires"),
    [
        ("conv2d", "relu", {}, ["fold-batch-norm", "conv-epilogue,onednn"]),
        ("conv2d", "residual first relu", {}, ["fold-batch-norm", "conv-epilogue,onednn"]),
        ("conv2d", "residual relu", {"groups": 2}, ["fold-batch-norm", "conv-epilogue,onednn"]),
        ("conv2d", "residual", {"bias": False}, ["fold-batch-norm", "conv-epilogue,onednn"]),
        ("conv2d", "", {"affine": False}, ["fold-batch-norm"]),
        ("conv2d", "scale relu", {}, ["fold-batch-norm"]),
        ("conv1d", "relu", {"bias": False, "groups": 2}, ["fold-batch-norm"]),
        ("conv_transpose2d", "relu", {}, ["fold-batch-norm"]),
        ("conv_transpose2d", "relu", {"groups": 2}, []),
    ],
)
def test_a_batch_norm_is_folded(kind: str, after: str, options: dict, fires: list[str]) -> None:
    torch.manual_seed(1)
    model = Convolutions(kind, after, **options).eval()
    x = torch.randn(2, 6, *[9] * (1 if kind == "conv1d" else 2))
    other = torch.randn_like(model.conv(x))
    (region,) = [r for r in regions_of(model, x, other) if r.family == "conv"]
    found = proposals(fold_batch_norm, region)
    assert [p.strategy for p in found] == fires
    for proposal in found:
        if "onednn" in proposal.strategy:
            narrow(region, proposal)
        else:
            check(region, proposal)


def narrow(region: Region, proposal: Proposal) -> None:
    """As `check`, in float32: oneDNN has no other width that would show a mistake."""
    space: dict = {}
    exec(compile(proposal.source, "kernel.py", "exec"), space)
    inputs = [torch.randn(p.shape) for p in region.ports()[0] if p.role == "activation"]
    statics = [v.detach() for v in region.static_values()]
    with torch.no_grad():
        want = region.subgraph()(*inputs, *statics)
        got = space["kernel_fn"](*inputs, *space["prepack"](*statics))
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_batch_norm_that_trains_is_not_folded() -> None:
    model = Convolutions("conv2d", "relu")
    with torch.no_grad():
        regions = [r for g in capture(model.train(), [torch.randn(2, 6, 9, 9), torch.randn(2, 8, 5, 5)])
                   for r in partition(g).regions]  # fmt: skip
    assert not any("batch_norm" in str(n.target) for r in regions for n in r.nodes)


def test_cudnn_takes_relu_and_a_residual() -> None:
    model = Convolutions("conv2d", "residual first relu").eval()
    x = torch.randn(2, 6, 9, 9)
    (region,) = [r for r in regions_of(model, x, torch.randn(2, 8, 5, 5)) if r.family == "conv"]
    sources = [p.source for p in proposals(fold_batch_norm, region, "cuda")]
    assert "torch.cudnn_convolution_add_relu(" in sources[1] and "[2, 2], [1, 1], [1, 1], 1)" in sources[1]
