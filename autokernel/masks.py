"""How much of an attention region's score matrix its masks leave, read from the masks' values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .capture.graph import Graph
from .capture.nodes import arguments, fake_value, op_name
from .regions.ops import MATMULS
from .regions.region import Region
from .roofline import causal_share

# At most this, added or filled in, means "not attended": -inf, finfo.min, -1e9, -1e4.
MASKED = -1e4


def kept_scores(region: Region) -> float | None:
    """Share of scores that any query attends to: 1 without a mask, about a half under a causal one.

    ``None`` when a mask depends on the model's inputs, so that no share is certain.
    """
    if region.family != "attention":
        return 1.0
    inside = set(region.nodes)
    scores: tuple[int, ...] = ()
    kept: Tensor | None = None
    for node in region.nodes:
        name = op_name(node)
        if name == "scaled_dot_product_attention":
            return _of_call(region, node)
        if name == "softmax":
            break
        if name in MATMULS:
            scores = tuple(fake_value(node).shape)
            continue
        if name in ("view", "reshape") and scores and tuple(fake_value(node).shape)[-2:] == scores[-2:]:
            scores = tuple(fake_value(node).shape)  # heads out of the batch, or into it
            continue
        if name not in ("masked_fill", "where", "add", "sub") or tuple(fake_value(node).shape) != scores:
            continue
        others = [a for a in node.all_input_nodes if a not in inside]
        if any(a not in region.static for a in others):
            return None
        if others:
            one = _keeps(region.graph, node, name, inside)
            kept = one if kept is None or one is None else kept & one
    return 1.0 if kept is None else _mean(kept, scores)


def _keeps(graph: Graph, node: fx.Node, name: str, inside: set[fx.Node]) -> Tensor | None:
    """True where the step keeps a score; None when it is no mask at all."""

    def value(arg: Any) -> Any:
        return static_value(graph, arg) if isinstance(arg, fx.Node) else arg

    if name == "masked_fill":
        _, condition, fill = (*node.args, *node.kwargs.values())[:3]
        return ~value(condition).bool() if float(value(fill)) <= MASKED else None
    if name == "where":
        condition, yes, no = node.args
        if isinstance(yes, fx.Node) and yes in inside:
            fill, kept = value(no), value(condition).bool()
        else:
            fill, kept = value(yes), ~value(condition).bool()
        low = torch.as_tensor(fill, device=kept.device) <= MASKED
        return kept | ~low
    added = [a for a in node.args if not (isinstance(a, fx.Node) and a in inside)]
    mask = torch.as_tensor(value(added[0]))
    return (mask > MASKED) if name == "add" else (mask < -MASKED)


def _of_call(region: Region, node: fx.Node) -> float | None:
    """For a call of scaled_dot_product_attention."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = arguments(node, names)
    rows, columns = fake_value(given["query"]).shape[-2], fake_value(given["key"]).shape[-2]
    mask = given.get("attn_mask")
    if mask is None:
        return 1.0 if given.get("is_causal") is not True else causal_share(rows, columns)
    if mask not in region.static:
        return None
    values = static_value(region.graph, mask)
    return _mean(values if values.dtype == torch.bool else values > MASKED, (rows, columns))


def _mean(kept: Tensor, scores: tuple[int, ...]) -> float:
    full = torch.broadcast_to(kept, scores) if kept.dim() <= len(scores) else kept
    return float(full.float().mean())


def static_value(graph: Graph, node: fx.Node, cache: dict[fx.Node, Any] | None = None) -> Any:
    """The real value of a node that depends on parameters, buffers and literals only."""
    cache = {} if cache is None else cache
    if node not in cache:
        if node in graph.roles:
            cache[node] = graph.value_of(node)
        else:
            for arg in node.all_input_nodes:
                static_value(graph, arg, cache)
            args = fx.map_arg(node.args, cache.__getitem__)
            kwargs = fx.map_arg(node.kwargs, cache.__getitem__)
            with torch.no_grad():
                if node.op == "call_method":
                    cache[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    cache[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return cache[node]
