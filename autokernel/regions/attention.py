"""Attention: a call of scaled_dot_product_attention, or matmul → scale → mask → softmax → matmul by hand.

By hand there may be a soft cap (``tanh``) on the scores, a bias that ``baddbmm`` adds, and reshapes between
(batch, heads) and (batch · heads) on the way.

The region swallows the layout changes around it (head split and merge, ``repeat_kv``), so that a rewrite
sees where queries, keys and values really come from and may keep grouped heads unexpanded.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match

_RESHAPES = frozenset(
    {"contiguous", "view", "reshape", "flatten", "unflatten"}
)  # heads into the batch and back
_SCORE_OPS = (
    frozenset({"add", "sub", "mul", "div", "masked_fill", "where", "clamp", "tanh"}) | _RESHAPES | ops.CASTS
)
_WEIGHT_OPS = frozenset({"dropout", "nan_to_num", "mul"}) | _RESHAPES | ops.CASTS


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    for node in graph.nodes:
        if not free(node) or node.op not in ("call_function", "call_method"):
            continue
        if op_name(node) == "scaled_dot_product_attention":
            core: set[fx.Node] | None = {node}
        elif op_name(node) == "multi_head_attention_forward":
            core = {node, *(u for u in node.users if free(u))}
        elif op_name(node) == "softmax":
            core = _by_hand(node, static, free)
        else:
            continue
        if core is None:
            continue
        constants = frozenset(a for n in core for a in n.all_input_nodes if a in static)
        ops.absorb_producers(
            core, lambda n: free(n) and (ops.is_movement(n) or ops.is_scalar_scaling(n)), static
        )
        ops.absorb_users(core, lambda n: free(n) and ops.is_movement(n) and _alone(n), static)
        yield Match("attention", core, constants)


def _alone(node: fx.Node) -> bool:
    """The producer's only reader is ``node``: the layout change belongs to this region."""
    return all(len(a.users) == 1 for a in node.all_input_nodes)


def _by_hand(softmax: fx.Node, static: set[fx.Node], free: Free) -> set[fx.Node] | None:
    after = _walk_to_values(softmax, free)
    before = _walk_to_scores(softmax.all_input_nodes[0], static, free)
    if after is None or before is None:
        return None
    nodes = {softmax, *after, *before}
    inner = nodes - {after[-1]}
    if any(user not in nodes for node in inner for user in node.users):
        return None  # the attention weights are also an output of the model
    return nodes


def _walk_to_values(softmax: fx.Node, free: Free) -> list[fx.Node] | None:
    """From softmax forwards to the matmul with the values."""
    path: list[fx.Node] = []
    node = softmax
    for _ in range(6):
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
        if not free(user):
            return None
        path.append(user)
        if op_name(user) in ops.MATMULS:
            operands = [a for a in user.args if isinstance(a, fx.Node)]
            return path if len(operands) == 2 and operands[0] is node else None
        if op_name(user) not in _WEIGHT_OPS:
            return None
        node = user
    return None


def _walk_to_scores(node: fx.Node, static: set[fx.Node], free: Free, depth: int = 8) -> list[fx.Node] | None:
    """From softmax's input backwards to the matmul of queries and keys."""
    if depth == 0 or node in static or not free(node):
        return None
    name = op_name(node)
    if name in ops.MATMULS:
        return [node]
    if name not in _SCORE_OPS:
        return None
    for arg in node.all_input_nodes:
        path = _walk_to_scores(arg, static, free, depth - 1)
        if path is not None:
            return [*path, node]
    return None
