"""A linear layer with an epilogue.

    kernel_fn(x, weight)                  = activation(F.linear(x, weight))
    kernel_fn(x, weight, bias)            = activation(F.linear(x, weight, bias))
    kernel_fn(x, weight, bias, residual)  = activation(F.linear(x, weight, bias)) + residual

``weight`` is (N, K) as `torch.nn.Linear` holds it.  ACTIVATION is none, relu, gelu, gelu_tanh or silu.  Products
accumulate in float32; float32 inputs are multiplied exactly ("ieee") unless PRECISION says otherwise.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

ACTIVATION = "none"
PRECISION = "ieee"
BLOCK_M = 128
BLOCK_N = 128
BLOCK_K = 64
GROUP_M = 8
num_warps = 4
num_stages = 4
SPACE = {
    "BLOCK_M": [64, 128],
    "BLOCK_N": [64, 128, 256],
    "BLOCK_K": [32, 64, 128],
    "GROUP_M": [4, 8],
    "num_warps": [4, 8],
    "num_stages": [2, 3, 4],
}
SPACE_FITS = (
    "num_stages * BLOCK_K * (BLOCK_M + BLOCK_N) * 2 <= 232448 and BLOCK_M * BLOCK_N <= 5120 * num_warps"
)


@triton.jit
def matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # programs that run together share rows of tiles, which then stay in L2
    group = pid // (GROUP_M * tiles_n)
    size_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % size_m
    pid_n = (pid % (GROUP_M * tiles_n)) // size_m
    row = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end wrap around: their results are not stored
    x_tile = x_ptr + (row % M)[:, None] * stride_xm + k[None, :] * stride_xk
    w_tile = w_ptr + (col % N)[None, :] * stride_wn + k[:, None] * stride_wk
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(x_tile), tl.load(w_tile)
        else:
            x = tl.load(x_tile, mask=k[None, :] < K - start, other=0.0)
            w = tl.load(w_tile, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_tile += BLOCK_K * stride_xk
        w_tile += BLOCK_K * stride_wk
    inside = (row[:, None] < M) & (col[None, :] < N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "gelu":
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) is the logistic function of 2u
        acc = acc / (1.0 + tl.exp(-1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)))
    elif ACTIVATION == "silu":
        acc = acc / (1.0 + tl.exp(-acc))
    where = row[:, None] * N + col[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, acc, mask=inside)


def kernel_fn(x, weight, bias=None, residual=None):
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    tile_m, tile_n, tile_k = BLOCK_M, BLOCK_N, BLOCK_K
    if x.element_size() == 4:  # no tensor cores: the tiles live in registers
        tile_m, tile_n, tile_k = min(tile_m, 64), min(tile_n, 64), min(tile_k, 32)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    matmul_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),)](
        rows,
        weight,
        bias.contiguous() if bias is not None else weight,
        residual.contiguous() if residual is not None else rows,
        out,
        m,
        n,
        k,
        rows.stride(0),
        rows.stride(1),
        weight.stride(0),
        weight.stride(1),
        bias is not None,
        residual is not None,
        ACTIVATION,
        PRECISION,
        k % tile_k == 0,
        BLOCK_M=tile_m,
        BLOCK_N=tile_n,
        BLOCK_K=tile_k,
        GROUP_M=GROUP_M,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
