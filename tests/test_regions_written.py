"""Regions that read memory which the graph writes: only behind the last write, and so that nobody notices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import MODELS
from test_odd_models import Pair, context_of, module, own_ops, packed
from test_regions import graph_of
from test_zoo import through
from torch import Tensor, nn

from autokernel.capture.graph import Graph, capture
from autokernel.capture.nodes import storages, writes, written_storages
from autokernel.capture.source import SourceSpec, load
from autokernel.integrate.artifact import write_artifact
from autokernel.regions.ops import is_view
from autokernel.regions.partition import grouped_order, partition
from autokernel.regions.region import Region


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


Put = Callable[..., tuple[Pair, list[Region]]]


@pytest.fixture
def put(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Put:
    """A model in which every region has a kernel of its own ops, and these regions."""

    def put(
        model: nn.Module, *args: Any, kernel: Callable[[Region], str] = own_ops
    ) -> tuple[Pair, list[Region]]:
        graphs = capture(copy.deepcopy(model), copy.deepcopy(args))
        groups = {f: r for g in graphs for f, r in partition(g).by_fingerprint().items()}
        kept = []
        for i, group in enumerate(groups.values()):
            task = context_of(group[0]).task
            task.rank, task.call_count = i, len(group)
            source = tmp_path / f"{task.name}.py"
            source.write_text(kernel(group[0]), encoding="utf-8")
            kept.append((task, source))
        write_artifact(tmp_path / "run" / "optimized", kept, "plain", {}, {})
        regions = [r for group in groups.values() for r in group]
        return Pair(model, args, {}, tmp_path / "run", len(regions), capsys), regions

    return put


@torch.no_grad()
def works(pair: Pair, calls: int = 3) -> None:
    """Outputs, inputs and state are the model's, call after call, with every kernel engaged."""
    for seed in range(calls):
        torch.manual_seed(seed)
        given = [torch.randn_like(a) if a.is_floating_point() else a for a in pair.args]
        pair.same(*given)
    assert pair.engaged == pair.sites > 0 and not pair.reasons


def reading(regions: list[Region]) -> list[Region]:
    """Those that read written memory; none writes it or hands it out."""
    for region in regions:
        written = written_storages(region.graph.nodes)
        assert not any(writes(n) for n in region.nodes)
        assert not any(storages(o) & written for o in region.outputs)
        assert not any(storages(s) & written for s in region.statics)
    return [r for r in regions if r.late_inputs]


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_copy_": lambda cache, new: cache.index_copy_(1, torch.tensor([3]), new[:, :1]),
    "setitem": lambda cache, new: cache.__setitem__((slice(None), 2), new[:, 0]),
    "add_": lambda cache, new: cache.add_(new),
    "through a view": lambda cache, new: cache[:, 1:].mul_(2.0),
    "copy_": lambda cache, new: cache.copy_(new),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["input", "buffer"])
def test_read_behind_the_write(write: str, kind: str, put: Put) -> None:
    """The cache is an argument or a buffer of the model; as a buffer it must not be prepacked."""

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        cache = given if kind == "input" else self.cache
        WRITES[write](cache, self.a(x))
        return torch.tanh(cache) + torch.sigmoid(x)

    model = module(forward, a=nn.Linear(8, 8), cache=torch.zeros(2, 6, 8))
    pair, regions = put(model, torch.randn(2, 6, 8), torch.randn(2, 6, 8), kernel=packed)
    assert len(reading(regions)) == 1
    works(pair)


def test_a_read_before_the_write_is_in_no_region(put: Put) -> None:
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.tanh(cache) * 2.0
        cache.add_(self.a(x))
        return before, torch.tanh(cache) * 3.0

    pair, regions = put(module(forward, a=nn.Linear(8, 8)), torch.randn(2, 8), torch.randn(2, 8))
    (late,) = reading(regions)
    assert [n.name for n in late.nodes if "tanh" in n.name] == ["tanh_1"]
    assert not any(n.name == "tanh" for r in regions for n in r.nodes)
    works(pair)


