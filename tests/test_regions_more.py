"""More of real models in regions: attention as libraries write it, all spellings of a linear, pooling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_odd_models import module, own_ops
from test_regions import check_cut, families, graph_of
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.backends import load_kernel
from autokernel.backends.cpp_backend import available
from autokernel.capture.graph import Graph
from autokernel.extraction import relative_error
from autokernel.playbook.codegen import generate
from autokernel.regions.partition import partition
from autokernel.regions.region import Region

HAS_COMPILER = available("cpu")[0]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def all_in_regions(graph: Graph) -> list[Region]:
    """Every op lies in a region, and each region gives the model's values: as it is, and as printed code."""
    cut = partition(graph)
    inside, ops = cut.coverage()
    assert inside == ops > 0, cut.leftover
    for region in cut.regions:
        check_cut(graph, region)
        space: dict[str, Any] = {}
        exec(own_ops(region), space)
        inputs = [torch.randn(p.shape) if p.dtype == "float32" else None for p in region.ports()[0]]
        if all(x is not None for x in inputs):
            same(space["kernel_fn"](*inputs), region.subgraph()(*inputs))
    return cut.regions


@torch.no_grad()
def same(got: Any, want: Any, limit: float = 1e-6) -> None:
    got, want = ([x] if isinstance(x, Tensor) else list(x) for x in (got, want))
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and relative_error(g, w) <= limit


def heads(x: Tensor, n: int = 2) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


# --- attention --------------------------------------------------------------------------------------------


def soft_cap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    scores = torch.tanh(scores / 50.0) * 50.0
    weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def alibi(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    bias = mask[..., :1, :].expand(b, h, 1, t).reshape(b * h, 1, t)
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.5).view(b, h, t, t)
    weights = F.softmax(scores + mask, -1).view(b * h, t, t)
    return torch.bmm(weights, v).view(b, h, t, d).permute(0, 2, 1, 3).reshape(b, t, h * d)


def by_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 2.0
    return torch.einsum("bhts,bhsd->bthd", (scores + mask).softmax(-1), v).flatten(2)


@pytest.mark.parametrize("attend", [soft_cap, alibi, by_einsum])
def test_attention_by_hand(attend: Callable[..., Tensor]) -> None:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, mask)

    x = [torch.randn(2, 2, 6, 4) for _ in range(3)]
    graph = graph_of(module(forward), *x, torch.randn(2, 1, 6, 6))
    regions = all_in_regions(graph)
    assert "attention" in families(graph)
    (attention,) = (r for r in regions if r.family == "attention")
    assert sum(n.name.startswith(("matmul", "bmm", "baddbmm", "einsum")) for n in attention.nodes) == 2


