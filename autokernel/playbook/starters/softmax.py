"""Softmax over the last dim of scores that are scaled and, optionally, masked.

    kernel_fn(x)        = softmax(x * SCALE)
    kernel_fn(x, mask)  = softmax(x * SCALE + mask), or with a boolean mask, -inf where it is False

``mask`` broadcasts against the leading dims of ``x``.  One program owns ROWS whole rows in registers.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

SCALE = 1.0
ROWS = 1
num_warps = 4
SPACE = {"ROWS": [1, 2, 4, 8], "num_warps": [1, 2, 4, 8, 16]}


@triton.jit
def softmax_kernel(
    x_ptr,
    mask_ptr,
    out_ptr,
    rows,
    columns,
    scale,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32) * scale
    if KIND == "additive":
        x += tl.load(mask_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32)
    if KIND == "boolean":
        keep = tl.load(mask_ptr + row * columns + col, mask=inside, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    x = tl.where(col < columns, x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    tl.store(out_ptr + row * columns + col, e / tl.sum(e, axis=1)[:, None], mask=inside)


def kernel_fn(x, mask=None):
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    kind = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    full = x if mask is None else mask.expand(x.shape).contiguous()
    if kind == "boolean":
        full = full.view(torch.uint8)
    softmax_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        full,
        out,
        rows,
        columns,
        SCALE,
        kind,
        ROWS=ROWS,
        BLOCK=max(16, triton.next_power_of_2(columns)),
        num_warps=num_warps,
    )
    return out
