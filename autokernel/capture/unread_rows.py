"""Rows that nobody reads are not computed.

A classifier reads the first token of its encoder, a language model may be asked for the last position only;
yet everything behind the last attention is computed for every token.  A slice ``x[:, a:b]`` commutes with ops
that treat rows one by one: linear layers, norms over the last dimension, pointwise ops, and the queries of
attention.  It is moved in front of them, for as long as what it is taken of has no other reader.

Each remaining row goes through the same ops with the same operands, so its value is the same up to the
rounding of a library that picks another algorithm for fewer rows.  Shapes and strides of what the graph
returns stay: the slice moves only where linear layers, whose results are dense, are all that reads it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import Tensor, fx

from autokernel.capture.nodes import (
    arguments,
    fake_value,
    is_opaque,
    is_tensor,
    op_name,
    record_value,
    symbolic,
    written_storages,
)

_POINTWISE = frozenset({
    "add", "sub", "mul", "div", "neg", "gelu", "relu", "silu", "tanh", "sigmoid", "pow", "square", "sqrt",
    "rsqrt", "erf", "exp", "float", "half", "bfloat16", "double", "to", "contiguous",
})  # fmt: skip
_ROWWISE = frozenset({"linear", "layer_norm", "rms_norm"})
_ATTENTION = "scaled_dot_product_attention"
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class Cut:
    """``[start:stop]`` along ``dim``."""

    dim: int
    start: int
    stop: int


@dataclass
class Plan:
    """``cuts``: the nodes that shrink, and how.  ``wanted``: what each of them wants of its arguments."""

    cuts: dict[fx.Node, Cut] = field(default_factory=dict)
    wanted: dict[fx.Node, dict[fx.Node, Cut]] = field(default_factory=dict)


def drop_unread_rows(graph: fx.Graph) -> int:
    """Edit ``graph`` in place; how many nodes compute fewer rows than they did."""
    if any(symbolic(n) for n in graph.nodes):
        return 0
    slices = [n for n in graph.nodes if op_name(n) == "getitem" and _cut_of(n) is not None]
    if not slices or written_storages(graph.nodes) or any(is_opaque(n) for n in graph.nodes):
        return 0
    gone = 0
    for node in slices:
        if not all(op_name(u) == "linear" and u.args[0] is node for u in node.users):
            continue
        plan = _plan(graph, node)
        if any(op_name(n) in ("linear", _ATTENTION) for n in plan.cuts):
            _carry_out(graph, node, plan)
            gone += len(plan.cuts)
    return gone


def _cut_of(node: fx.Node) -> Cut | None:
    """The one dimension that ``node`` takes a part of, the last one not counted."""
    source, index = node.args
    if not isinstance(source, fx.Node) or not is_tensor(source) or not node.users:
        return None
    shape = fake_value(source).shape
    entries = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(s, int) for s in shape) or len(entries) > len(shape):
        return None
    found = [(d, e) for d, e in enumerate(entries) if e != slice(None) and e != slice(0, None)]
    if len(found) != 1 or found[0][0] >= len(shape) - 1:
        return None
    ((dim, entry),) = found
    if isinstance(entry, bool) or not isinstance(entry, int | slice):
        return None
    if isinstance(entry, int):
        entry = slice(entry % shape[dim], entry % shape[dim] + 1)
    parts = (entry.start, entry.stop, entry.step)
    if any(p is not None and not isinstance(p, int) for p in parts):
        return None
    start, stop, step = entry.indices(shape[dim])
    return Cut(dim, start, stop) if step == 1 and 0 < stop - start < shape[dim] else None


def _plan(graph: fx.Graph, last: fx.Node) -> Plan:
    """What shrinks if ``last`` is taken before its source is computed: from there upwards, readers first."""
    plan = Plan(wanted={last: {last.args[0]: _cut_of(last)}})  # type: ignore[dict-item]
    for node in reversed(list(graph.nodes)):
        asked = [plan.wanted[u].get(node) if u in plan.wanted else None for u in node.users]
        if (
            not asked
            or None in asked
            or len(set(asked)) != 1
            or node.op not in ("call_function", "call_method")
        ):
            continue
        wants = _wants(node, asked[0])  # type: ignore[arg-type]
        if wants is not None:
            plan.cuts[node], plan.wanted[node] = asked[0], wants  # type: ignore[assignment]
    return plan


def _wants(node: fx.Node, cut: Cut) -> dict[fx.Node, Cut] | None:
    """The parts of its arguments from which ``node`` gets that part of its result; None if it needs more."""
    name, value = op_name(node), fake_value(node)
    if not isinstance(value, Tensor) or "out" in node.kwargs:
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    rank, shape = value.dim(), fake_value(source).shape
    if name in _POINTWISE:
        wants: dict[fx.Node, Cut] = {}
        for arg in node.all_input_nodes:
            dim = cut.dim - (rank - fake_value(arg).dim())
            if dim >= 0 and fake_value(arg).shape[dim] == value.shape[cut.dim]:
                wants[arg] = Cut(dim, cut.start, cut.stop)
        return wants
    if name in _ROWWISE:
        over = (
            (0,) if name == "linear" else arguments(node, ("input", "normalized_shape"))["normalized_shape"]
        )
        others = [a for a in (*node.args[1:], *node.kwargs.values()) if a is source]
        return {source: cut} if len(over) == 1 and cut.dim < rank - 1 and not others else None
    if name == "mean":
        given = arguments(node, ("input", "dim", "keepdim"))
        return (
            {source: cut} if given.get("dim") in (-1, [-1], (-1,)) and given.get("keepdim") is True else None
        )
    if name == "transpose":
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        return {source: Cut({a: b, b: a}.get(cut.dim, cut.dim), cut.start, cut.stop)}
    if name in ("view", "reshape"):
        same = shape[: cut.dim + 1] == value.shape[: cut.dim + 1]
        return {source: cut} if same else None
    return _wants_of_attention(node, cut) if name == _ATTENTION else None


def _wants_of_attention(node: fx.Node, cut: Cut) -> dict[fx.Node, Cut] | None:
    """Queries are rows; keys and values are not."""
    given = arguments(node, _SDPA)
    query, mask = given["query"], given.get("attn_mask")
    rank = fake_value(node).dim()
    if cut.dim != rank - 2 or given.get("dropout_p", 0.0) or given.get("is_causal", False):
        return None
    if query in (given["key"], given["value"], mask):
        return None
    wants = {query: cut}
    if isinstance(mask, fx.Node):
        rows = fake_value(mask).dim() - 2
        if rows < 0:
            return None
        if fake_value(mask).shape[rows] != 1:
            wants[mask] = Cut(rows, cut.start, cut.stop)
    return wants


def _carry_out(graph: fx.Graph, last: fx.Node, plan: Plan) -> None:
    fresh: dict[fx.Node, fx.Node] = {}
    parts: dict[tuple[fx.Node, Cut], fx.Node] = {}
    for node in [n for n in graph.nodes if n in plan.cuts]:
        wanted = plan.wanted[node]
        with graph.inserting_before(node):
            for arg, cut in wanted.items():
                if arg not in fresh and (arg, cut) not in parts:
                    index = (*[slice(None)] * cut.dim, slice(cut.start, cut.stop))
                    parts[arg, cut] = _evaluated(graph.call_function(operator.getitem, (arg, index)), arg)

            def smaller(arg: fx.Node, wanted: dict[fx.Node, Cut] = wanted) -> fx.Node:
                return arg if arg not in wanted else fresh.get(arg) or parts[arg, wanted[arg]]

            copy = graph.node_copy(node, smaller)
            if op_name(node) in ("view", "reshape"):
                shape = list(fake_value(node).shape)
                shape[plan.cuts[node].dim] = plan.cuts[node].stop - plan.cuts[node].start
                copy.args, copy.kwargs = (copy.args[0], tuple(shape)), {}
            fresh[node] = _evaluated(copy, node)
    source, index = last.args
    entries = list(index) if isinstance(index, tuple) else [index]
    dim = plan.cuts[source].dim  # type: ignore[index]
    entries[dim] = 0 if isinstance(entries[dim], int) else slice(None)
    last.args = (fresh[source], tuple(entries))  # type: ignore[index]
    _evaluated(last, last)
    for node in reversed([n for n in graph.nodes if n in plan.cuts]):
        graph.erase_node(node)


def _evaluated(node: fx.Node, like: fx.Node) -> fx.Node:
    """``node`` with its value recorded, and where it comes from as ``like`` says."""
    node.meta = {k: v for k, v in like.meta.items() if k != "example_value"}
    record_value(node)
    return node
