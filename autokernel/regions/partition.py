"""Cut a graph into regions.  The same function serves extraction and reinsertion.

A region is accepted only if it can be run as one step: every edge is one plain tensor, and the graph in
which each accepted region is a single node stays free of cycles.  Memory that the graph writes in place is
read by a region only behind the last write to it, is never written by one, and never handed out by one as a
view: then what the region reads is the same wherever it runs behind that write.  (Memory is told apart by
storage, as it was in the captured call.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import (
    fake_value,
    is_opaque,
    is_tensor,
    op_name,
    storages,
    writes,
    written_storages,
)
from autokernel.regions import FAMILIES
from autokernel.regions.match import Match
from autokernel.regions.ops import is_view, topological
from autokernel.regions.region import Region


@dataclass(eq=False)
class Partition:
    """``regions`` in graph order; ``leftover`` are the compute nodes in none of them."""

    graph: Graph
    regions: list[Region]
    leftover: list[fx.Node]

    def by_fingerprint(self) -> dict[str, list[Region]]:
        groups: dict[str, list[Region]] = defaultdict(list)
        for region in self.regions:
            groups[region.fingerprint].append(region)
        return dict(groups)

    def coverage(self) -> tuple[int, int]:
        """How many of the ops lie in regions, and how many there are.

        An op is a node that computes or writes tensors when the model is called: no view, and nothing that
        depends on the model's own tensors alone.
        """
        inside = sum(_is_op(n) for region in self.regions for n in region.nodes)
        return inside, inside + sum(_is_op(n) for n in self.leftover)


def _is_op(node: fx.Node) -> bool:
    return (bool(storages(node)) or bool(writes(node))) and not is_view(node)


def partition(graph: Graph) -> Partition:
    """Find the regions of ``graph``; a graph with symbolic shapes has none."""
    nodes = graph.nodes
    compute = [n for n in nodes if n.op in ("call_function", "call_method")]
    if graph.dynamic:
        return Partition(graph, [], compute)
    static = graph.static_nodes()
    written = written_storages(nodes)
    opaque = {n for n in nodes if is_opaque(n)}
    blocked = {n for n in compute if n in opaque or not opaque.isdisjoint(n.all_input_nodes)}
    blocked |= touching_before_the_last_write(nodes)
    outside = _held_twice(graph)
    owner: dict[fx.Node, int] = {}
    accepted: dict[int, Region] = {}

    def free(node: fx.Node) -> bool:
        return node not in owner and node not in blocked and node.op in ("call_function", "call_method")

    for family in FAMILIES.values():
        for match in list(family.find(graph, static, free)):
            region = _region(graph, match, static, free, outside)
            if region is None or any(i in opaque for i in region.inputs):
                continue
            if written and any(storages(o) & written for o in region.outputs):
                continue
            number = len(accepted)
            for node in region.nodes:
                owner[node] = number
            if grouped_order(nodes, owner) is None:
                for node in region.nodes:
                    del owner[node]
                continue
            accepted[number] = region
    position = {n: i for i, n in enumerate(nodes)}
    regions = sorted(accepted.values(), key=lambda r: position[r.nodes[0]])
    leftover = [n for n in compute if n not in owner and n not in static]
    return Partition(graph, regions, leftover)


def touching_before_the_last_write(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that write memory, and those that read or hand out memory which is written after them."""
    nodes = list(nodes)
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for target in writes(node):
            last.update(dict.fromkeys(storages(target), i))
    if not last:
        return set()
    touched = ({s for n in (node, *node.all_input_nodes) for s in storages(n)} for node in nodes)
    return {
        n
        for i, (n, own) in enumerate(zip(nodes, touched, strict=True))
        if any(last.get(s, -1) >= i for s in own)
    }


def _region(
    graph: Graph, match: Match, static: set[fx.Node], free: Callable[[fx.Node], bool], outside: set[int]
) -> Region | None:
    if not match.nodes or not all(free(n) for n in match.nodes):
        return None
    chosen = _trimmed(match.nodes)
    if all(is_view(n) for n in chosen):
        return None
    roots = frozenset(
        r for c in match.constants for r in static_roots(c, graph) if graph.roles[r] != "parameter"
    )
    region = Region(graph, match.family, topological(graph.nodes, chosen), static, roots)
    if not region.well_formed or not region.activations or _ties(region) & outside:
        return None
    return region


def _held_twice(graph: Graph) -> set[int]:
    """Storages that the caller reaches through several tensors: all show what is written through one."""
    ends = [n for n in graph.nodes if n.op == "placeholder"]
    ends += dict.fromkeys(arg for n in graph.nodes if n.op == "output" for arg in n.all_input_nodes)
    count = Counter(storage for node in dict.fromkeys(ends) for storage in storages(node))
    return {storage for storage, nodes in count.items() if nodes > 1}


