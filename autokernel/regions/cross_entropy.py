"""Cross-entropy loss, with the casts and reshapes in front of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    for node in graph.nodes:
        if free(node) and op_name(node) == "cross_entropy":
            nodes = {node}
            ops.absorb_producers(
                nodes, lambda n: free(n) and (ops.is_movement(n) or op_name(n) in ops.CASTS), static
            )
            yield Match("cross_entropy", nodes)