def test_a_read_between_two_writes_is_in_no_region(put: Put) -> None:
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        cache.add_(y)
        between = torch.sigmoid(cache)
        cache.mul_(between)
        return between + y, torch.exp(cache) + y

    pair, regions = put(module(forward, a=nn.Linear(8, 8)), torch.randn(2, 8), torch.randn(2, 8))
    (late,) = reading(regions)
    names = {n.name for r in regions for n in r.nodes}
    assert "exp" in {n.name for n in late.nodes} and not any("sigmoid" in n for n in names)
    works(pair)


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(q @ keys.transpose(-1, -2) / 2.0, -1) @ values


@pytest.mark.parametrize("order", ["both first", "in between"])
def test_two_caches(order: str, put: Put) -> None:
    """The values' cache may be written when the scores are there already: the region waits for both."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, 4] = self.k(x)[:, 0]
        if order == "both first":
            values[:, 4] = self.v(x)[:, 0]
        weights = torch.softmax(self.q(x) @ keys.transpose(-1, -2) / 2.0, -1)
        if order == "in between":
            values[:, 4] = self.v(x)[:, 0]
        return self.o(weights @ values)

    model = module(forward, **{n: nn.Linear(8, 8) for n in "qkvo"})
    pair, regions = put(model, torch.randn(2, 1, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8))
    (late,) = reading(regions)
    assert late.family == "attention" and len(late.late_inputs) == 2
    works(pair)


def test_a_write_that_needs_the_region_that_would_wait_for_it(put: Put) -> None:
    """The second cache takes what comes of the first: softmax and both products can't be one step."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, 4] = self.k(x)[:, 0]
        weights = torch.softmax(self.q(x) @ keys.transpose(-1, -2), -1)
        values[:, 4] = weights[:, 0, :1] + x[:, 0]
        return weights @ values

    model = module(forward, **{n: nn.Linear(8, 8) for n in "qk"})
    pair, regions = put(model, torch.randn(2, 1, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8))
    assert "attention" not in [r.family for r in regions]
    reading(regions)
    works(pair)


