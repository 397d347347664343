"""Profiles: every op's time lands on its region, and the numbers that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import SMALL, graphs_of, small
from torch import nn
from torch.autograd.profiler_util import DeviceType
from torch.nn import functional as F

from autokernel.capture.graph import Graph, capture
from autokernel.capture.source import LoadedModel, SourceSpec, load
from autokernel.hardware import Ceilings, Device
from autokernel.masks import kept_scores
from autokernel.node_times import attribute
from autokernel.profile_records import TABLE_COLUMNS, Profile, duration
from autokernel.profiling import _chains, fresh_arguments, profile
from autokernel.regions.partition import partition

CEILINGS = Ceilings(1e11, {"float32": 1e12, "float16": 1e12})


def profile_of(loaded: LoadedModel) -> Profile:
    return profile(loaded, graphs_of(loaded), ceilings=CEILINGS)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile_of(small("nano", tmp_path_factory.mktemp("nano")))


@pytest.mark.parametrize("name", SMALL)
def test_all_time_is_accounted_for(name: str, tmp_path: Path) -> None:
    found = profile_of(small(name, tmp_path))
    parts = sum(r.time_us for r in found.regions) + sum(entry.time_us for entry in found.leftover)
    assert parts == pytest.approx(found.total_us, rel=1e-6)
    assert sum(r.share for r in found.regions) == pytest.approx(found.coverage)
    assert found.coverage > 0.9
    assert all(r.time_us > 0 for r in found.regions)
    assert found.total_us > 0 and found.wall_us > 0


def test_equal_layers_are_one_region(nano: Profile) -> None:
    (attention,) = [r for r in nano.regions if r.family == "attention"]
    assert attention.call_count == 2
    assert attention.module_paths == ["blocks.0.attn", "blocks.1.attn"]
    assert len(attention.sites) == 2


def test_numbers_fit_together(nano: Profile) -> None:
    for region in nano.regions:
        assert region.head_room is not None and region.head_room >= 1
        assert region.roofline_us is not None
        assert region.head_room == pytest.approx(
            max(1, region.time_us / region.call_count / region.roofline_us)
        )
        assert region.amdahl_bound == pytest.approx(1 / (1 - region.share * (1 - 1 / region.head_room)))
        assert region.bytes > 0
        assert region.bound in ("dram", "compute")
        assert (region.flops is None) == (region.family in ("norm", "rope", "embedding", "pointwise"))
    gains = [r.gain or 0 for r in nano.regions]
    assert gains == sorted(gains, reverse=True)


def test_causal_attention_needs_half(nano: Profile) -> None:
    (attention,) = [r for r in nano.regions if r.family == "attention"]
    length, width = 48, 32
    full = 2 * 2 * length * length * width
    assert attention.flops == pytest.approx(full * (length + 1) / (2 * length))


def test_json_and_table(nano: Profile, tmp_path: Path) -> None:
    nano.save(tmp_path)
    again = Profile.load(tmp_path)
    assert again.to_json() == nano.to_json()
    assert again.regions[0].sites == []
    rows = nano.table()
    assert len(rows) == len(nano.regions) and all(len(row) == len(TABLE_COLUMNS) for row in rows)
    assert len(nano.table(3)) == 3
    text = "\n".join(nano.summary())
    assert "nano" in text and "%" in text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.5, "0.50 µs"),
        (12.34, "12.3 µs"),
        (999.4, "999 µs"),
        (1500, "1.50 ms"),
        (250000, "250 ms"),
        (3e6, "3.00 s"),
    ],
)
def test_durations(us: float, text: str) -> None:
    assert duration(us) == text


class Slow(nn.Module):
    """One op that takes nearly all the time, between cheap ones of other families."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(self.norm(x))
        big = torch.linalg.inv(y.T @ y + torch.eye(8)).repeat(60, 60)
        return (big @ big)[:8, :8] + y.sum()


def spec_for(tmp_path: Path, body: str) -> LoadedModel:
    path = tmp_path / "m.py"
    path.write_text(f"import torch\nfrom torch import nn\nfrom test_profiling import *\n{body}")
    return load(SourceSpec(str(path)))