def _ties(region: Region) -> set[int]:
    """Storages that two outputs share, or an output and an input; a kernel returns memory of its own."""
    count = Counter(storage for node in region.outputs for storage in storages(node))
    before = {storage for node in region.inputs for storage in storages(node)}
    return {storage for storage, nodes in count.items() if nodes > 1 or storage in before}


def _trimmed(nodes: set[fx.Node]) -> set[fx.Node]:
    """``nodes`` less what a kernel can't hand over: tuples, and views whose elements share memory.

    Where queries, keys and values are parts of one tensor (``chunk``, ``unbind``), other regions may want
    some of the parts, and the split stays outside.  Of an expanded result a kernel returns what was expanded.
    """
    chosen = set(nodes)
    while True:
        drop = {
            n
            for n in chosen
            if ((not is_tensor(n) or _overlapping(n)) and any(u not in chosen for u in n.users))
            or any(a not in chosen and not is_tensor(a) for a in n.all_input_nodes)
        }
        if not drop:
            return chosen
        chosen -= drop


def _overlapping(node: fx.Node) -> bool:
    value = fake_value(node)
    if value.layout != torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def static_roots(node: fx.Node, graph: Graph) -> set[fx.Node]:
    """The placeholders and baked-in tensors that a static node is computed from."""
    if node in graph.roles:
        return {node}
    found: set[fx.Node] = set()
    for arg in node.all_input_nodes:
        found |= static_roots(arg, graph)
    return found


def grouped_order(nodes: Iterable[fx.Node], owner: dict[fx.Node, int]) -> list[fx.Node | int] | None:
    """Topological order of the graph with every group collapsed to its number; None if that has a cycle.

    Ties keep the original order, so that side effects stay where they were.
    """
    nodes = list(nodes)
    units: dict[fx.Node | int, list[fx.Node]] = {}
    for node in nodes:
        units.setdefault(owner.get(node, node), []).append(node)
    position = {unit: i for i, unit in enumerate(units)}
    first = _order_of_effects(nodes)
    waiting: dict[fx.Node | int, int] = {}
    users: dict[fx.Node | int, list[fx.Node | int]] = defaultdict(list)
    for unit, members in units.items():
        before = [a for m in members for a in (*m.all_input_nodes, *first.get(m, ()))]
        needs = {owner.get(a, a) for a in before} - {unit}
        waiting[unit] = len(needs)
        for need in needs:
            users[need].append(unit)
    import heapq

    ready = [(position[u], u) for u, count in waiting.items() if count == 0]
    heap = [(p, i) for i, (p, _) in enumerate(ready)]
    pool = [u for _, u in ready]
    heapq.heapify(heap)
    order: list[fx.Node | int] = []
    while heap:
        _, slot = heapq.heappop(heap)
        unit = pool[slot]
        order.append(unit)
        for user in users[unit]:
            waiting[user] -= 1
            if waiting[user] == 0:
                pool.append(user)
                heapq.heappush(heap, (position[user], len(pool) - 1))
    return order if len(order) == len(units) else None


BARRIERS = frozenset({
    "_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode",
    "set_autocast_enabled", "_vmap_increment_nesting", "_vmap_decrement_nesting", "_jvp_increment_nesting",
    "_jvp_decrement_nesting", "_grad_increment_nesting", "_grad_decrement_nesting",
})  # fmt: skip
"""What changes how the ops behind it run."""


def _order_of_effects(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node -> nodes that it must come after, though it reads nothing of theirs.

    Of memory that the graph writes, a read stays behind the writes before it and a write behind the reads and
    writes before it.  Nothing moves past a barrier.
    """
    written = written_storages(nodes)
    after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    last_write: dict[int, fx.Node] = {}
    reads: dict[int, list[fx.Node]] = defaultdict(list)
    barrier: fx.Node | None = None
    since: list[fx.Node] = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        written_here = {s for target in writes(node) for s in storages(target)}
        touched = (
            {s for n in (node, *node.all_input_nodes) for s in storages(n)} & written if written else set()
        )
        for memory in touched:
            if memory in last_write:
                after[node].append(last_write[memory])
            if memory in written_here:
                after[node] += reads.pop(memory, [])
                last_write[memory] = node
            else:
                reads[memory].append(node)
        if barrier is not None:
            after[node].append(barrier)
        since.append(node)
        if node.op == "call_function" and op_name(node) in BARRIERS:
            after[node] += since[:-1]
            barrier, since = node, []
    return after
