"""Regions: what is found, that it can be cut out and put back, and that nothing aliased is ever cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from small_models import SMALL, graphs_of, small
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.capture.graph import Graph, capture
from autokernel.regions import FAMILIES
from autokernel.regions.partition import grouped_order, partition
from autokernel.regions.region import Region


def graph_of(model: nn.Module, *inputs: Tensor) -> Graph:
    (graph,) = capture(model.eval(), inputs)
    return graph


def families(graph: Graph) -> Counter[str]:
    return Counter(r.family for r in partition(graph).regions)


def values_inside(graph: Graph) -> dict[torch.fx.Node, object]:
    """Every node's real value in one run of the captured call."""
    seen: dict[torch.fx.Node, object] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            seen[n] = super().run_node(n)
            return seen[n]

    with torch.no_grad():
        Recorder(graph.gm).run(*graph.example_inputs)
    return seen


def check_cut(graph: Graph, region: Region) -> None:
    """The region by itself gives what the model has at its place."""
    seen = values_inside(graph)
    inputs = [seen[n] for n in region.activations] + region.static_values()
    with torch.no_grad():
        result = region.subgraph()(*inputs)
    results = result if isinstance(result, tuple) else (result,)
    for node, value in zip(region.outputs, results, strict=True):
        torch.testing.assert_close(value, seen[node], rtol=0, atol=0)


@pytest.mark.parametrize("name", SMALL)
def test_shipped_models_are_covered(name: str, tmp_path) -> None:
    (graph,) = graphs_of(small(name, tmp_path))
    cut = partition(graph)
    assert cut.leftover == []
    for region in cut.regions:
        check_cut(graph, region)
        assert region.family in FAMILIES or region.family == "reduction"


def test_layers_share_fingerprints(tmp_path) -> None:
    (graph,) = graphs_of(small("llama", tmp_path))
    groups = partition(graph).by_fingerprint()
    counts = Counter(len(g) for g in groups.values())
    assert counts[2] >= 5  # attention, rope, siblings, gate, two output projections
    again = partition(graphs_of(small("llama", tmp_path))[0]).by_fingerprint()
    assert set(groups) == set(again)


def test_what_llama_is_made_of(tmp_path) -> None:
    (graph,) = graphs_of(small("llama", tmp_path))
    per_layer = {"attention": 2, "rope": 2, "gated_mlp": 2, "sibling_linears": 2}
    assert families(graph) == {**per_layer, "norm": 5, "linear": 5, "embedding": 1}


def test_a_mask_is_part_of_the_fingerprint() -> None:
    class Masked(nn.Module):
        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = (q @ k.transpose(-2, -1)).masked_fill(~self.mask, float("-inf"))
            return F.softmax(scores, -1) @ v

    def fingerprint(mask: Tensor) -> str:
        x = torch.randn(1, 2, 8, 4)
        (region,) = partition(graph_of(Masked(mask), x, x, x)).regions
        assert region.input_roles[-1] == "constant"
        return region.fingerprint

    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    assert fingerprint(causal) == fingerprint(causal.clone())
    banded = causal.clone()
    banded[7, 0] = False
    assert fingerprint(causal) != fingerprint(banded)


@pytest.mark.parametrize(
    ("change", "same"),
    [(lambda m: m.half(), False), (lambda m: m, True)],
)
def test_dtype_is_part_of_the_fingerprint(change: Callable[[nn.Module], nn.Module], same: bool) -> None:
    def fingerprint(model: nn.Module, x: Tensor) -> str:
        return partition(graph_of(model, x)).regions[0].fingerprint

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    before = fingerprint(model, torch.randn(4, 8))
    changed = change(model)
    x = torch.randn(4, 8, dtype=next(changed.parameters()).dtype)
    assert (fingerprint(changed, x) == before) is same


def test_written_tensors_are_left_alone() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            view = y[:, :4]
            z = torch.exp(y)  # reads y before it is written
            view.add_(1.0)
            return torch.sigmoid(y) + z

    graph = graph_of(InPlace(), torch.randn(3, 8))
    names = {n.name for r in partition(graph).regions for n in r.nodes}
    written = {n.name for n in graph.nodes if n.op == "call_function" and n.name in ("mul", "y", "view")}
    assert not names & written
    for region in partition(graph).regions:
        assert not any(str(n.target) == "add_" for n in region.nodes)


def test_inplace_activation_modules_are_left_alone() -> None:
    graph = graph_of(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), torch.randn(2, 8)
    )
    for region in partition(graph).regions:
        check_cut(graph, region)
        assert not any("relu" in n.name for n in region.nodes)


def test_an_updated_buffer_is_no_static_input() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1.0)
            return torch.tanh(x * self.seen) + 1

    graph = graph_of(Counting(), torch.randn(2, 8))
    seen = next(n for n in graph.placeholders if graph.roles[n] == "buffer")
    assert seen not in graph.static_nodes()
    (region,) = partition(graph).regions  # behind the write: what it reads is no weight, but what comes in
    assert seen in region.activations and seen in region.late_inputs and not region.statics


def test_regions_never_make_a_cycle() -> None:
    class Crossed(nn.Module):
        """Two chains that feed one another: each could be one region, both together could not."""

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            a = torch.softmax(x, -1)
            b = torch.softmax(a @ w, -1)
            return torch.softmax((b @ w) + a, -1)

    graph = graph_of(Crossed(), torch.randn(4, 4), torch.randn(4, 4))
    cut = partition(graph)
    owner = {n: i for i, r in enumerate(cut.regions) for n in r.nodes}
    assert grouped_order(graph.nodes, owner) is not None
    for region in cut.regions:
        check_cut(graph, region)


def test_gelu_by_hand_is_an_epilogue() -> None:
    class Hand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return 0.5 * h * (1 + torch.tanh(0.79788456 * (h + 0.044715 * torch.pow(h, 3.0))))

    graph = graph_of(Hand(), torch.randn(4, 8))
    (region,) = partition(graph).regions
    assert region.family == "linear" and len(region.nodes) == 9
    check_cut(graph, region)


def test_attention_weights_that_are_returned_keep_the_attention_whole() -> None:
    class Returns(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            weights = F.softmax(q @ k.transpose(-2, -1), -1)
            return weights @ v, weights

    x = torch.randn(1, 2, 8, 4)
    graph = graph_of(Returns(), x, x, x)
    assert "attention" not in families(graph)
    for region in partition(graph).regions:
        check_cut(graph, region)


def test_symbolic_shapes_have_no_regions() -> None:
    graphs: list[Graph] = []

    def backend(gm, inputs):
        graphs.append(Graph(gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    model = torch.compile(nn.Linear(4, 4), backend=backend, dynamic=True)
    with torch.no_grad():
        model(torch.randn(3, 4))
    assert graphs[0].dynamic and partition(graphs[0]).regions == []


def test_a_negative_literal_keeps_its_parentheses() -> None:
    from autokernel.regions.code import expression, variable_names

    class Power(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (-2) ** x

    graph = graph_of(Power(), torch.tensor([2.0, 3.0]))
    node = next(n for n in graph.nodes if n.op == "call_function")
    text = expression(node, variable_names(graph.nodes))
    assert "(-2) **" in text or "pow(-2" in text
