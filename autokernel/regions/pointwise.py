"""What is left: connected chains of pointwise ops, reductions (pooling too), look-ups, copies to a layout."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.conv import is_batch_norm
from autokernel.regions.match import Free, Match

_CHAIN = ops.POINTWISE | ops.REDUCTIONS | ops.MOVEMENT | ops.GATHERS


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    def allowed(node: fx.Node) -> bool:
        return (
            free(node)
            and node not in static
            and node.op in ("call_function", "call_method")
            and (op_name(node) in _CHAIN or is_batch_norm(node))
        )

    behind = _ancestors(graph.nodes)
    group_of: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if not allowed(node):
            continue
        mine: set[fx.Node] = {node}
        for arg in node.all_input_nodes:
            theirs = group_of.get(arg)
            if theirs is not None and theirs is not mine and _convex(mine | theirs, behind):
                mine |= theirs
        for member in mine:
            group_of[member] = mine
    seen: set[int] = set()
    for group in group_of.values():
        if id(group) in seen:
            continue
        seen.add(id(group))
        work = [n for n in group if not ops.is_view(n)]
        if work:
            reduces = any(op_name(n) in ops.REDUCTIONS for n in work)
            yield Match("reduction" if reduces else "pointwise", group)


def _ancestors(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """Node -> the nodes that it needs, itself included, as bits by position."""
    behind: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        behind[node] = 1 << i
        for arg in node.all_input_nodes:
            behind[node] |= behind[arg]
    return behind


def _convex(group: set[fx.Node], behind: dict[fx.Node, int]) -> bool:
    """Whether no path leaves the group and comes back, as a residual's may: then it could not be one step."""
    bits = 0
    for node in group:
        bits |= behind[node] & -(1 << (behind[node].bit_length() - 1))
    return not any(behind[arg] & bits for node in group for arg in node.all_input_nodes if arg not in group)
