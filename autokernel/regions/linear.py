"""A linear layer, however it is spelled, with its epilogue: what reads nothing but its result, pointwise."""

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
        core = ops.whole_linear(node, static, free)
        shapes = {ops.shape(n) for n in core if n is node or n not in node.all_input_nodes}

        def allowed(user: fx.Node, shapes: set[tuple[int, ...]] = shapes) -> bool:
            return free(user) and op_name(user) in ops.POINTWISE and ops.shape(user) in shapes

        nodes = set(core)
        ops.absorb_users(nodes, allowed, static)
        if len([n for n in nodes if any(u not in nodes for u in n.users)]) > 1:
            nodes = core  # an inner value is read elsewhere too: leave the epilogue to the pointwise chains
        yield Match("linear", nodes)
