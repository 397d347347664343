"""Sibling linears: two or more projections of one input, which one GEMM can do together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import fake_value
from autokernel.regions import ops
from autokernel.regions.match import Free, Match


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    groups: dict[tuple, set[fx.Node]] = {}
    for node in graph.nodes:
        if free(node) and ops.is_parameter_linear(node, static):
            source, weight, *bias = node.all_input_nodes
            key = (source, fake_value(weight).dtype, bool(bias))
            groups.setdefault(key, set()).add(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            yield Match("sibling_linears", nodes)
