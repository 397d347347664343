"""Norms: calls of layer, RMS, group or instance norm, or a row norm by hand; with a residual add in front."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match

_CALLS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm"})
_STATISTIC = frozenset({"mean", "var", "sum"})
_INSIDE = frozenset({
    "add", "sub", "mul", "div", "pow", "square", "mean", "var", "sum", "sqrt", "rsqrt", "clamp", "reciprocal",
}) | ops.CASTS  # fmt: skip


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if (
            not free(node)
            or node in static
            or node in taken
            or node.op not in ("call_function", "call_method")
        ):
            continue
        if op_name(node) in _CALLS:
            nodes: set[fx.Node] | None = {node}
        elif op_name(node) in ("rsqrt", "sqrt") or (
            op_name(node) == "pow" and node.args[1:] in ((0.5,), (-0.5,))
        ):
            nodes = _by_hand(node, static, free)
        else:
            continue
        if nodes is None:
            continue
        _take_residual(nodes, static, free)
        taken |= nodes
        yield Match("norm", nodes)


def _by_hand(root: fx.Node, static: set[fx.Node], free: Free) -> set[fx.Node] | None:
    """Statistics of one tensor, ending in a root, and what scales that tensor by them."""
    nodes = {root}
    source = _collect_statistics(root, nodes, static, free)
    if source is None:
        return None
    row = ops.shape(source)
    # Forwards: everything of the row's shape that is made from the source and the statistics alone.
    inside = {*nodes, source}

    def allowed(n: fx.Node) -> bool:
        return free(n) and op_name(n) in _INSIDE and ops.shape(n) in (row, ops.shape(root))

    grew = True
    while grew:
        grew = False
        for node in list(inside):
            for user in node.users:
                if user in inside or user.op not in ("call_function", "call_method") or not allowed(user):
                    continue
                args = user.all_input_nodes
                made_here = any(a in inside and a is not source for a in args)
                casts_source = op_name(user) == "type_as" and source in args
                if all(a in inside or a in static or casts_source for a in args) and (
                    made_here or _leads_into(user, inside)
                ):
                    inside.add(user)
                    grew = True
    nodes = inside - {source}
    # A tail cast such as ``h.type_as(x)`` reads the tensor before its own up-cast.
    _absorb_tail(nodes, static, free)
    if not any(ops.shape(n) == row and n is not source for n in nodes):
        return None
    ops.absorb_producers(nodes, lambda n: free(n) and op_name(n) in ops.CASTS, static)
    if source.op in ("call_function", "call_method") and free(source) and op_name(source) in ops.CASTS:
        readers_inside = all(u in nodes for u in source.users)
        if readers_inside:
            nodes.add(source)
            _absorb_tail(nodes, static, free)
    return nodes


def _leads_into(user: fx.Node, inside: set[fx.Node]) -> bool:
    return any(u in inside for u in user.users)


def _absorb_tail(nodes: set[fx.Node], static: set[fx.Node], free: Free) -> None:
    """Casts back to the input's dtype, then the learned scale and shift."""
    outside = {a for n in nodes for a in n.all_input_nodes if a not in nodes}
    grew = True
    while grew:
        grew = False
        for node in list(nodes):
            if len(node.users) != 1:
                continue
            user = next(iter(node.users))
            if user in nodes or not free(user) or user.op not in ("call_function", "call_method"):
                continue
            name = op_name(user)
            others = [a for a in user.all_input_nodes if a is not node]
            reads_known = all(
                a in static or a in nodes or (name == "type_as" and a in outside) for a in others
            )
            if (name in ops.CASTS or name in ("mul", "add")) and reads_known:
                nodes.add(user)
                grew = True


def _collect_statistics(
    root: fx.Node, nodes: set[fx.Node], static: set[fx.Node], free: Free
) -> fx.Node | None:
    """Walk back from the root to the tensor whose rows are measured; None if it is no row statistic."""
    work = list(root.all_input_nodes)
    statistic = None
    for _ in range(4):
        if len(work) != 1:
            return None
        node = work[0]
        if node in static or not free(node) or op_name(node) not in _INSIDE:
            return None
        nodes.add(node)
        work = [a for a in dict.fromkeys(node.all_input_nodes) if a not in static]
        if op_name(node) in _STATISTIC:
            statistic = node
            break
    if statistic is None or len(work) != 1 or ops.shape(statistic)[-1:] not in ((1,), ()):
        return None
    source = work[0]
    if op_name(source) in ("pow", "square", "mul") and free(source):
        args = [a for a in dict.fromkeys(source.all_input_nodes) if a not in static]
        if len(args) == 1:
            nodes.add(source)
            source = args[0]
    if op_name(source) == "sub" and free(source):  # x - mean(x), by hand
        base, mean = (*source.all_input_nodes, None)[:2]
        if base is not None and mean is not None and op_name(mean) == "mean" and base in mean.all_input_nodes:
            nodes.update({source, mean})
            source = base
    if ops.shape(source)[:-1] != ops.shape(statistic)[: len(ops.shape(source)) - 1]:
        return None
    return source


def _take_residual(nodes: set[fx.Node], static: set[fx.Node], free: Free) -> None:
    """``x = x + y`` right in front of the norm; x stays an output for whoever else reads it."""
    edges = {a for n in nodes for a in n.all_input_nodes if a not in nodes and a not in static}
    if len(edges) != 1:
        return
    (add,) = edges
    if (
        not free(add)
        or add in static
        or op_name(add) != "add"
        or add.op not in ("call_function", "call_method")
    ):
        return
    args = add.all_input_nodes
    if len(args) == 2 and not any(a in static for a in args) and ops.shape(args[0]) == ops.shape(args[1]):
        nodes.add(add)
