"""In-place ops of a captured graph are said without writing where nobody could tell, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.capture.graph import Graph, capture
from autokernel.capture.nodes import writes


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.body = body
        self.lin = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.body(self, x, y)


def graph_of(body: Callable[[Net, Tensor, Tensor], object]) -> tuple[Graph, Net, list[Tensor]]:
    torch.manual_seed(0)
    net, inputs = Net(body), [torch.randn(4, 8), torch.randn(4, 8)]
    (graph,) = capture(net, inputs)
    return graph, net, inputs


def same(graph: Graph, net: Net, inputs: list[Tensor]) -> None:
    """The edited graph gives what the model gives, and leaves the inputs as the model leaves them."""
    mine, theirs = ([t.clone() for t in inputs] for _ in range(2))
    with torch.no_grad():
        expected = net(*theirs)
        values = iter(mine)
        args = [v if graph.roles[n] != "activation" else None for n, v in zip(
            graph.placeholders, graph.example_inputs, strict=True
        )]  # fmt: skip
        order = {id(t): i for i, t in enumerate(inputs)}
        for i, value in enumerate(graph.example_inputs):
            if args[i] is None:
                args[i] = mine[order[id(value)]] if id(value) in order else next(values)
        got = graph.gm(*args)
    got = got[0] if isinstance(got, tuple) and not isinstance(expected, tuple) else got
    for a, b in zip(
        got if isinstance(got, tuple) else [got],
        expected if isinstance(expected, tuple) else [expected],
        strict=True,
    ):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def residual(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x)
    h += y
    return F.relu(h, inplace=True)


def by_method(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return net.lin(x).mul_(2).add_(y, alpha=0.5).sigmoid_()


def by_position(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.leaky_relu(F.elu(net.lin(x), 1.0, True), 0.1, True)


def read_before_and_after(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.lin(x)
    before = h * 3
    h.add_(y)
    return before, h * 3


def view_made_afterwards(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x)
    h.add_(1)
    left, right = h.chunk(2, -1)
    left.mul_(3)
    return h + torch.cat([right, left], -1)


def view_of_a_view(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x)
    part = h[:, 2:6]
    part.add_(1)
    return part.t() @ part


def mask(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return net.lin(x).masked_fill_(y > 0, 0.0)


def dropped(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(net.lin(F.dropout(x, 0.3, training=False)), 0.5, False) + y


@pytest.mark.parametrize("body", [residual, by_method, by_position, read_before_and_after, mask, dropped])
def test_nothing_is_written_and_nothing_is_different(body) -> None:
    graph, net, inputs = graph_of(body)
    assert not any(writes(n) for n in graph.nodes), graph.gm.code
    assert "dropout" not in graph.gm.code
    same(graph, net, inputs)


def writes_an_input(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return net.lin(x)


def writes_a_view_of_an_input(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x[:, :2].mul_(0)
    return net.lin(x)


def writes_a_buffer(net: Net, x: Tensor, y: Tensor) -> Tensor:
    net.steps.add_(1)
    return net.lin(x)


def view_is_read_later(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x)
    part = h[:, :4]
    h.add_(1)
    return part * 2 + h.sum()


def base_is_read_later(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x)
    h[:, :4].relu_()
    return h * 2


def old_view_is_returned(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.lin(x)
    part = h.view(8, 4)
    return two(part, h.mul_(2))


def other_layout(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x).t()
    h += y.t().contiguous()
    return h.reshape(-1)


@pytest.mark.parametrize(
    "body",
    [writes_an_input, writes_a_view_of_an_input, writes_a_buffer, view_is_read_later, base_is_read_later,
     old_view_is_returned],
)  # fmt: skip
def test_what_somebody_may_see_is_left_alone(body) -> None:
    graph, net, inputs = graph_of(body)
    assert any(writes(n) for n in graph.nodes), graph.gm.code
    if body is not writes_a_buffer:
        same(graph, net, inputs)


@pytest.mark.parametrize("body", [view_made_afterwards, view_of_a_view, other_layout])
def test_right_whether_or_not_it_writes(body) -> None:
    same(*graph_of(body))


@pytest.mark.parametrize("trained", [True, False])
def test_where_gradients_may_be_asked_for_the_graph_is_the_users(trained: bool) -> None:
    """With gradient mode on, but frozen weights, kernels engage, so the graph must be the captured one."""
    seen: list[str] = []

    def backend(gm, inputs):
        seen.append(Graph(gm, list(inputs)).gm.code)
        return gm.forward

    torch._dynamo.reset()
    net = Net(residual).requires_grad_(trained)
    torch.compile(net, backend=backend)(torch.randn(4, 8), torch.randn(4, 8))
    torch._dynamo.reset()
    assert ("inplace = True" in seen[0]) == trained
