"""A region of the model as Triton kernels.

Generated from the graph: linear, silu, linear, mul.
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "fixed"

BLOCK_M = 64  # tuned
BLOCK_N = 64  # tuned
BLOCK_K = 64  # tuned
GROUP_M = 8
num_warps = 4  # tuned
num_stages = 4  # tuned


@triton.jit
def _gemm(pid, mul_5_ptr, mul_5_stride_m, mul_5_stride_k, w1_weight_ptr, w1_weight_stride_n, w1_weight_stride_k, w3_weight_ptr, w3_weight_stride_n, w3_weight_stride_k, out0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """(512, 768) x (768, 2048), float32 accumulators, epilogue on the tile in registers."""
    tiles_m, tiles_n = tl.cdiv(512, BLOCK_M), tl.cdiv(2048, BLOCK_N)
    # programs that run together share rows of tiles, which then stay in L2
    group = pid // (GROUP_M * tiles_n)
    size_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % size_m
    pid_n = (pid % (GROUP_M * tiles_n)) // size_m
    row_id = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    col_id = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end wrap around: their results are not stored
    mul_5_tile = mul_5_ptr + (row_id % 512)[:, None] * mul_5_stride_m + k[None, :] * mul_5_stride_k
    w1_weight_tile = w1_weight_ptr + (col_id % 2048)[None, :] * w1_weight_stride_n + k[:, None] * w1_weight_stride_k
    w3_weight_tile = w3_weight_ptr + (col_id % 2048)[None, :] * w3_weight_stride_n + k[:, None] * w3_weight_stride_k
    acc0 = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, 768, BLOCK_K):
        if 768 % BLOCK_K == 0:
            x_block = tl.load(mul_5_tile)
            w0_block = tl.load(w1_weight_tile)
            w1_block = tl.load(w3_weight_tile)
        else:
            x_block = tl.load(mul_5_tile, mask=k[None, :] < 768 - start, other=0.0)
            w0_block = tl.load(w1_weight_tile, mask=k[:, None] < 768 - start, other=0.0)
            w1_block = tl.load(w3_weight_tile, mask=k[:, None] < 768 - start, other=0.0)
        acc0 = tl.dot(x_block, w0_block, acc0)
        acc1 = tl.dot(x_block, w1_block, acc1)
        mul_5_tile += BLOCK_K * mul_5_stride_k
        w1_weight_tile += BLOCK_K * w1_weight_stride_k
        w3_weight_tile += BLOCK_K * w3_weight_stride_k
    row, col = row_id[:, None], col_id[None, :]
    row_ok, col_ok = row < 512, col < 2048
    sigmoid = 1.0 / (1.0 + tl.exp(-acc0))
    mul = acc0 * sigmoid
    mul_1 = mul * acc1
    tl.store(out0_ptr + (col + row * 2048), mul_1, mask=row_ok & col_ok)


@triton.jit
def gemm_kernel(mul_5_ptr, mul_5_stride_m, mul_5_stride_k, w1_weight_ptr, w1_weight_stride_n, w1_weight_stride_k, w3_weight_ptr, w3_weight_stride_n, w3_weight_stride_k, out0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    pid = tl.program_id(0)
    _gemm(pid, mul_5_ptr, mul_5_stride_m, mul_5_stride_k, w1_weight_ptr, w1_weight_stride_n, w1_weight_stride_k, w3_weight_ptr, w3_weight_stride_n, w3_weight_stride_k, out0_ptr, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)


def linear_0(mul_5, w1_weight, w3_weight):
    if mul_5.shape != (1, 512, 768) or mul_5.dtype != torch.float16:
        raise ValueError(f"generated for (1, 512, 768) torch.float16, called with {tuple(mul_5.shape)} {mul_5.dtype}")
    mul_5_rows = mul_5.reshape(-1, 768)
    if w1_weight.shape != (2048, 768) or w1_weight.dtype != torch.float16:
        raise ValueError(f"generated for a weight (2048, 768) torch.float16")
    if w3_weight.shape != (2048, 768) or w3_weight.dtype != torch.float16:
        raise ValueError(f"generated for a weight (2048, 768) torch.float16")
    out0 = torch.empty((1, 512, 2048), dtype=torch.float16, device=mul_5.device)
    def grid(meta):
        BLOCK_M, BLOCK_N = meta["BLOCK_M"], meta["BLOCK_N"]
        return (triton.cdiv(512, BLOCK_M) * triton.cdiv(2048, BLOCK_N),)
    gemm_kernel[grid](
        mul_5_rows, mul_5_rows.stride(0), mul_5_rows.stride(1), w1_weight, w1_weight.stride(0), w1_weight.stride(1), w3_weight, w3_weight.stride(0), w3_weight.stride(1), out0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=num_warps, num_stages=num_stages,
    )
    return out0


def kernel_fn(mul_5, w1_weight, w3_weight):
    mul_6 = linear_0(mul_5, w1_weight, w3_weight)
    return mul_6
