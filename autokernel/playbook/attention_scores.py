"""What attention by hand does to its scores: the scale and the mask between ``q @ k.T`` and softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from autokernel.capture.nodes import op_name
from autokernel.playbook.context import StrategyContext, dtype_of, shape_of
from autokernel.regions import ops


@dataclass
class Scores:
    """What is done to ``q @ k.T`` before softmax: times scale, plus additive, only where allowed."""

    product: fx.Node
    scale: float = 1.0
    allowed: Tensor | None = None
    additive: Tensor | None = None
    dynamic: list[tuple[float, fx.Node]] = field(default_factory=list)


def read_scores(ctx: StrategyContext, node: fx.Node) -> Scores | None:
    """Read the chain from softmax's input back to the product, then fold it forwards."""
    chain: list[fx.Node] = []
    while op_name(node) not in ("matmul", "bmm"):
        previous = [a for a in node.all_input_nodes if a not in ctx.static and _reaches_product(a, ctx)]
        if len(previous) != 1:
            return None
        chain.append(node)
        node = previous[0]
    scores = Scores(node)
    for step in reversed(chain):
        if not _fold(ctx, scores, step, node):
            return None
        node = step
    if scores.allowed is not None and not bool(scores.allowed.any(-1).all()):
        return None  # a row that may attend to nothing: by-hand and library code differ there
    return scores


def _reaches_product(node: fx.Node, ctx: StrategyContext) -> bool:
    while node.op != "placeholder":
        if op_name(node) in ("matmul", "bmm"):
            return len(shape_of(node)) == 4
        inputs = [a for a in node.all_input_nodes if a not in ctx.static]
        if not inputs:
            return False
        node = inputs[0]
    return False


def _fold(ctx: StrategyContext, scores: Scores, step: fx.Node, previous: fx.Node) -> bool:
    name = op_name(step)
    if name in ops.CASTS or name == "contiguous":
        return True
    if name in ("mul", "div"):
        return _fold_scaling(ctx, scores, step, previous)
    if name == "add":
        other = next((a for a in step.args if a is not previous), None)
        if not isinstance(other, fx.Node) or step.kwargs.get("alpha", 1) != 1:
            return False
        if other not in ctx.static:
            scores.dynamic.append((1.0, other))
            return True
        value = ctx.value(other)
        return value is not None and _add(scores, value)
    if name == "masked_fill" and step.args[0] is previous:
        fill = step.args[2] if len(step.args) > 2 else step.kwargs.get("value")
        mask = step.args[1] if len(step.args) > 1 else None  # type: ignore[misc]
        masked = ctx.value(mask) if isinstance(mask, fx.Node) else None
        return (
            masked is not None and _is_minus_infinity(fill, dtype_of(step)) and _allow(scores, ~masked.bool())
        )
    if name == "where" and len(step.args) == 3 and step.args[1] is previous:
        condition = ctx.value(step.args[0]) if isinstance(step.args[0], fx.Node) else None
        fill = ctx.value(step.args[2]) if isinstance(step.args[2], fx.Node) else step.args[2]
        if isinstance(fill, Tensor):
            fill = fill.item() if fill.numel() == 1 else None
        return (
            condition is not None
            and _is_minus_infinity(fill, dtype_of(step))
            and _allow(scores, condition.bool())
        )
    return False


def _fold_scaling(ctx: StrategyContext, scores: Scores, step: fx.Node, previous: fx.Node) -> bool:
    factor = next((a for a in step.args if a is not previous), None)
    if isinstance(factor, fx.Node):
        value = ctx.value(factor)
        if value is None or value.numel() != 1:
            return False
        factor = value.item()
    if not isinstance(factor, int | float) or (op_name(step) == "div" and step.args[0] is not previous):
        return False
    factor = 1.0 / factor if op_name(step) == "div" else float(factor)
    if factor <= 0:
        return False
    scores.scale *= factor
    if scores.additive is not None:
        scores.additive = scores.additive * factor
    scores.dynamic = [(c * factor, n) for c, n in scores.dynamic]
    return True


def _add(scores: Scores, value: Tensor) -> bool:
    if value.dtype == torch.bool or not value.is_floating_point():
        return False
    blocked = value == -math.inf
    lowest = value <= torch.finfo(value.dtype).min / 2  # the dtype's own "minus infinity"
    rest = torch.where(blocked | lowest, torch.zeros_like(value), value)
    if (blocked | lowest).any() and not _allow(scores, ~(blocked | lowest)):
        return False
    if rest.any():
        scores.additive = rest if scores.additive is None else scores.additive + rest
    return True


def _allow(scores: Scores, allowed: Tensor) -> bool:
    scores.allowed = allowed if scores.allowed is None else scores.allowed & allowed
    return True


def _is_minus_infinity(value: object, dtype: torch.dtype) -> bool:
    """-inf, or the most negative number of a float dtype, which softmax treats the same unless a row has
    nothing else."""
    if not isinstance(value, int | float):
        return False
    return value == -math.inf or value <= torch.finfo(dtype).min / 2


def mask_kind(scores: Scores) -> str:
    if scores.dynamic:
        return "mask given at run time"
    if scores.additive is not None:
        return "additive mask"
    allowed = scores.allowed
    if allowed is None or bool(allowed.all()):
        return "no mask"
    rows, columns = shape_of(scores.product)[-2:]
    full = allowed.expand(torch.broadcast_shapes(allowed.shape, (rows, columns)))
    causal = torch.ones(rows, columns, dtype=torch.bool, device=allowed.device).tril()
    return "causal" if rows == columns and bool((full == causal).all()) else "boolean mask"
