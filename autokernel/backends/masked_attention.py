"""Attention that looks at its mask before it reads it for every score."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("autokernel::masked_attention", mutates_args=())
def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, enable_gqa: bool
) -> Tensor:
    """``scaled_dot_product_attention(...)`` as a contiguous (batch, rows, heads, width).

    ``query`` is (batch, heads, rows, width).  On a CPU a ``mask`` that masks nothing is left out, and one
    that is causal is said to be; any other is used as it is, and so is every mask on a device, where a look
    at its values would stop the queue.  One op for the graph: the branch is taken as it runs, not as it is
    traced.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    kind = mask_kind(mask, rows, columns) if mask.device.type == "cpu" else "other"
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask if kind == "other" else None, is_causal=kind == "causal",
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


@masked_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, enable_gqa: bool) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty((batch, rows, heads, value.shape[-1]))


def mask_kind(mask: Tensor, rows: int, columns: int) -> str:
    """``none`` where every score stays as it is, ``causal`` where those above the diagonal go; or ``other``.

    ``mask`` is one of `scaled_dot_product_attention`'s: true keeps a score, or a number is added to it.
    """
    first = mask[(0,) * (mask.dim() - 1)]
    probe = first if first.dtype == torch.bool else first == 0  # a row says already what it can only be
    if bool(probe.all()):
        kept = mask if mask.dtype == torch.bool else mask == 0
        return "none" if bool(kept.all()) else "other"
    if rows != columns or tuple(mask.shape[-2:]) != (rows, columns) or bool(probe[1:].any()):
        return "other"
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype != torch.bool:
        additive = torch.zeros(rows, columns, dtype=mask.dtype, device=mask.device)
        causal = additive.masked_fill(~causal, -math.inf)
    return "causal" if torch.equal(mask, causal.expand(mask.shape)) else "other"
