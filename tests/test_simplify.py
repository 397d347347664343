"""In-place ops of a captured graph are said without writing where nobody could tell, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.capture.graph import Graph, capture
from autokernel.capture.nodes import fake_value, op_name, storages, writes


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


def ops_of(graph: Graph) -> list[str]:
    return [op_name(n) for n in graph.nodes if n.op in ("call_function", "call_method")]


def layouts_that_cancel(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x).contiguous().to(torch.float32).view(4, 8).expand(4, -1)
    h = h.transpose(0, 1).t().unsqueeze(0).squeeze(0).permute(0, 1)
    return torch.sin(h.view(2, 2, 8).reshape(4, 8)).type_as(y)


def widened_and_narrowed(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x).half()
    return torch.sin(h.float().half() + h.double().to(torch.float32).to(torch.float16))


def returned_by_itself(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return x.contiguous()


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (layouts_that_cancel, ["linear", "sin"]),
        (widened_and_narrowed, ["linear", "to", "double", "to", "to", "add", "sin"]),
        (returned_by_itself, []),
    ],
)
def test_what_changes_nothing_goes(body, left: list[str]) -> None:
    graph, net, inputs = graph_of(body)
    same(graph, net, inputs)
    assert [{"half": "to"}.get(n, n) for n in ops_of(graph)] == left


def narrowed_and_widened(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(net.lin(x).half().float())


def across_two_kinds(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(net.lin(x).half().bfloat16().half())


def other_strides(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x.t().contiguous().t())


def a_part_of_it(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x[:2].expand(2, 8))


def own_memory_is_returned(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.lin(x).half()
    return h, h.float().half().view(8, 4)


def own_memory_is_written(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.lin(x).half()
    copy = h.float().half()
    copy.t_().add_(1)
    return h.float() + copy.t()


def a_view_of_an_input_is_returned(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return x.view(4, 8)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (narrowed_and_widened, 2), (across_two_kinds, 3), (other_strides, 3), (a_part_of_it, 1),
        (own_memory_is_returned, 4), (own_memory_is_written, 3), (a_view_of_an_input_is_returned, 1),
    ],
)  # fmt: skip
def test_what_changes_something_stays(body, kept: int) -> None:
    graph, net, inputs = graph_of(body)
    moves = {"to", "half", "float", "bfloat16", "t", "contiguous", "getitem", "view", "expand"}
    assert sum(n in moves for n in ops_of(graph)) >= kept, graph.gm.code
    same(graph, net, inputs)


def test_views_of_a_round_trip_lie_in_the_first_ones_memory() -> None:
    def body(net: Net, x: Tensor, y: Tensor) -> Tensor:
        h = net.lin(x).half()
        return torch.sin(h.float().half()[:, 2:].t())

    graph, net, inputs = graph_of(body)
    same(graph, net, inputs)
    half, part = (next(n for n in graph.nodes if op_name(n) == op) for op in ("half", "t"))
    assert storages(half) == storages(part)
    assert fake_value(part).storage_offset() == 2 and fake_value(part).stride() == (1, 8)


class Masked(nn.Module):
    """Attention under a padding mask that was combined with another one, as transformers does it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> object:
        rows = torch.arange(q.shape[2])[None, None, :, None]
        columns = torch.arange(k.shape[2])[None, None, None, :]
        other = columns <= rows if self.kind == "causal" else rows >= 0
        mask = (other & padding[:, None, None, :]).expand(q.shape[0], -1, q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (out, mask) if self.kind == "returned" else out


@pytest.mark.parametrize(
    ("kind", "mask"), [("plain", (2, 1, 1, 6)), ("causal", (2, 1, 6, 6)), ("returned", (2, 1, 6, 6))]
)
def test_a_mask_that_lets_everything_through_goes(kind: str, mask: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, 6, 4) for _ in range(3))
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, 4:] = False
    (graph,) = capture(Masked(kind), (q, k, v, padding))
    (call,) = [n for n in graph.nodes if op_name(n) == "scaled_dot_product_attention"]
    assert tuple(fake_value(call.kwargs["attn_mask"]).shape) == mask
    got = graph.gm(*graph.example_inputs)
    want = Masked(kind)(q, k, v, padding)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
