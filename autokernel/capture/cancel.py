"""Drop from a captured graph the casts and layout changes that change nothing.

Two rules, each exact for every dtype and layout:

- A view that has the storage, offset, shape, strides and dtype of the tensor that a chain of views began
  with *is* that tensor: ``x.contiguous()`` of what is contiguous, ``x.to(x.dtype)``, two transposes, an
  ``expand`` or a ``reshape`` to the shape that is there.
- A value that was widened and narrowed again is what it was: ``float16 -> float32 -> float16``.  The other
  way round it is not.

What the graph returns keeps its own memory, and so does whatever is written in place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autokernel.capture.nodes import (
    fake_value,
    is_opaque,
    is_tensor,
    op_name,
    storages,
    symbolic,
    written_storages,
)

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type_as"})
_VIEWS = CASTS | frozenset({
    "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous", "expand", "expand_as",
    "transpose", "permute", "movedim", "t", "squeeze", "unsqueeze", "getitem", "narrow",
})  # fmt: skip
_SELF = CASTS | {"contiguous"}
"""Ops that hand out their very input where they have nothing to do; the others make a new view of it."""

_WIDER: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.bool: frozenset({
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64,
    }),
    torch.int32: frozenset({torch.int64, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
}  # fmt: skip
"""dtype -> the dtypes that hold every one of its values."""


def cancel(graph: fx.Graph) -> int:
    """Edit ``graph`` in place; how many nodes went away."""
    if any(symbolic(n) for n in graph.nodes):
        return 0
    written = written_storages(graph.nodes)
    returned = {n for n in graph.nodes if n.op == "output" for n in n.all_input_nodes}
    gone = 0
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or not is_tensor(node) or is_opaque(node):
            continue
        source = _same_tensor(node, returned)
        if source is None and _may_share(graph, node, written, returned):
            source = _round_trip(node)
            if source is not None:
                _share(graph, node, source)
        if source is None:
            continue
        if node in returned:
            returned.add(source)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        gone += 1
    return gone + (_unread(graph) if gone else 0)


def _source(node: fx.Node, ops: frozenset[str]) -> fx.Node | None:
    """What a view is taken of; None for another op."""
    if op_name(node) not in ops or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0] if is_tensor(node.args[0]) else None


def _same_tensor(node: fx.Node, returned: set[fx.Node]) -> fx.Node | None:
    """The tensor that ``node`` is a view of and equal to in all there is to a tensor."""
    if node in returned and op_name(node) not in _SELF:
        return None  # the caller gets a tensor object of its own
    found, current = None, _source(node, _VIEWS)
    while current is not None:
        if _geometry(current) == _geometry(node) and storages(current) == storages(node):
            found = current
        if not storages(current) & storages(node) or node in returned:
            break
        current = _source(current, _VIEWS)
    return found


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    value = fake_value(node)
    where = (value.dtype, value.device, value.shape, value.stride(), value.storage_offset())
    return (*where, value.is_conj(), value.is_neg())


def _round_trip(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` has the values and the layout of, a detour through a wider dtype away."""
    wide = _source(node, CASTS)
    narrow = _source(wide, CASTS) if wide is not None else None
    if wide is None or narrow is None:
        return None
    old, between, new = (fake_value(n) for n in (narrow, wide, node))
    same = (old.dtype, old.device, old.shape, old.stride()) == (
        new.dtype, new.device, new.shape, new.stride(),
    )  # fmt: skip
    return narrow if same and between.dtype in _WIDER.get(old.dtype, frozenset()) else None


def _may_share(graph: fx.Graph, node: fx.Node, written: set[int], returned: set[fx.Node]) -> bool:
    """Whether nobody could tell that ``node`` has no memory of its own."""
    wide = _source(node, CASTS)
    narrow = _source(wide, CASTS) if wide is not None else None
    if narrow is None or (storages(node) | storages(narrow)) & written:
        return False
    return not any(storages(n) & storages(node) for n in returned)


def _share(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Give the views of ``node`` the storage of ``source`` in what is recorded of them."""
    old, new = fake_value(node), fake_value(source)
    for view in graph.nodes:
        if view is not node and storages(view) & storages(node):
            view.meta["example_value"] = tree_map(partial(moved, old=old, fresh=new), fake_value(view))


def moved(value: Any, old: Tensor, fresh: Tensor) -> Any:
    """A view of ``old`` as a view of ``fresh``, as fake tensors are."""
    if not isinstance(value, Tensor):
        return value
    offset = value.storage_offset() - old.storage_offset() + fresh.storage_offset()
    mode = getattr(fresh, "fake_mode", None)
    if mode is None:
        return fresh.as_strided(value.shape, value.stride(), offset)
    with mode:
        return fresh.as_strided(value.shape, value.stride(), offset)


def _unread(graph: fx.Graph) -> int:
    """Erase the views and casts that nothing reads any more."""
    gone = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "call_method") and op_name(node) in _VIEWS and not node.users:
            graph.erase_node(node)
            gone += 1
    return gone
