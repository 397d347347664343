"""Layer norm over the last dim, with an optional residual added first.

    kernel_fn(x, weight, bias)            = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    kernel_fn(x, weight, bias, residual)  = (that of x + residual, x + residual)

One program owns ROWS whole rows in registers: each element is read once and written once.  Statistics are
two-pass in float32, so a large mean does not cancel.
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
def layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    rows,
    columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    mean = tl.sum(x, axis=1)[:, None] / columns
    centred = tl.where(col < columns, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=1)[:, None] / columns
    out = centred * tl.rsqrt(variance + eps)
    out *= tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + col, out, mask=inside)


def kernel_fn(x, weight, bias=None, residual=None):
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else out
    other = residual.contiguous() if residual is not None else x
    layer_norm_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        other,
        weight.contiguous(),
        bias.contiguous() if bias is not None else weight,
        out,
        total,
        rows,
        columns,
        EPS,
        residual is not None,
        bias is not None,
        ROWS=ROWS,
        BLOCK=max(16, triton.next_power_of_2(columns)),
        num_warps=num_warps,
    )
    return out if residual is None else (out, total)
