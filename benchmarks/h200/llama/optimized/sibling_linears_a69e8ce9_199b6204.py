"""A region of the model as Triton kernels.

Generated from the graph: linear, linear, linear.
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "fixed"

BLOCK_M = 128  # tuned
BLOCK_N = 64  # tuned
BLOCK_K = 64  # tuned
GROUP_M = 8
num_warps = 8  # tuned
num_stages = 4  # tuned


@triton.jit
def _gemm_0(pid, mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wq_weight_ptr, wq_weight_stride_n, wq_weight_stride_k, out0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """(512, 768) x (768, 768), float32 accumulators, epilogue on the tile in registers."""
    tiles_m, tiles_n = tl.cdiv(512, BLOCK_M), tl.cdiv(768, BLOCK_N)
    # programs that run together share rows of tiles, which then stay in L2
    group = pid // (GROUP_M * tiles_n)
    size_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % size_m
    pid_n = (pid % (GROUP_M * tiles_n)) // size_m
    row_id = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    col_id = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end wrap around: their results are not stored
    mul_1_tile = mul_1_ptr + (row_id % 512)[:, None] * mul_1_stride_m + k[None, :] * mul_1_stride_k
    wq_weight_tile = wq_weight_ptr + (col_id % 768)[None, :] * wq_weight_stride_n + k[:, None] * wq_weight_stride_k
    acc0 = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, 768, BLOCK_K):
        if 768 % BLOCK_K == 0:
            x_block = tl.load(mul_1_tile)
            w0_block = tl.load(wq_weight_tile)
        else:
            x_block = tl.load(mul_1_tile, mask=k[None, :] < 768 - start, other=0.0)
            w0_block = tl.load(wq_weight_tile, mask=k[:, None] < 768 - start, other=0.0)
        acc0 = tl.dot(x_block, w0_block, acc0)
        mul_1_tile += BLOCK_K * mul_1_stride_k
        wq_weight_tile += BLOCK_K * wq_weight_stride_k
    row, col = row_id[:, None], col_id[None, :]
    row_ok, col_ok = row < 512, col < 768
    tl.store(out0_ptr + (col + row * 768), acc0, mask=row_ok & col_ok)


@triton.jit
def _gemm_1(pid, mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wk_weight_ptr, wk_weight_stride_n, wk_weight_stride_k, out1_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """(512, 768) x (768, 256), float32 accumulators, epilogue on the tile in registers."""
    tiles_m, tiles_n = tl.cdiv(512, BLOCK_M), tl.cdiv(256, BLOCK_N)
    # programs that run together share rows of tiles, which then stay in L2
    group = pid // (GROUP_M * tiles_n)
    size_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % size_m
    pid_n = (pid % (GROUP_M * tiles_n)) // size_m
    row_id = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    col_id = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end wrap around: their results are not stored
    mul_1_tile = mul_1_ptr + (row_id % 512)[:, None] * mul_1_stride_m + k[None, :] * mul_1_stride_k
    wk_weight_tile = wk_weight_ptr + (col_id % 256)[None, :] * wk_weight_stride_n + k[:, None] * wk_weight_stride_k
    acc0 = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, 768, BLOCK_K):
        if 768 % BLOCK_K == 0:
            x_block = tl.load(mul_1_tile)
            w0_block = tl.load(wk_weight_tile)
        else:
            x_block = tl.load(mul_1_tile, mask=k[None, :] < 768 - start, other=0.0)
            w0_block = tl.load(wk_weight_tile, mask=k[:, None] < 768 - start, other=0.0)
        acc0 = tl.dot(x_block, w0_block, acc0)
        mul_1_tile += BLOCK_K * mul_1_stride_k
        wk_weight_tile += BLOCK_K * wk_weight_stride_k
    row, col = row_id[:, None], col_id[None, :]
    row_ok, col_ok = row < 512, col < 256
    tl.store(out1_ptr + (col + row * 256), acc0, mask=row_ok & col_ok)


@triton.jit
def _gemm_2(pid, mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wv_weight_ptr, wv_weight_stride_n, wv_weight_stride_k, out2_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """(512, 768) x (768, 256), float32 accumulators, epilogue on the tile in registers."""
    tiles_m, tiles_n = tl.cdiv(512, BLOCK_M), tl.cdiv(256, BLOCK_N)
    # programs that run together share rows of tiles, which then stay in L2
    group = pid // (GROUP_M * tiles_n)
    size_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % size_m
    pid_n = (pid % (GROUP_M * tiles_n)) // size_m
    row_id = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    col_id = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end wrap around: their results are not stored
    mul_1_tile = mul_1_ptr + (row_id % 512)[:, None] * mul_1_stride_m + k[None, :] * mul_1_stride_k
    wv_weight_tile = wv_weight_ptr + (col_id % 256)[None, :] * wv_weight_stride_n + k[:, None] * wv_weight_stride_k
    acc0 = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, 768, BLOCK_K):
        if 768 % BLOCK_K == 0:
            x_block = tl.load(mul_1_tile)
            w0_block = tl.load(wv_weight_tile)
        else:
            x_block = tl.load(mul_1_tile, mask=k[None, :] < 768 - start, other=0.0)
            w0_block = tl.load(wv_weight_tile, mask=k[:, None] < 768 - start, other=0.0)
        acc0 = tl.dot(x_block, w0_block, acc0)
        mul_1_tile += BLOCK_K * mul_1_stride_k
        wv_weight_tile += BLOCK_K * wv_weight_stride_k
    row, col = row_id[:, None], col_id[None, :]
    row_ok, col_ok = row < 512, col < 256
    tl.store(out2_ptr + (col + row * 256), acc0, mask=row_ok & col_ok)


@triton.jit
def gemm_kernel(mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wq_weight_ptr, wq_weight_stride_n, wq_weight_stride_k, out0_ptr, wk_weight_ptr, wk_weight_stride_n, wk_weight_stride_k, out1_ptr, wv_weight_ptr, wv_weight_stride_n, wv_weight_stride_k, out2_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    pid = tl.program_id(0)
    if pid < tl.cdiv(512, BLOCK_M) * tl.cdiv(768, BLOCK_N):
        _gemm_0(pid, mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wq_weight_ptr, wq_weight_stride_n, wq_weight_stride_k, out0_ptr, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
    elif pid < tl.cdiv(512, BLOCK_M) * tl.cdiv(768, BLOCK_N) + tl.cdiv(512, BLOCK_M) * tl.cdiv(256, BLOCK_N):
        _gemm_1(pid - (tl.cdiv(512, BLOCK_M) * tl.cdiv(768, BLOCK_N)), mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wk_weight_ptr, wk_weight_stride_n, wk_weight_stride_k, out1_ptr, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
    else:
        _gemm_2(pid - (tl.cdiv(512, BLOCK_M) * tl.cdiv(768, BLOCK_N) + tl.cdiv(512, BLOCK_M) * tl.cdiv(256, BLOCK_N)), mul_1_ptr, mul_1_stride_m, mul_1_stride_k, wv_weight_ptr, wv_weight_stride_n, wv_weight_stride_k, out2_ptr, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)


def linear_0(mul_1, wq_weight, wk_weight, wv_weight):
    if mul_1.shape != (1, 512, 768) or mul_1.dtype != torch.float16:
        raise ValueError(f"generated for (1, 512, 768) torch.float16, called with {tuple(mul_1.shape)} {mul_1.dtype}")
    mul_1_rows = mul_1.reshape(-1, 768)
    if wq_weight.shape != (768, 768) or wq_weight.dtype != torch.float16:
        raise ValueError(f"generated for a weight (768, 768) torch.float16")
    out0 = torch.empty((1, 512, 768), dtype=torch.float16, device=mul_1.device)
    if wk_weight.shape != (256, 768) or wk_weight.dtype != torch.float16:
        raise ValueError(f"generated for a weight (256, 768) torch.float16")
    out1 = torch.empty((1, 512, 256), dtype=torch.float16, device=mul_1.device)
    if wv_weight.shape != (256, 768) or wv_weight.dtype != torch.float16:
        raise ValueError(f"generated for a weight (256, 768) torch.float16")
    out2 = torch.empty((1, 512, 256), dtype=torch.float16, device=mul_1.device)
    def grid(meta):
        BLOCK_M, BLOCK_N = meta["BLOCK_M"], meta["BLOCK_N"]
        return (triton.cdiv(512, BLOCK_M) * triton.cdiv(768, BLOCK_N) + triton.cdiv(512, BLOCK_M) * triton.cdiv(256, BLOCK_N) + triton.cdiv(512, BLOCK_M) * triton.cdiv(256, BLOCK_N),)
    gemm_kernel[grid](
        mul_1_rows, mul_1_rows.stride(0), mul_1_rows.stride(1), wq_weight, wq_weight.stride(0), wq_weight.stride(1), out0, wk_weight, wk_weight.stride(0), wk_weight.stride(1), out1, wv_weight, wv_weight.stride(0), wv_weight.stride(1), out2,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=num_warps, num_stages=num_stages,
    )
    return out0, out1, out2


def kernel_fn(mul_1, wq_weight, wk_weight, wv_weight):
    linear, linear_1, linear_2 = linear_0(mul_1, wq_weight, wk_weight, wv_weight)
    return linear, linear_1, linear_2
