"""Recognise attention in a torch-level graph: written out by hand, or one call of SDPA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .lower import example
from .pyprint import op_name
from .subgraph import inputs_of

_PASS = {"type_as", "to", "half", "bfloat16", "float", "dropout", "contiguous"}


@dataclass
class Match:
    """``output = softmax(scores) @ v``; ``modifier`` are the nodes between the q @ k^T product and the softmax."""

    nodes: list[fx.Node]
    product: fx.Node | None
    modifier: list[fx.Node]
    scores: fx.Node | None
    q: fx.Node
    k: fx.Node
    k_transposed: bool
    v: fx.Node
    output: fx.Node
    scale: float = 1.0
    causal: bool = False
    mask: fx.Node | None = None
    grouped: bool = False
    safe: bool = False
    shape: tuple[int, ...] = field(default=())


def _is_matmul(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op.startswith("call")
        and op_name(node) in ("matmul", "bmm")
        and len(node.args) == 2
    )


def match(node: fx.Node, keep: Sequence[fx.Node], absorb: bool = False) -> Match | None:
    """The attention that ``node`` is the last op of, or None.

    With ``absorb``, what only serves to prepare a mask is computed inside the kernel as well.
    """
    if not node.op.startswith("call") or not isinstance(example(node), torch.Tensor):
        return None
    if op_name(node) == "scaled_dot_product_attention":
        return _match_sdpa(node)
    if not _is_matmul(node):
        return None
    weights, v = node.args
    if not isinstance(weights, fx.Node) or not isinstance(v, fx.Node):
        return None
    after = [node]
    while op_name(weights) in _PASS and isinstance(weights.args[0], fx.Node):
        if op_name(weights) == "dropout" and _argument(weights, 2, "training", True):
            return None
        after.append(weights)
        weights = weights.args[0]
    if op_name(weights) != "softmax" or not _last_dim(weights):
        return None
    after.append(weights)
    scores = weights.args[0]
    if not isinstance(scores, fx.Node):
        return None
    modifier: set[fx.Node] = set()
    product = None
    stack = [scores]
    while stack:
        current = stack.pop()
        if _is_matmul(current):
            if product not in (None, current):
                return None
            product = current
            continue
        if not current.op.startswith("call") or not _reaches_matmul(current):
            continue
        modifier.add(current)
        stack += current.all_input_nodes
    if product is None:
        return None
    while absorb:
        more = [n for n in inputs_of(list(modifier)) if n.op.startswith("call") and n is not product]
        more = [
            n
            for n in more
            if all(u in modifier for u in n.users) and n not in keep and op_name(n) != "linear"
        ]
        if not more:
            break
        modifier |= set(more)
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    middle = sorted(modifier, key=order.__getitem__)
    nodes = sorted({product, *middle, *after}, key=order.__getitem__)
    inside = set(nodes)
    if any(u not in inside for n in nodes[:-1] for u in n.users) or any(n in keep for n in nodes[:-1]):
        return None  # the scores or the weights are wanted by someone else
    q, k = product.args
    if not isinstance(q, fx.Node) or not isinstance(k, fx.Node) or example(q).dim() not in (3, 4):
        return None
    if (
        any(example(n).dim() != example(q).dim() for n in (k, v))
        or len({example(n).dtype for n in (q, k, v)}) > 1
    ):
        return None
    return Match(nodes, product, middle, scores, q, k, True, v, node, shape=tuple(example(product).shape))


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _last_dim(node: fx.Node) -> bool:
    dim = _argument(node, 1, "dim", None)
    return isinstance(dim, int) and dim % example(node).dim() == example(node).dim() - 1


def _reaches_matmul(node: fx.Node) -> bool:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if _is_matmul(n):
            return True
        if n.op.startswith("call") and op_name(n) not in ("linear", "addmm", "mm"):
            stack += n.all_input_nodes
    return False


def _match_sdpa(node: fx.Node) -> Match | None:
    q, k, v = (_argument(node, i, name, None) for i, name in enumerate(("query", "key", "value")))
    if not all(isinstance(n, fx.Node) and example(n).dim() == 4 for n in (q, k, v)):
        return None
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    mask = _argument(node, 3, "attn_mask", None)
    if _argument(node, 4, "dropout_p", 0.0) or (mask is not None and not isinstance(mask, fx.Node)):
        return None
    scale = _argument(node, 6, "scale", None)
    width = example(q).shape[-1]
    shape = (*example(q).shape[:-1], example(k).shape[-2])
    causal = bool(_argument(node, 5, "is_causal", False))
    grouped = bool(_argument(node, 7, "enable_gqa", False))
    return Match(
        [node], None, [], None, q, k, False, v, node, float(scale) if scale is not None else 1.0 / math.sqrt(width),
        causal, mask, grouped, True, shape,
    )  # fmt: skip