@pytest.mark.parametrize("split", ["chunk", "unbind"])
def test_attention_on_parts_of_one_projection(split: str) -> None:
    """The values are a part of a tensor of which other regions take the other parts."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part, rest = x[..., :4], x[..., 4:]
        half = torch.cat((-part[..., 2:], part[..., :2]), -1)
        return torch.cat((part * cos + half * sin, rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if split == "chunk":
            q, k, v = qkv.view(2, 6, 2, 24).transpose(1, 2).chunk(3, dim=-1)
        else:
            q, k, v = qkv.view(2, 6, 3, 2, 8).permute(0, 3, 2, 1, 4).unbind(2)
        q, k = turned(q, self.cos, self.sin), turned(k, self.cos, self.sin)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 16)

    parts = {"cos": torch.randn(6, 4), "sin": torch.randn(6, 4)}
    graph = graph_of(module(forward, qkv=nn.Linear(16, 48), **parts), torch.randn(2, 6, 16))
    all_in_regions(graph)
    assert families(graph) == {"linear": 1, "rope": 1, "attention": 1}  # the parts not turned are in rope


def test_a_whole_multi_head_call_is_attention() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
            self.probe = nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(self.probe.expand(2, 1, 16), x, x, need_weights=False)[0] * 2.0

    graph = graph_of(Pool(), torch.randn(2, 6, 16))
    all_in_regions(graph)
    assert families(graph)["attention"] == 1


# --- linears ----------------------------------------------------------------------------------------------

W, V, B = torch.randn(16, 32), torch.randn(32, 16), torch.randn(32)
LINEARS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Conv1D": lambda m, x: torch.addmm(m.b, x.view(-1, 16), m.w).view(2, 4, 32),
    "addmm, by name": lambda m, x: torch.addmm(input=m.b, mat1=x.view(-1, 16), mat2=m.w),
    "matmul": lambda m, x: x @ m.w,
    "matmul and bias": lambda m, x: x @ m.w + m.b,
    "transposed": lambda m, x: torch.matmul(x, m.v.t()) + m.b,
    "mm": lambda m, x: torch.mm(x.flatten(0, 1), m.w),
    "einsum": lambda m, x: torch.einsum("btd,df->btf", x, m.w),
    "einsum, weight first": lambda m, x: torch.einsum("df,btd->btf", m.w, x),
    "einsum into heads": lambda m, x: torch.einsum("btd,dhf->bthf", x, m.w.view(16, 4, 8)),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, 1),
    "baddbmm": lambda m, x: torch.baddbmm(m.b, x, m.w.expand(2, 16, 32)),
    "bmm": lambda m, x: torch.bmm(x, m.w.expand(2, 16, 32)),
}


def weights() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(W), "v": nn.Parameter(V), "b": nn.Parameter(B)}


@pytest.mark.parametrize("spelling", LINEARS)
def test_a_linear_in_every_spelling(spelling: str) -> None:
    apply = LINEARS[spelling]

    def forward(self, x: Tensor) -> Tensor:
        h = apply(self, x)
        return 0.5 * h * (1.0 + torch.tanh(h))  # what reads it twice is its epilogue all the same

    (region,) = all_in_regions(graph_of(module(forward, **weights()), torch.randn(2, 4, 16)))
    assert region.family == "linear"
    assert [r for r in region.input_roles if r == "activation"] == ["activation"]


@pytest.mark.parametrize("spelling", [s for s in LINEARS if s not in ("addmm, by name", "mm", "transposed")])
def test_siblings_in_every_spelling(spelling: str) -> None:
    apply = LINEARS[spelling]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return apply(self.first, x), apply(self.second, x)

    model = module(forward, **{n: module(lambda s: s, **weights()) for n in ("first", "second")})
    (region,) = all_in_regions(graph_of(model, torch.randn(2, 4, 16)))
    assert region.family == "sibling_linears" and len(region.activations) == 1 and len(region.outputs) == 2


def test_linears_in_two_spellings_are_no_siblings() -> None:
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.w, F.linear(x, self.v)

    graph = graph_of(module(forward, **weights()), torch.randn(2, 4, 16))
    all_in_regions(graph)
    assert families(graph) == {"linear": 2}


def test_a_gate_of_matrix_products() -> None:
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x @ self.w) * (x @ self.u)

    graph = graph_of(module(forward, u=nn.Parameter(torch.randn(16, 32)), **weights()), torch.randn(2, 4, 16))
    (region,) = all_in_regions(graph)
    assert region.family == "gated_mlp"


def test_products_of_two_activations_are_no_linears() -> None:
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            x @ y,
            torch.addmm(x[0, 0], y.view(-1, 4)[:4], self.w[:4, :4]),
            torch.einsum("bij,bjk->bik", x, y),
        )

    graph = graph_of(module(forward, **weights()), torch.randn(2, 4, 4), torch.randn(2, 4, 4))
    assert not {"linear", "sibling_linears"} & set(families(graph))


@pytest.mark.parametrize("spelling", ["Conv1D", "matmul and bias", "einsum"])
def test_fingerprints_of_linears_know_no_names(spelling: str) -> None:
    apply = LINEARS[spelling]

    def fingerprint(**names: str) -> str:
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for key, value in weights().items():
                    setattr(self, names[key], value)

            def forward(self, x: Tensor) -> Tensor:
                class View:
                    w, v, b = (getattr(self, names[k]) for k in "wvb")

                return apply(View, x)

        (region,) = partition(graph_of(Named(), torch.randn(2, 4, 16))).regions
        return region.fingerprint

    assert fingerprint(w="w", v="v", b="b") == fingerprint(w="kernel", v="other", b="shift")


# --- pooling, resampling, look-ups, copies -----------------------------------------------------------------

IMAGE = torch.randn(2, 4, 8, 8)
REST: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "max_pool2d": ("reduction", lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool2d": ("reduction", lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool2d": ("reduction", lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1) * 2.0),
    "adaptive_max_pool2d": ("reduction", lambda x: F.adaptive_max_pool2d(x, 2)),
    "avg_pool1d": ("reduction", lambda x: F.avg_pool1d(x.flatten(2), 4)),
    "topk": ("reduction", lambda x: (x * 2.0).topk(3, -1).values),
    "interpolate": ("pointwise", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear").relu()),
    "nearest": ("pointwise", lambda x: F.interpolate(x, size=(5, 5))),
    "pixel_shuffle": ("pointwise", lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ("pointwise", lambda x: F.pixel_unshuffle(x, 2)),
    "pad": ("pointwise", lambda x: F.pad(x, (1, 2, 0, 1), value=0.5)),
    "roll": ("pointwise", lambda x: torch.roll(x, (-1, -1), (2, 3))),
    "glu": ("pointwise", lambda x: F.glu(x, 1)),
    "gather": ("pointwise", lambda x: x.gather(-1, (x > 0).long())),
    "windows": ("pointwise", lambda x: x.view(2, 4, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).contiguous()),
    "group_norm": ("norm", lambda x: F.group_norm(x, 2)),
    "residual and group_norm": ("norm", lambda x: F.group_norm(x + x.tanh(), 2)),
}


@pytest.mark.parametrize("name", REST)
def test_what_is_no_pointwise_chain_in_the_narrow_sense(name: str, tmp_path) -> None:
    family, apply = REST[name]

    def forward(self, x: Tensor) -> Any:
        return apply(x)

    regions = all_in_regions(graph_of(module(forward), IMAGE))
    assert family in [r.family for r in regions]
    if HAS_COMPILER and name in ("max_pool2d", "interpolate", "windows", "roll", "gather"):
        for region in regions:
            starter_is_right(region, IMAGE, tmp_path)


def starter_is_right(region: Region, x: Tensor, folder) -> None:
    """The generated starter, C++ or PyTorch calls for what has no kernel, gives the region's values."""
    made = generate(region.subgraph(), "cpp")
    path = folder / "kernel.py"
    path.write_text(made.source or own_ops(region), encoding="utf-8")
    with torch.no_grad():
        same(load_kernel(path).fn(x), region.subgraph()(x), 1e-5)


