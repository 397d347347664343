"""RMS norm over the last dim, with an optional residual added first.

    kernel_fn(x, weight)            = x * rsqrt(mean(x ** 2) + EPS) * weight, computed in float32
    kernel_fn(x, weight, residual)  = (that of x + residual, x + residual)

One program owns ROWS whole rows in registers: each element is read once and written once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

EPS = 1e-5
ROWS = 1
num_warps = 4
SPACE = {"ROWS": [1, 2, 4, 8], "num_warps": [1, 2, 4, 8, 16]}


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    rows,
    columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + row * columns + col, x, mask=inside)
    mean_square = tl.sum(x * x, axis=1)[:, None] / columns
    weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + col, x * tl.rsqrt(mean_square + eps) * weight, mask=inside)


def kernel_fn(x, weight, residual=None):
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else out
    other = residual.contiguous() if residual is not None else x
    rms_norm_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        other,
        weight.contiguous(),
        out,
        total,
        rows,
        columns,
        EPS,
        residual is not None,
        ROWS=ROWS,
        BLOCK=max(16, triton.next_power_of_2(columns)),
        num_warps=num_warps,
    )
    return out if residual is None else (out, total)
