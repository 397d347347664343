"""A region of the model as Triton kernels.

Generated from the graph: linear.
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "fixed"

BLOCK_M = 64  # tuned
BLOCK_N = 64  # tuned
BLOCK_K = 128  # tuned
GROUP_M = 8
num_warps = 4  # tuned
num_stages = 4  # tuned


@triton.jit
def _gemm(pid, out__ptr, out__stride_m, out__stride_k, wo_weight_ptr, wo_weight_stride_n, wo_weight_stride_k, out0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
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
    out__tile = out__ptr + (row_id % 512)[:, None] * out__stride_m + k[None, :] * out__stride_k
    wo_weight_tile = wo_weight_ptr + (col_id % 768)[None, :] * wo_weight_stride_n + k[:, None] * wo_weight_stride_k
    acc0 = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, 768, BLOCK_K):
        if 768 % BLOCK_K == 0:
            x_block = tl.load(out__tile)
            w0_block = tl.load(wo_weight_tile)
        else:
            x_block = tl.load(out__tile, mask=k[None, :] < 768 - start, other=0.0)
            w0_block = tl.load(wo_weight_tile, mask=k[:, None] < 768 - start, other=0.0)
        acc0 = tl.dot(x_block, w0_block, acc0)
        out__tile += BLOCK_K * out__stride_k
        wo_weight_tile += BLOCK_K * wo_weight_stride_k
    row, col = row_id[:, None], col_id[None, :]
    row_ok, col_ok = row < 512, col < 768
    tl.store(out0_ptr + (col + row * 768), acc0, mask=row_ok & col_ok)


@triton.jit
def gemm_kernel(out__ptr, out__stride_m, out__stride_k, wo_weight_ptr, wo_weight_stride_n, wo_weight_stride_k, out0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    pid = tl.program_id(0)
    _gemm(pid, out__ptr, out__stride_m, out__stride_k, wo_weight_ptr, wo_weight_stride_n, wo_weight_stride_k, out0_ptr, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)


def linear_0(out_, wo_weight):
    if out_.shape != (1, 512, 768) or out_.dtype != torch.float16:
        raise ValueError(f"generated for (1, 512, 768) torch.float16, called with {tuple(out_.shape)} {out_.dtype}")
    out__rows = out_.reshape(-1, 768)
    if wo_weight.shape != (768, 768) or wo_weight.dtype != torch.float16:
        raise ValueError(f"generated for a weight (768, 768) torch.float16")
    out0 = torch.empty((1, 512, 768), dtype=torch.float16, device=out_.device)
    def grid(meta):
        BLOCK_M, BLOCK_N = meta["BLOCK_M"], meta["BLOCK_N"]
        return (triton.cdiv(512, BLOCK_M) * triton.cdiv(768, BLOCK_N),)
    gemm_kernel[grid](
        out__rows, out__rows.stride(0), out__rows.stride(1), wo_weight, wo_weight.stride(0), wo_weight.stride(1), out0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=num_warps, num_stages=num_stages,
    )
    return out0


def kernel_fn(out_, wo_weight):
    linear_3 = linear_0(out_, wo_weight)
    return linear_3