def test_views_alone_are_no_region() -> None:
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).unsqueeze(0)[..., :2]

    cut = partition(graph_of(module(forward), IMAGE))
    assert cut.regions == [] and len(cut.leftover) == 3 and cut.coverage() == (0, 0)


def test_a_batch_norm_by_itself() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    graph = graph_of(model, IMAGE)
    all_in_regions(graph)
    assert families(graph) == Counter(pointwise=1, conv=1)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_positions_held_against_literals_compile(tmp_path) -> None:
    """Relative positions, as T5 buckets them: 64-bit whole numbers and plain literals in one minimum."""

    def forward(self, x: Tensor) -> Tensor:
        back = torch.arange(6)[:, None] - torch.arange(6)[None, :]
        return x * torch.min(back, torch.zeros_like(back)).clamp(min=-3)

    (region,) = all_in_regions(graph_of(module(forward), torch.randn(6, 6)))
    assert generate(region.subgraph(), "cpp", mixed=False).source
    starter_is_right(region, torch.randn(6, 6), tmp_path)


def test_a_region_hands_over_no_expanded_view() -> None:
    """Its kernel returns memory of its own, in which no two elements share a place."""

    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.tanh(x).unsqueeze(1).expand(2, 3, 16)
            return torch.matmul(h, y)

    cut = partition(graph_of(Net(), torch.randn(2, 16), torch.randn(2, 16, 4)))
    strides = [n.meta["example_value"].stride() for region in cut.regions for n in region.outputs]
    assert len(strides) == 1 and 0 not in strides[0], strides
