"""Boolean masks that are combined with one that lets everything through.

A library that can't look at a mask's values while it is traced builds ``ones & (q >= 0) & padding`` where
``padding`` alone says the same: a tensor of (batch, 1, rows, columns) in place of one row per batch, written
once and read by every attention layer.  Where one side of the ``and`` comes from literals alone, its values
are computed here; if all are true, the other side takes its place.  And attention broadcasts its mask by
itself, so that nobody needs to expand it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autokernel.capture.nodes import (
    fake_value,
    is_opaque,
    is_tensor,
    op_name,
    record_value,
    written_storages,
)

LIMIT = 1 << 24
"""Elements of a mask whose values are looked at."""

_ATTENTION = "scaled_dot_product_attention"
_FOLLOWED = frozenset({"expand", "and_", "logical_and"})
"""What may lie between the mask and attention: ops that broadcast."""
_FROM_LITERALS = frozenset({
    "arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "add", "sub", "getitem",
    "unsqueeze", "expand",
    "to", "ge", "gt", "le", "lt", "eq", "ne", "and_", "or_", "invert", "logical_and", "logical_or",
})  # fmt: skip


def drop_true_masks(graph: fx.Graph) -> int:
    """Edit ``graph`` in place; how many nodes were changed.

    Only what attention alone reads is touched: everywhere else a mask of another shape could be noticed.
    """
    return _and_true(graph) + sum(_unexpanded(node) for node in list(graph.nodes))


def _unexpanded(node: fx.Node) -> bool:
    """Let a call of attention read its mask before the mask was expanded."""
    if op_name(node) != _ATTENTION or is_opaque(node):
        return False
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node) or op_name(mask) not in ("expand", "expand_as"):
        return False
    source = mask.args[0]
    if not isinstance(source, fx.Node) or not is_tensor(source) or fake_value(source).dim() != 4:
        return False
    node.replace_input_with(mask, source)
    if not mask.users:
        node.graph.erase_node(mask)
    return True


def _and_true(graph: fx.Graph) -> int:
    found = [n for n in graph.nodes if op_name(n) in ("and_", "logical_and") and _is_mask(n)]
    if not found:
        return 0
    literal = _literal_nodes(graph)
    written = written_storages(graph.nodes)
    gone = 0
    for node in found:
        sides = [a for a in node.args if isinstance(a, fx.Node)]
        known = [a for a in sides if a in literal]
        other = [a for a in sides if a not in literal]
        if len(known) != 1 or len(other) != 1 or written or not _for_attention_only(node):
            continue
        mask = fake_value(other[0])
        if mask.dtype != torch.bool or mask.dim() != fake_value(node).dim() or not _all_true(known[0]):
            continue
        users = list(node.users)
        node.replace_all_uses_with(other[0])
        graph.erase_node(node)
        for user in users:
            _record(user)
        gone += 1
    return gone


def _is_mask(node: fx.Node) -> bool:
    value = fake_value(node)
    if not is_tensor(node) or value.dtype != torch.bool or is_opaque(node) or len(node.args) != 2:
        return False
    return all(isinstance(s, int) for s in value.shape) and value.numel() <= LIMIT


def _literal_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on numbers written in the graph alone, by ops that are known to be pure."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        pure = node.op in ("call_function", "call_method") and op_name(node) in _FROM_LITERALS
        if pure and all(a in found for a in node.all_input_nodes) and is_tensor(node):
            found.add(node)
    return found


def _for_attention_only(node: fx.Node) -> bool:
    for user in node.users:
        if op_name(user) == _ATTENTION:
            continue
        if op_name(user) not in _FOLLOWED or not _for_attention_only(user):
            return False
    return bool(node.users)


def _all_true(node: fx.Node) -> bool:
    try:
        value = _value(node, {})
    except (RuntimeError, TypeError, ValueError, IndexError):  # an op in a form that is not known here
        return False
    return isinstance(value, Tensor) and bool(value.all())


def _value(node: fx.Node, cache: dict[fx.Node, Any]) -> Any:
    """The real value of a node from literals, made on the CPU."""
    if node not in cache:
        for arg in node.all_input_nodes:
            _value(arg, cache)
        given = fx.map_arg((node.args, node.kwargs), cache.__getitem__)
        args, kwargs = tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, given)
        call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        cache[node] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)  # type: ignore[operator]
    return cache[node]


def _record(node: fx.Node) -> None:
    """Say anew what value ``node`` has, and what is computed from it up to attention."""
    if op_name(node) not in _FOLLOWED:
        return
    record_value(node)
    for user in node.users:
        _record(user)
