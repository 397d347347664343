"""A linear layer with its epilogue: activations and scalings that read nothing but its result."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    for node in graph.nodes:
        if not free(node) or not ops.is_parameter_linear(node, static):
            continue
        nodes = {node}

        def allowed(user: fx.Node, nodes: set[fx.Node] = nodes) -> bool:
            return (
                free(user)
                and op_name(user) in ops.POINTWISE
                and ops.shape(user) == ops.shape(next(iter(nodes)))
            )

        ops.absorb_users(nodes, allowed, static)
        if len([n for n in nodes if any(u not in nodes for u in n.users)]) > 1:
            nodes = {node}  # an inner value is read elsewhere too: leave the epilogue to the pointwise chains
        yield Match("linear", nodes)
