"""Rotary position embedding, as a complex product or as ``x * cos + rotate_half(x) * sin``.

Queries and keys that are turned by the same angles form one horizontal region.  Where only a part of each
head is turned, the other part is put behind it in the region too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match

_COMPLEX_TAIL = frozenset({"view_as_real", "flatten", "reshape", "view"}) | ops.CASTS


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    groups: dict[Hashable, set[fx.Node]] = {}
    for node in graph.nodes:
        if not free(node) or node in static or node.op not in ("call_function", "call_method"):
            continue
        if op_name(node) == "view_as_complex":
            found = _complex(node, static, free)
        elif op_name(node) == "cat":
            found = _rotate_half(node, free)
        else:
            continue
        if found:
            angles, nodes = found
            groups.setdefault(angles, set()).update(nodes)
    for nodes in groups.values():
        _take_unturned(nodes, free)
        ops.absorb_producers(
            nodes, lambda n: free(n) and (ops.is_movement(n) or op_name(n) in ops.CASTS), static
        )
        yield Match("rope", nodes)


def _take_unturned(nodes: set[fx.Node], free: Free) -> None:
    """``cat((turned, x[..., rotary_dim:]), -1)``: the part of each head that is not turned, put behind."""
    for node in list(nodes):
        users = list(node.users)
        if len(users) != 1 or op_name(users[0]) != "cat" or not free(users[0]):
            continue
        rest = [a for a in users[0].all_input_nodes if a not in nodes]
        if all(op_name(r) == "getitem" and free(r) and len(r.users) == 1 for r in rest):
            nodes.update({users[0], *rest})


def _complex(node: fx.Node, static: set[fx.Node], free: Free) -> tuple[Hashable, set[fx.Node]] | None:
    if len(node.users) != 1:
        return None
    product = next(iter(node.users))
    if op_name(product) != "mul" or not free(product):
        return None
    angles = [a for a in product.all_input_nodes if a is not node]
    if len(angles) != 1:
        return None
    nodes = {node, product}
    tail = product
    while len(tail.users) == 1:
        user = next(iter(tail.users))
        if not free(user) or op_name(user) not in _COMPLEX_TAIL:
            break
        nodes.add(user)
        tail = user
        if op_name(user) in ops.CASTS:
            break
    if not any(op_name(n) == "view_as_real" for n in nodes):
        return None
    return ("complex", _layer(node), angles[0]), nodes


def _rotate_half(cat: fx.Node, free: Free) -> tuple[Hashable, set[fx.Node]] | None:
    """``cat`` must be ``cat((-x[..., h:], x[..., :h]), -1)``, multiplied by sin and added to ``x * cos``."""
    parts = cat.args[0] if cat.args else None
    if not isinstance(parts, list | tuple) or len(parts) != 2 or len(cat.users) != 1:
        return None
    negated, first = parts
    if not isinstance(negated, fx.Node) or not isinstance(first, fx.Node) or op_name(negated) != "neg":
        return None
    second = negated.all_input_nodes[0]
    if op_name(first) != "getitem" or op_name(second) != "getitem" or first.args[0] is not second.args[0]:
        return None
    x = first.args[0]
    by_sin = next(iter(cat.users))
    if op_name(by_sin) != "mul" or len(by_sin.users) != 1:
        return None
    total = next(iter(by_sin.users))
    if op_name(total) != "add":
        return None
    by_cos = next((a for a in total.all_input_nodes if a is not by_sin), None)
    if (
        by_cos is None
        or op_name(by_cos) != "mul"
        or x not in by_cos.all_input_nodes
        or len(by_cos.users) != 1
    ):
        return None
    nodes = {cat, negated, first, second, by_sin, by_cos, total}
    if not all(free(n) for n in nodes):
        return None
    sin = next((a for a in by_sin.all_input_nodes if a is not cat), None)
    return ("half", _layer(cat), sin), nodes


def _layer(node: fx.Node) -> Hashable:
    """Which module call a node belongs to: equal angles in two layers are still two regions."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(stack)
