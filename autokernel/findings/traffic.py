"""Findings about memory traffic: copies, casts, work that no input changes, and ops that could be one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.findings.evidence import Evidence, is_view, module_path, nbytes, size, source_of, tensor
from autokernel.profile_records import Finding
from autokernel.regions.ops import CASTS, MATMULS, MOVEMENT, POINTWISE, REDUCTIONS

_COPIES = frozenset({"contiguous", "clone"})
_ANY_STRIDES = (
    POINTWISE | MATMULS | frozenset({"scaled_dot_product_attention", "sum", "mean", "amax", "softmax"})
)
_RESTRIDES = frozenset({"transpose", "permute", "getitem", "expand", "unsqueeze", "narrow", "select", "t"})
_FUSIBLE = POINTWISE | REDUCTIONS
_WORTH = 1.5
"""A chain is worth saying when fusing it moves this many times fewer bytes."""


def copies(evidence: Evidence) -> Iterator[Finding]:
    """Copies whose readers would take the original, and key/value heads written out several times."""
    for graph, node in evidence.calls():
        name = op_name(node)
        if is_view(node) or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        repeated = _repeats_heads(node)
        if repeated and any(_is_attention_operand(u) for u in node.users):
            yield evidence.finding(
                "copy",
                f"{name}() writes the key and value heads out {repeated} times for grouped queries",
                [node],
                "scaled_dot_product_attention(..., enable_gqa=True) reads them in place",
                graph=graph,
                up_to=True,
            )
        elif name in _COPIES and tensor(source) is not None and _readers_take_any_strides(node):
            readers = ", ".join(dict.fromkeys(op_name(u) for u in _readers(node)))
            yield evidence.finding(
                "copy",
                f"{name}() copies a tensor that only {readers} reads, which takes it as it lies",
                [node],
                f"leave {name}() out; torch.compile and autokernel's fused kernels do",
                graph=graph,
            )


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads the value, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if op_name(user) in _RESTRIDES else [user]
    return found


def _readers_take_any_strides(node: fx.Node) -> bool:
    readers = _readers(node)
    return bool(readers) and all(op_name(r) in _ANY_STRIDES for r in readers)


def _repeats_heads(node: fx.Node) -> int | None:
    """How many times over a node copies its input along one dimension."""
    name = op_name(node)
    source = node.all_input_nodes[0]
    value, result = tensor(source), tensor(node)
    if value is None or result is None:
        return None
    if name == "repeat_interleave" and value.numel():
        times = result.numel() // value.numel()
    elif name in ("reshape", "contiguous", "clone", "flatten") and op_name(source) in ("expand", "expand_as"):
        laid = nbytes(source)
        times = round(nbytes(node) / laid) if laid else 1
    else:
        return None
    return times if times > 1 and result.dim() >= 3 else None


def _is_attention_operand(user: fx.Node) -> bool:
    """Whether the value goes into attention, or into the products of one that is written out."""
    if op_name(user) in ("scaled_dot_product_attention", "matmul", "bmm"):
        return True
    return op_name(user) in MOVEMENT and any(_is_attention_operand(u) for u in user.users)


def casts(evidence: Evidence) -> Iterator[Finding]:
    """Parameters cast at each call, casts there and back, and the same cast done twice."""
    earlier: dict[tuple[fx.Node, str], fx.Node] = {}
    for graph, node in evidence.calls():
        if op_name(node) not in CASTS or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        before, after = tensor(source), tensor(node)
        if before is None or after is None or before.dtype == after.dtype:
            continue
        old, new = (str(t.dtype).removeprefix("torch.") for t in (before, after))
        first = earlier.setdefault((source, new), node)
        start = _uncast_source(source)
        if graph.roles.get(source) in ("parameter", "buffer"):
            role = graph.roles[source]
            yield evidence.finding(
                "cast",
                f"a {role} is cast from {old} to {new} at each call",
                [node],
                f"keep it in {new}: cast the model once, before it runs",
                graph=graph,
            )
        elif first is not node:
            yield evidence.finding(
                "cast",
                f"the same tensor is cast from {old} to {new} once more",
                [node],
                "cast it once and use the result twice",
                graph=graph,
            )
        elif (
            start is not None
            and (was := tensor(start.all_input_nodes[0])) is not None
            and was.dtype == after.dtype
        ):
            yield evidence.finding(
                "cast",
                f"{new} goes to {old} and back with nothing computed in between",
                [start, node] if len(start.users) == 1 else [node],
                "leave both casts out",
                graph=graph,
                at=node,
            )


def _uncast_source(node: fx.Node) -> fx.Node | None:
    """The cast that ``node`` is the result of, through ops that only move."""
    while op_name(node) in MOVEMENT and node.all_input_nodes:
        node = node.all_input_nodes[0]
    is_cast = node.op in ("call_function", "call_method") and op_name(node) in CASTS and node.all_input_nodes
    return node if is_cast else None


def static_work(evidence: Evidence) -> Iterator[Finding]:
    """Masks, positions and other values that no input changes, computed anew at each call."""
    files: dict[tuple[Graph, str], list[fx.Node]] = defaultdict(list)
    for graph, node in evidence.calls():
        cast = op_name(node) in CASTS and any(graph.roles.get(a) for a in node.all_input_nodes)
        if node in evidence.static[graph] and not is_view(node) and not cast:
            files[graph, source_of(node).rpartition(":")[0]].append(node)
    for (graph, _), nodes in files.items():
        nodes.sort(key=lambda n: evidence.us([n]), reverse=True)  # where most of it is comes first
        one = evidence.finding(
            "static work",
            f"{_listed(nodes)} depend on no input, and are computed anew at each call",
            nodes,
            "compute them once and keep the result as a buffer",
            graph=graph,
        )
        one.count = len(nodes) * graph.calls
        one.modules = list(dict.fromkeys(path for n in nodes if (path := module_path(n))))
        yield one


def chains(evidence: Evidence) -> Iterator[Finding]:
    """Pointwise and reduction ops of one region that write to memory what only the next one reads."""
    for part in evidence.partitions:
        for region in part.regions:
            static = evidence.static[part.graph]
            fusible = [
                n for n in region.nodes if op_name(n) in _FUSIBLE and n not in static and not is_view(n)
            ]
            if len(fusible) < 2:
                continue
            apart, fused = _bytes(region.nodes, fusible)
            if not fused or apart < _WORTH * fused:
                continue
            measured = evidence.us(fusible)
            yield evidence.finding(
                "unfused ops",
                f"{len(fusible)} ops ({_listed(fusible)}) run one by one and move {size(apart)}, where one "
                f"kernel would move {size(fused)}",
                fusible,
                f"torch.compile fuses them, and autokernel writes a kernel for the {region.family} region",
                graph=part.graph,
                time_us=measured * (1.0 - fused / apart),
                up_to=True,
            )


def _listed(nodes: Sequence[fx.Node]) -> str:
    names = list(dict.fromkeys(op_name(n) for n in nodes))
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _bytes(nodes: Sequence[fx.Node], fusible: Sequence[fx.Node]) -> tuple[float, float]:
    """Bytes that ``fusible`` move one by one, and as one kernel that reads each input and writes each result
    once."""
    apart = sum(nbytes(n) + sum(nbytes(a) for a in n.all_input_nodes) for n in fusible)
    inside = set(fusible) | {n for n in nodes if is_view(n)}

    def outer(node: fx.Node) -> fx.Node:
        """Through views, what really lies in memory."""
        while node in inside and is_view(node):
            node = node.all_input_nodes[0]
        return node

    reads = {b for n in fusible for a in n.all_input_nodes if (b := outer(a)) not in inside}
    writes = {n for n in fusible if _read_outside(n, inside)}
    return apart, sum(map(nbytes, reads)) + sum(map(nbytes, writes))


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(u not in inside or (is_view(u) and _read_outside(u, inside)) for u in node.users)