def test_left_over_time_is_shown_apart(tmp_path: Path) -> None:
    loaded = spec_for(
        tmp_path, "def build():\n    return Slow()\ndef example_inputs(m):\n    return torch.randn(16, 8)\n"
    )
    found = profile_of(loaded)
    heavy = max(found.leftover, key=lambda entry: entry.share)
    assert "inv" in heavy.ops or "matmul" in heavy.ops
    assert heavy.share > 0.5
    assert found.coverage < 0.5
    assert any("not in a region" in line for line in found.summary())
    parts = found.coverage + sum(entry.share for entry in found.leftover)
    assert parts == pytest.approx(1.0)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu()
        torch._dynamo.graph_break()
        return self.b(x).relu()


def test_graphs_on_both_sides_of_a_break_are_profiled(tmp_path: Path) -> None:
    loaded = spec_for(
        tmp_path, "def build():\n    return Broken()\ndef example_inputs(m):\n    return torch.randn(4, 8)\n"
    )
    found = profile_of(loaded)
    assert found.graphs == 2
    assert sum(r.call_count for r in found.regions if r.family == "linear") == 2
    assert any("2 graphs" in line for line in found.summary())


class Writes(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.lin(x) + self.count


def test_profiling_does_not_write_into_the_model(tmp_path: Path) -> None:
    loaded = spec_for(
        tmp_path, "def build():\n    return Writes()\ndef example_inputs(m):\n    return torch.randn(4, 4)\n"
    )
    (graph,) = graphs_of(loaded)
    before = loaded.model.count.clone()
    arguments = fresh_arguments(graph)
    graph.gm(*arguments)
    assert torch.equal(loaded.model.count, before)
    weight = [v for n, v in zip(graph.placeholders, arguments, strict=True) if "weight" in n.name]
    assert weight[0].data_ptr() == loaded.model.lin.weight.data_ptr()  # what is only read is not copied


def test_chains_are_connected_components() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a = graph.call_method("relu", (x,))
    b = graph.call_method("relu", (y,))
    c = graph.call_method("exp", (a,))
    d = graph.call_method("exp", (b,))
    assert _chains([a, b, c, d]) == [[a, c], [b, d]]
    e = graph.call_method("add", (c, d))
    assert _chains([a, b, c, d, e]) == [[a, b, c, d, e]]


# --- attribution on a device, with events as the profiler gives them --------------------------------------


class Event(SimpleNamespace):
    """What `attribute` reads of a profiler event; times in microseconds."""

    def __init__(
        self, name: str, parent: Event | None = None, *, kernels: dict[str, float] | None = None
    ) -> None:
        found = [SimpleNamespace(name=k, duration=d) for k, d in (kernels or {}).items()]
        super().__init__(name=name, cpu_parent=parent, kernels=found, device_type=DeviceType.CPU)


def on_device(name: str, us: float, annotation: bool = False) -> SimpleNamespace:
    elapsed = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA, time_range=elapsed, is_user_annotation=annotation
    )


def test_kernels_go_to_the_range_that_launched_them() -> None:
    events: list[Any] = []
    for number, factor in enumerate((1, 3, 2)):
        step = Event(f"autokernel-step::{number}")
        a = Event("autokernel::0.r0", step, kernels={"autokernel::0.r0": 999.0})  # the range's own shadow
        mm = Event("aten::mm", Event("aten::linear", a), kernels={"gemm": 10.0 * factor})
        b = Event("autokernel::0.r1", step, kernels={"triton_kernel": 4.0})  # launched by no operator
        late = Event("aten::exp", Event("autokernel::0.r0", step), kernels={"exp": 1.0})  # interleaved with b
        chance = Event("cudaDeviceSynchronize", a, kernels={"gemm": 10.0 * factor})
        events += [step, a, mm, b, late, chance]
        events += [on_device("gemm", 10.0 * factor), on_device("triton_kernel", 4.0), on_device("exp", 1.0)]
        events += [on_device("autokernel::0.r0", 999.0, True), on_device("stray", 2.0)]
    gpu = Device("test", "sm_90", "cuda")
    assert attribute(events, 3, gpu) == {
        "0.r0": 21.0,  # the median step
        "0.r1": 4.0,
        "unattributed": pytest.approx(2.0),
    }


