"""A fused Triton kernel.

Generated from the graph: add, layer_norm.
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "fixed"

ROWS = 1
BLOCK = 1024
num_warps = 4
SPACE = {"ROWS": [1, 2, 4, 8, 16], "num_warps": [1, 2, 4, 8, 16]}


@triton.jit
def fused_kernel(x_ptr, linear_1_ptr, ln_2_weight_ptr, ln_2_bias_ptr, out0_ptr, out1_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """1024 rows of 768 columns, folded and written in one pass over memory."""
    pid = tl.program_id(0)
    row = (pid * ROWS + tl.arange(0, ROWS)[:, None])
    row_ok = row < 1024
    col_start = 0
    col = col_start + tl.arange(0, BLOCK)[None, :]
    col_ok = col < 768
    x = tl.load(x_ptr + (col + row * 768), mask=row_ok & col_ok, other=0.0).to(tl.float32)
    linear_1 = tl.load(linear_1_ptr + (col + row * 768), mask=row_ok & col_ok, other=0.0).to(tl.float32)
    add = x + linear_1
    sum_1 = tl.sum(tl.where(col_ok, add, 0.0), axis=1)[:, None]
    div_ = sum_1 / 768.0
    sub = add - div_
    squared = sub * sub
    var = tl.sum(tl.where(col_ok, squared, 0.0), axis=1)[:, None]
    var_2 = var / 768.0
    add_1 = var_2 + 1e-05
    rsqrt = tl.rsqrt(add_1)
    mul = sub * rsqrt
    ln_2_weight = tl.load(ln_2_weight_ptr + (col), mask=col_ok, other=0.0).to(tl.float32)
    mul_1 = mul * ln_2_weight
    ln_2_bias = tl.load(ln_2_bias_ptr + (col), mask=col_ok, other=0.0).to(tl.float32)
    add_2 = mul_1 + ln_2_bias
    tl.store(out0_ptr + (col + row * 768), add, mask=row_ok & col_ok)
    tl.store(out1_ptr + (col + row * 768), add_2, mask=row_ok & col_ok)


def _as_expected(x, shape, stride, dtype):
    """``x`` in the layout this kernel was generated for; copied only if its strides differ."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"generated for {shape} {dtype}, called with {tuple(x.shape)} {x.dtype}")
    if x.stride() == stride or all(n == 1 or a == b for n, a, b in zip(shape, x.stride(), stride)):
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=x.device).copy_(x)


def kernel_fn(x, linear_1, ln_2_weight, ln_2_bias):
    x = _as_expected(x, (1, 1024, 768), (786432, 768, 1), torch.float16)
    linear_1 = _as_expected(linear_1, (1, 1024, 768), (786432, 768, 1), torch.float16)
    ln_2_weight = _as_expected(ln_2_weight, (768,), (1,), torch.float16)
    ln_2_bias = _as_expected(ln_2_bias, (768,), (1,), torch.float16)
    out0 = torch.empty((1, 1024, 768), dtype=torch.float16, device=x.device)
    out1 = torch.empty((1, 1024, 768), dtype=torch.float16, device=x.device)
    grid = (triton.cdiv(1024, ROWS),)
    fused_kernel[grid](
        x, linear_1, ln_2_weight, ln_2_bias, out0, out1, ROWS=ROWS, BLOCK=BLOCK, num_warps=num_warps
    )
    return out0, out1
