"""Rows that nobody reads are not computed, and what is read stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autokernel.capture.graph import Graph, capture
from autokernel.capture.nodes import fake_value, op_name
from autokernel.capture.unread_rows import drop_unread_rows

T, D = 10, 16


class Block(nn.Module):
    """A transformer's block, what is read of it, and one thing at a time that may stand in the way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v, self.up, self.down, self.head = (nn.Linear(D, D) for _ in range(6))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        q, k, v = (p(x).view(2, T, 2, D // 2).transpose(1, 2) for p in (self.q, self.k, self.v))
        causal = self.way == "causal"
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=None if causal else mask, is_causal=causal)
        x = x + a.transpose(1, 2).reshape(2, T, D)
        if self.way == "mixed":
            x = x + x.softmax(1)
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        if self.way == "first":
            return self.head(y[:, 0])
        if self.way == "batch":
            return self.head(y[:1])
        if self.way == "width":
            return self.head(torch.cat([y[..., : D // 2], y[..., : D // 2]], -1))
        if self.way == "view":
            return y[:, 0]
        last = self.head(y[:, -2:, :])
        return (last, y) if self.way == "returned" else last


def rows_of(graph: Graph) -> list[tuple[int, ...]]:
    """Shapes of what the linear layers and attention give."""
    wanted = ("linear", "scaled_dot_product_attention")
    return [tuple(fake_value(n).shape) for n in graph.nodes if op_name(n) in wanted]


FULL, HEADS = (2, T, D), (2, 2, T, D // 2)


@pytest.mark.parametrize("mask_shape", [(2, 1, 1, T), (T, T), (2, 2, T, T)])
@pytest.mark.parametrize(
    ("way", "rows"),
    [
        ("first", [(2, 1, D), FULL, FULL, (2, 2, 1, D // 2), (2, 1, D), (2, 1, D), (2, D)]),
        ("last", [(2, 2, D), FULL, FULL, (2, 2, 2, D // 2), (2, 2, D), (2, 2, D), (2, 2, D)]),
        ("batch", [FULL, FULL, FULL, HEADS, (1, T, D), (1, T, D), (1, T, D)]),
        ("causal", [FULL, FULL, FULL, HEADS, (2, 2, D), (2, 2, D), (2, 2, D)]),
        ("mixed", [FULL, FULL, FULL, HEADS, (2, 2, D), (2, 2, D), (2, 2, D)]),
        ("returned", [FULL, FULL, FULL, HEADS, FULL, FULL, (2, 2, D)]),
        ("width", [FULL, FULL, FULL, HEADS, FULL, FULL, FULL]),
        ("view", [FULL, FULL, FULL, HEADS, FULL, FULL]),
    ],
)
def test_what_shrinks(way: str, rows: list[tuple[int, ...]], mask_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, inputs = Block(way).eval(), (torch.randn(2, T, D), torch.randn(mask_shape))
    (graph,) = capture(model, inputs)
    assert rows_of(graph) == rows
    with torch.no_grad():
        got, want = graph.gm(*graph.example_inputs), model(*inputs)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_recorded_is_what_is_computed() -> None:
    """Every node's value is recorded as it is when the graph runs; captured again, the graph is the same."""
    model, inputs = Block("last").eval(), (torch.randn(2, T, D), torch.randn(2, 1, T, T))
    (graph,), (again,) = capture(model, inputs), capture(model, inputs)
    assert graph.gm.code == again.gm.code
    values: dict[Any, Tensor] = dict(zip(graph.placeholders, graph.example_inputs, strict=True))

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    with torch.no_grad():
        Recorder(graph.gm).run(*graph.example_inputs)
    for node in graph.nodes:
        if isinstance(fake_value(node), Tensor):
            said, got = fake_value(node), values[node]
            assert (said.shape, said.stride(), said.dtype) == (got.shape, got.stride(), got.dtype)


def test_nothing_moves_where_memory_is_written() -> None:
    class Written(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            mask.add_(1)
            return super().forward(x, mask)

    (graph,) = capture(Written("first").eval(), (torch.randn(2, T, D), torch.randn(2, 1, T, T)))
    assert rows_of(graph)[:-1] == [FULL, FULL, FULL, HEADS, FULL, FULL]


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_real_models_compute_the_rows_that_are_read(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    ones = torch.ones(2, 24, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": zoo.ids(2, 24), "attention_mask": ones}
    more: dict[str, Any] = {}
    if name == "LlamaForCausalLM":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**zoo.LLAMA))
        more = {"use_cache": False, "logits_to_keep": 1}
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**zoo.BERT))
    (graph,) = capture(model.eval(), (), inputs | more)
    shapes = [tuple(fake_value(n).shape) for n in graph.nodes if op_name(n) == "scaled_dot_product_attention"]
    assert shapes == [(2, 4, 24, 8), (2, 4, 1, 8)]
    with torch.no_grad():
        (got,), want = graph.gm(*graph.example_inputs), model(**inputs, **more).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_graph_for_any_batch_is_left_alone() -> None:
    """Sizes that are symbols can't be written into a view."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x).view(x.shape[0], 8, 4, 4).reshape(x.shape[0], 8, 16)
            return self.down(h[:, 0])

    changed: list[int] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        changed.append(drop_unread_rows(gm.graph))
        gm.recompile()
        return gm.forward

    model = Net().eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 8, 16)
            torch.testing.assert_close(compiled(x), model(x))
    assert changed and not any(changed)
