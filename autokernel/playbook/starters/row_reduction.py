"""Reduce the last dim.

    kernel_fn(x)  = x.sum(-1), x.mean(-1) or x.amax(-1), as OPERATION says

Sums accumulate in float32.  One program takes ROWS rows and walks them BLOCK columns at a time; the lanes are folded
once, at the end.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

OPERATION = "sum"
ROWS = 1
BLOCK = 4096
num_warps = 8
SPACE = {"ROWS": [1, 2, 4, 8], "BLOCK": [512, 1024, 2048, 4096, 8192], "num_warps": [2, 4, 8, 16]}


@triton.jit
def reduce_kernel(
    x_ptr, out_ptr, rows, columns, OPERATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    identity: tl.constexpr = float("-inf") if OPERATION == "amax" else 0.0
    lanes = tl.full([ROWS, BLOCK], identity, dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + row * columns + col, mask=(row < rows) & (col < columns), other=identity).to(
            tl.float32
        )
        if OPERATION == "amax":
            lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
        else:
            lanes += x
    if OPERATION == "amax":
        folded = tl.max(lanes, axis=1)[:, None]
        folded = tl.where(tl.max((lanes != lanes).to(tl.int32), axis=1)[:, None] > 0, float("nan"), folded)
    else:
        folded = tl.sum(lanes, axis=1)[:, None]
        if OPERATION == "mean":
            folded = folded / columns
    tl.store(out_ptr + row, folded, mask=row < rows)


def kernel_fn(x):
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    reduce_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        out,
        rows,
        columns,
        OPERATION,
        ROWS=ROWS,
        BLOCK=min(BLOCK, max(16, triton.next_power_of_2(columns))),
        num_warps=num_warps,
    )
    return out
