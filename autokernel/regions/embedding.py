"""Embedding look-ups and the sum of several of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if not free(node) or node in static or node in taken or op_name(node) != "embedding":
            continue
        nodes = {node}
        grew = True
        while grew:
            grew = False
            for member in list(nodes):
                for user in member.users:
                    if user in nodes or op_name(user) not in ("add", "mul") or not free(user):
                        continue
                    others = [a for a in user.all_input_nodes if a not in nodes and a not in static]
                    if all(op_name(o) == "embedding" and free(o) and len(o.users) == 1 for o in others):
                        nodes.update({user, *others})
                        grew = True
        ops.absorb_producers(nodes, lambda n: free(n) and op_name(n) == "embedding", static)
        taken |= nodes
        yield Match("embedding", nodes)
