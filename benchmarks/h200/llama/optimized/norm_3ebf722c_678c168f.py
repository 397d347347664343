"""A fused Triton kernel.

Generated from the graph: add, float, pow, mean, add, rsqrt, mul, type_as, mul.
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
def fused_kernel(x_ptr, linear_3_ptr, ffn_norm_weight_ptr, out0_ptr, out1_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """512 rows of 768 columns, folded and written in one pass over memory."""
    pid = tl.program_id(0)
    row = (pid * ROWS + tl.arange(0, ROWS)[:, None])
    row_ok = row < 512
    col_start = 0
    col = col_start + tl.arange(0, BLOCK)[None, :]
    col_ok = col < 768
    x = tl.load(x_ptr + (col + row * 768), mask=row_ok & col_ok, other=0.0).to(tl.float32)
    linear_3 = tl.load(linear_3_ptr + (col + row * 768), mask=row_ok & col_ok, other=0.0).to(tl.float32)
    add = x + linear_3
    pow_1 = add * add
    mean = tl.sum(tl.where(col_ok, pow_1, 0.0), axis=1)[:, None]
    mean_2 = mean / 768.0
    add_1 = mean_2 + 1e-05
    rsqrt = tl.rsqrt(add_1)
    mul = add * rsqrt
    ffn_norm_weight = tl.load(ffn_norm_weight_ptr + (col), mask=col_ok, other=0.0).to(tl.float32)
    mul_1 = mul * ffn_norm_weight
    tl.store(out0_ptr + (col + row * 768), add, mask=row_ok & col_ok)
    tl.store(out1_ptr + (col + row * 768), mul_1, mask=row_ok & col_ok)


def _as_expected(x, shape, stride, dtype):
    """``x`` in the layout this kernel was generated for; copied only if its strides differ."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"generated for {shape} {dtype}, called with {tuple(x.shape)} {x.dtype}")
    if x.stride() == stride or all(n == 1 or a == b for n, a, b in zip(shape, x.stride(), stride)):
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=x.device).copy_(x)


def kernel_fn(x, linear_3, ffn_norm_weight):
    x = _as_expected(x, (1, 512, 768), (393216, 768, 1), torch.float16)
    linear_3 = _as_expected(linear_3, (1, 512, 768), (393216, 768, 1), torch.float16)
    ffn_norm_weight = _as_expected(ffn_norm_weight, (768,), (1,), torch.float16)
    out0 = torch.empty((1, 512, 768), dtype=torch.float16, device=x.device)
    out1 = torch.empty((1, 512, 768), dtype=torch.float16, device=x.device)
    grid = (triton.cdiv(512, ROWS),)
    fused_kernel[grid](
        x, linear_3, ffn_norm_weight, out0, out1, ROWS=ROWS, BLOCK=BLOCK, num_warps=num_warps
    )
    return out0, out1
