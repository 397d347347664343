"""A call of scaled_dot_product_attention → the same call without what keeps it from its fast kernels.

A mask whose values are known and mask nothing goes, and one that is causal becomes ``is_causal``: with a
mask tensor the library has no flash kernel.  A mask that is given at run time is looked at when the kernel
runs on a CPU; on a GPU that would stop the queue, and the library's cuDNN kernel, which takes a mask, is
offered.  Keys and values that were repeated for grouped queries are taken before the repetition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from autokernel.backends.masked_attention import mask_kind
from autokernel.capture.nodes import arguments
from autokernel.playbook.attention_operands import OperandWriter, after, ungrouped
from autokernel.playbook.context import StrategyContext, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions.code import statements

NAME = "attention_call"
FAMILIES = ("attention",)
BACKEND = "torch"

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_PINNED = "from torch.nn.attention import SDPBackend, sdpa_kernel"
_LOOKED_AT = "from autokernel.backends.masked_attention import masked_attention"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    calls = [n for n in find(ctx.nodes, "scaled_dot_product_attention") if n not in ctx.static]
    if len(calls) != 1:
        return
    (call,) = calls
    given = arguments(call, _ARGUMENTS)
    query, key, value = (given.get(name) for name in _ARGUMENTS[:3])
    if not all(isinstance(n, fx.Node) and len(shape_of(n)) == 4 for n in (query, key, value)):
        return
    if given.get("dropout_p", 0.0):
        return
    mask, kind = given.get("attn_mask"), _kind(ctx, given)
    told = not given.get("enable_gqa", False)
    repeated = told and all(ungrouped(n) is not None for n in (key, value))  # type: ignore[arg-type]
    cuda = ctx.device.startswith("cuda")
    looked_at = not cuda and kind == "run time" and isinstance(mask, fx.Node)
    for grouped in (True, False) if repeated else (False,):
        for backend in _backends(ctx, kind):
            gone = mask is not None and kind in ("none", "causal")
            if not (gone or looked_at or grouped or backend):
                continue  # that is the call as it is
            tags = ["sdpa", *(["gqa"] if grouped else []), *([backend.lower()] if backend else [])]
            tags += ["mask-gone"] if gone else ["mask-looked-at"] if looked_at else []
            yield Proposal(
                _source(ctx, call, given, kind, grouped, backend, looked_at),
                strategy=",".join(tags),
                description=_description(kind, gone, looked_at, grouped, backend),
                backend=BACKEND,
            )


def _kind(ctx: StrategyContext, given: dict[str, Any]) -> str:
    """``none``, ``causal``, ``other`` (known, and some other mask), or ``run time``."""
    mask = given.get("attn_mask")
    if mask is None:
        return "causal" if given.get("is_causal", False) else "none"
    if mask not in ctx.static:
        return "run time"
    value = ctx.value(mask)
    rows, columns = shape_of(given["query"])[-2], shape_of(given["key"])[-2]
    return mask_kind(value.detach(), rows, columns) if isinstance(value, Tensor) else "other"


def _backends(ctx: StrategyContext, kind: str) -> list[str]:
    half = any(p.dtype in ("float16", "bfloat16") for p in ctx.task.inputs)
    if not ctx.device.startswith("cuda") or not half:
        return [""]
    maskless = ["FLASH_ATTENTION"] if kind in ("none", "causal") else []
    return ["CUDNN_ATTENTION", *maskless, ""]


def _description(kind: str, gone: bool, looked_at: bool, grouped: bool, backend: str) -> str:
    what = []
    if gone:
        what.append("its mask masks nothing" if kind == "none" else "its mask is causal")
    if looked_at:
        what.append("a mask that masks nothing or is causal is left out as it runs")
    if grouped:
        what.append("grouped heads unexpanded")
    if backend:
        what.append(f"pinned to {backend.lower()}")
    return "scaled_dot_product_attention: " + ", ".join(what)


def _source(
    ctx: StrategyContext,
    call: fx.Node,
    given: dict[str, Any],
    kind: str,
    grouped: bool,
    backend: str,
    looked_at: bool,
) -> str:
    names, writer = ctx.names, OperandWriter(ctx)
    writer.emit(given["query"])
    q = names[given["query"]]
    k, v = (writer.operand(given[name], grouped) for name in ("key", "value"))
    scale = given.get("scale")
    gqa = grouped or given.get("enable_gqa", False)
    mask = given.get("attn_mask")
    if isinstance(mask, fx.Node) and kind not in ("none", "causal"):
        writer.emit(mask)
    if isinstance(mask, fx.Node) and looked_at:
        known = float(scale) if scale is not None else 1.0 / math.sqrt(shape_of(given["query"])[-1])
        line = f"masked_attention({q}, {k}, {v}, {names[mask]}, {known!r}, {gqa}).transpose(1, 2)"
    else:
        more = []
        if kind == "causal":
            more.append("is_causal=True")
        elif mask is not None and kind != "none":
            more.append(f"attn_mask={names[mask]}")
        if scale is not None:
            more.append(f"scale={scale!r}")
        if gqa:
            more.append("enable_gqa=True")
        line = f"F.scaled_dot_product_attention({', '.join([q, k, v, *more])})"
    line = f"{names[call]} = {line}"
    writer.body.append(f"with sdpa_kernel([SDPBackend.{backend}]):\n        {line}" if backend else line)
    writer.done.add(call)
    for node in ctx.nodes:
        if node not in writer.done and node not in ctx.static and after(node, call):
            writer.body.append(statements([node], names)[0])
    return kernel_file(
        ctx,
        doc="Attention through the library's fused kernel, with no more of a mask than it needs.",
        backend=BACKEND,
        body=writer.body,
        header=[_PINNED] if backend else ["", _LOOKED_AT] if looked_at else [],
    )
