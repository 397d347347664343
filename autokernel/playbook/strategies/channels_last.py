"""Convolution → the same in channels_last, with weights packed so.

Tensor cores, and a CPU's 1x1 and depthwise convolutions, want the channels side by side.  The region's own
inputs and results keep their layout: what is converted at its borders is part of what is measured.  A batch
norm is folded as `fold_batch_norm` does it, and what follows is applied by the library where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autokernel.capture.nodes import arguments, fake_value, op_name
from autokernel.playbook.context import StrategyContext, find
from autokernel.playbook.emit import kernel_file
from autokernel.playbook.strategies.fold_batch_norm import (
    ARGUMENTS,
    fused_lines,
    other_statics,
    pack_lines,
    plain_lines,
)
from autokernel.proposers.proposal import Proposal
from autokernel.regions.conv import CONVOLUTIONS, is_batch_norm

NAME = "channels_last"
FAMILIES = ("conv",)
BACKEND = "torch"

_LAYOUT = "memory_format=torch.channels_last"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    convolutions = find(ctx.nodes, *CONVOLUTIONS)
    norms = [n for n in ctx.nodes if is_batch_norm(n)]
    if len(convolutions) != 1 or len(ctx.results) != 1 or len(norms) > 1:
        return
    (conv,) = convolutions
    if op_name(conv) != "conv2d" or fake_value(conv).dim() != 4:
        return
    given = arguments(conv, ARGUMENTS)
    norm = norms[0] if norms else None
    weight = given.get("weight")
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or conv in ctx.static:
        return
    if _is_last(weight) and _is_last(given["input"]):
        return  # it is so already
    after = [n for n in ctx.nodes if n not in ctx.static and n is not conv and n is not norm]
    plain = plain_lines(ctx, conv, given, norm, after)
    if not after:
        plain.append(f"{ctx.names[ctx.results[0]]} = y")
    yield _proposal(ctx, conv, given, norm, plain, "")
    fused = fused_lines(ctx, conv, given, norm, after)
    if fused is not None:
        yield _proposal(ctx, conv, given, norm, fused, "cudnn" if ctx.device.startswith("cuda") else "onednn")


def _is_last(node: fx.Node) -> bool:
    return fake_value(node).is_contiguous(memory_format=torch.channels_last)


def _proposal(
    ctx: StrategyContext,
    conv: fx.Node,
    given: dict[str, Any],
    norm: fx.Node | None,
    body: list[str],
    library: str,
) -> Proposal:
    *before, last = pack_lines(ctx, conv, given, norm)
    weight, rest = last.removeprefix("return ").split(",", 1)
    wide = [n for n in ctx.activations if fake_value(n).dim() == 4 and not _is_last(n)]
    convert = [f"{ctx.names[n]} = {ctx.names[n]}.contiguous({_LAYOUT})" for n in wide]
    back = "" if _is_last(ctx.results[0]) else ".contiguous()"
    source = kernel_file(
        ctx,
        doc="A convolution with the channels side by side in memory.",
        backend=BACKEND,
        body=[*convert, *body],
        returns=ctx.names[ctx.results[0]] + back,
        prepack=[*before, f"return {weight}.contiguous({_LAYOUT}),{rest}"],
        packed=["weight_", "bias_", *other_statics(ctx)],
    )
    tags, what = ["channels-last"], "convolution in channels_last"
    if norm is not None:
        tags.append("fold-batch-norm")
        what += ", its batch norm folded"
    if library:
        tags.append(library)
        what += f", what follows applied by {library}"
    return Proposal(source, strategy=",".join(tags), description=what, backend=BACKEND)