# --- masks ------------------------------------------------------------------------------------------------


def attention_graph(scores: Callable[..., torch.Tensor], *more: torch.Tensor) -> Graph:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, value in enumerate(more):
                self.register_buffer(f"m{i}", value)

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, free: torch.Tensor
        ) -> torch.Tensor:
            own = [getattr(self, f"m{i}") for i in range(len(more))]
            return scores(q, k, v, free, *own)

    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    free = torch.ones(6, 6, dtype=torch.bool)
    (graph,) = capture(Attention().eval(), (q, k, v, free))
    return graph


def by_hand(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, free: torch.Tensor, *own: torch.Tensor
    ) -> torch.Tensor:
        return step(q @ k.transpose(-2, -1) * 0.3, free, *own).softmax(-1) @ v

    return run


TRIANGLE = torch.ones(6, 6, dtype=torch.bool).tril()
LOW = torch.zeros(6, 6).masked_fill(~TRIANGLE, float("-inf"))
CAUSAL = 21 / 36


@pytest.mark.parametrize(
    ("build", "buffers", "kept"),
    [
        (by_hand(lambda s, free: s), [], 1.0),
        (by_hand(lambda s, free, m: s.masked_fill(~m, float("-inf"))), [TRIANGLE], CAUSAL),
        (by_hand(lambda s, free, m: s.masked_fill(m == 0, -1e9)), [TRIANGLE.float()], CAUSAL),
        (by_hand(lambda s, free, m: s.masked_fill(m, 0.0)), [TRIANGLE], 1.0),
        (by_hand(lambda s, free, m: s + m), [LOW], CAUSAL),
        (by_hand(lambda s, free, m: torch.where(m, s, float("-inf"))), [TRIANGLE], CAUSAL),
        (by_hand(lambda s, free, m: torch.where(m, torch.finfo(s.dtype).min, s)), [~TRIANGLE], CAUSAL),
        (by_hand(lambda s, free, m: s + m), [torch.randn(6, 6)], 1.0),
        (by_hand(lambda s, free: s + torch.full((6, 6), float("-inf")).triu(1)), [], CAUSAL),
        (by_hand(lambda s, free: s.masked_fill(~free, float("-inf"))), [], None),
        (lambda q, k, v, free: F.scaled_dot_product_attention(q, k, v), [], 1.0),
        (lambda q, k, v, free: F.scaled_dot_product_attention(q, k, v, is_causal=True), [], CAUSAL),
        (lambda q, k, v, free, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), [TRIANGLE], CAUSAL),
        (lambda q, k, v, free, m: F.scaled_dot_product_attention(q, k, v, m), [LOW], CAUSAL),
        (lambda q, k, v, free: F.scaled_dot_product_attention(q, k, v, attn_mask=free), [], None),
    ],
)
def test_kept_scores(
    build: Callable[..., torch.Tensor], buffers: list[torch.Tensor], kept: float | None
) -> None:
    (region,) = [r for r in partition(attention_graph(build, *buffers)).regions if r.family == "attention"]
    assert kept_scores(region) == (None if kept is None else pytest.approx(kept))


# --- on a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SMALL)
def test_device_time_on_a_gpu(name: str, tmp_path: Path) -> None:
    loaded = small(name, tmp_path, device="cuda", dtype="float16")
    found = profile_of(loaded)
    assert found.device.kind == "cuda"
    assert all(r.time_us > 0 for r in found.regions)
    assert found.coverage > 0.9
    # Kernels of a tiny model run for a few microseconds each, far less than their launches take.
    assert 0 < found.total_us < found.wall_us
    assert all(entry.ops != ["unattributed"] or entry.share < 0.05 for entry in found.leftover)