def test_two_caches_that_are_parts_of_one_tensor(put: Put) -> None:
    """What is written through one part may be read through the other: they are one memory."""

    def forward(self, x: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        first, second = both[:, :4], both[:, 2:]
        first.add_(self.a(x)[:, :4])
        early = torch.tanh(first) + 1.0
        second.mul_(2.0)
        return early, torch.tanh(first) + torch.sigmoid(second)

    pair, regions = put(module(forward, a=nn.Linear(6, 6)), torch.randn(2, 6), torch.randn(2, 6))
    reading(regions)
    assert not any(n.name == "tanh" for r in regions for n in r.nodes)
    works(pair)


def test_a_view_taken_before_the_write_and_read_behind_it(put: Put) -> None:
    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        view = cache[:, :4]
        cache.add_(self.a(x))
        return torch.tanh(view) * 2.0

    pair, regions = put(module(forward, a=nn.Linear(8, 8)), torch.randn(2, 8), torch.randn(2, 8))
    (late,) = reading(regions)
    assert all(n.name != "view" for n in late.nodes)
    works(pair)


def test_a_view_written_later_blocks_what_came_before(put: Put) -> None:
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.add_(self.a(x))
        view = cache[:, :4]
        early = torch.tanh(view) * 2.0
        cache[:, 2:].zero_()
        return early, torch.sigmoid(view) * 3.0

    pair, regions = put(module(forward, a=nn.Linear(8, 8)), torch.randn(2, 8), torch.randn(2, 8))
    (late,) = reading(regions)
    assert {n.name.split("_")[0] for n in late.nodes} == {"sigmoid", "mul"}
    works(pair)


def test_a_view_of_written_memory_is_never_handed_out(put: Put) -> None:
    """Who gets the view may write it: it must be the cache itself, not a copy."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.add_(self.a(x))
        turned = cache.transpose(0, 1)
        return turned, torch.tanh(turned) + 1.0

    pair, regions = put(module(forward, a=nn.Linear(8, 8)), torch.randn(2, 8), torch.randn(2, 8))
    reading(regions)
    works(pair)
    with torch.no_grad():
        cache = torch.zeros(2, 8)
        pair.model(torch.randn(2, 8), cache)[0].fill_(7.0)
    assert (cache == 7.0).all()


def test_what_is_read_of_a_graphs_own_tensor(put: Put) -> None:
    """A tensor that the graph makes and then writes a part of, as masks and paddings are made."""

    def forward(self, x: Tensor) -> Tensor:
        room = torch.zeros(2, 10)
        room[:, 1:9] = self.a(x)
        return F.gelu(room) + room.sum(-1, keepdim=True)

    pair, regions = put(module(forward, a=nn.Linear(8, 8)), torch.randn(2, 8))
    assert len(reading(regions)) == 1
    works(pair)


def test_written_buffers_of_two_layers_share_a_fingerprint() -> None:
    def forward(self, x: Tensor) -> Tensor:
        self.cache[:, 3] = self.k(x)[:, 0]
        return x + attend(self.q(x), self.cache, self.cache)

    layers = [
        module(forward, q=nn.Linear(8, 8), k=nn.Linear(8, 8), cache=torch.randn(2, 6, 8)) for _ in range(2)
    ]
    graph = graph_of(nn.Sequential(*layers), torch.randn(2, 1, 8))
    late = reading(partition(graph).regions)
    assert [r.family for r in late] == ["attention", "attention"]
    assert len({r.fingerprint for r in late}) == 1 and not late[0].statics


def decode_step(folder: Path) -> Path:
    path = folder / "decode.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(MODELS)!r})\nfrom llama_decode import *\n\n\n"
        "def build():\n"
        "    return LlamaDecode(Config(211, 64, 2, 4, 2, 64, 96, batch=2, cache_length=48)).eval()\n",
        encoding="utf-8",
    )
    return path


def test_the_decode_step_lies_in_regions_but_for_its_writes(tmp_path: Path) -> None:
    loaded = load(SourceSpec(str(decode_step(tmp_path))))
    (graph,) = capture(loaded.model, loaded.args, loaded.kwargs)
    cut = partition(graph)
    inside, ops = cut.coverage()
    assert ops - inside == 4  # keys and values of two layers are written
    assert all(writes(n) or is_view(n) for n in cut.leftover)
    attention = [r for r in reading(cut.regions) if r.family == "attention"]
    assert len(attention) == 2 and len({r.fingerprint for r in attention}) == 1


@pytest.mark.slow
def test_the_decode_step_from_capture_to_a_loaded_artifact(tmp_path: Path) -> None:
    """References hold the cache as it is behind the write."""
    loaded = load(SourceSpec(str(decode_step(tmp_path))))
    _, tasks, said = through(loaded, tmp_path / "run")
    assert not said
    (attention,) = (t for t in tasks if t.family == "attention")
    assert attention.call_count == 2 and all(p.role == "activation" for p in attention.inputs)


def test_order_is_kept_whatever_is_replaced() -> None:
    """Every single region by itself can be put in: the order of reads and writes has no cycle."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for _ in range(2):
            keys[:, 1] = self.k(x)[:, 0]
            x = x + attend(self.q(x), keys, values)
            values[:, 1] = self.v(x)[:, 0]
        return attend(self.q(x), keys, values)

    model = module(forward, **{n: nn.Linear(8, 8) for n in "qkv"})
    graph: Graph = graph_of(model, torch.randn(2, 1, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8))
    regions = partition(graph).regions
    assert (
        sum(r.family == "attention" for r in regions) == 1
    )  # the last one; before it both are written again
    touched = written_storages(graph.nodes)
    for region in regions:
        order = grouped_order(graph.nodes, dict.fromkeys(region.nodes, 0))
        assert order is not None
        flat = [n for unit in order for n in (region.nodes if isinstance(unit, int) else [unit])]
        effects = [n for n in flat if writes(n)]
        assert effects == [n for n in graph.nodes if writes(n)]
        if region.late_inputs:
            assert max(map(flat.index, effects)) < min(
                flat.index(n) for n in region.nodes if any(storages(a) & touched for a in n.all_input_nodes)
            )
