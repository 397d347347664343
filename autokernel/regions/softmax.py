"""Softmax that is no part of an attention, with the scaling, masking and casts in front of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match

_IN_FRONT = frozenset({"add", "mul", "div", "masked_fill", "where"}) | ops.CASTS


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    for node in graph.nodes:
        if free(node) and node not in static and op_name(node) in ("softmax", "log_softmax"):
            nodes = {node}
            ops.absorb_producers(nodes, lambda n: free(n) and op_name(n) in _IN_FRONT, static)
            ops.absorb_users(nodes, lambda n: free(n) and op_name(n) in ops.CASTS, static)
            yield Match("softmax", nodes)
