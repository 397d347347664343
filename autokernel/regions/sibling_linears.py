"""Sibling linears: two or more projections of one input, which one GEMM can do together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import fake_value, op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        x = ops.linear_input(node, static) if free(node) else None
        if x is None:
            continue
        own = [a for a in node.all_input_nodes if a is not x]
        spelling = (
            op_name(node),
            node.all_input_nodes.index(x),
            *(a for a in node.args if isinstance(a, str)),
        )
        key = (_source(x, node), spelling, fake_value(own[-1]).dtype, len(own))
        groups.setdefault(key, []).append(node)
    for linears in groups.values():
        if len(linears) > 1:
            parts = [ops.whole_linear(n, static, free) for n in linears]
            yield Match("sibling_linears", set().union(*parts))


def _source(x: fx.Node, linear: fx.Node) -> fx.Node:
    """``x``, or what it flattens for this linear alone."""
    own = op_name(linear) in ("addmm", "mm") and ops.is_view(x) and len(x.users) == 1
    return x.all_input_nodes[0] if own and len(x.all_input_nodes) == 1 else x
