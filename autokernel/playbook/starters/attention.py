"""Flash-style attention, forward.

    kernel_fn(q, k, v)        = F.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL, enable_gqa=True)
    kernel_fn(q, k, v, mask)  = the same with an additive mask that broadcasts against (batch, heads, rows, columns)

q (batch, heads, rows, dim); k and v (batch, kv_heads, columns, dim), heads a multiple of kv_heads; dim up to 256; any
strides.  SCALE None means 1 / sqrt(dim).  Keys and values stream past one tile of queries; the softmax is kept online in
float32; with CAUSAL, tiles above the diagonal are never read.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import math

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

CAUSAL = True
SCALE = None
PRECISION = "ieee"
BLOCK_M = 128
BLOCK_N = 64
num_warps = 8
num_stages = 3
SPACE = {"BLOCK_M": [32, 64, 128], "BLOCK_N": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]}


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    rows,
    columns,
    dim,
    heads,
    repeats,
    scale,
    q_batch,
    q_head,
    q_row,
    q_dim,
    k_batch,
    k_head,
    k_row,
    k_dim,
    v_batch,
    v_head,
    v_row,
    v_dim,
    mask_batch,
    mask_head,
    mask_row,
    mask_col,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_m, pid_h = tl.program_id(0), tl.program_id(1)
    batch, head = (pid_h // heads).to(tl.int64), (pid_h % heads).to(tl.int64)
    kv_head = head // repeats
    row, lane = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    mask_ptr += batch * mask_batch + head * mask_head
    q_inside = (row[:, None] < rows) & (lane[None, :] < dim)
    q = tl.load(q_ptr + row[:, None] * q_row + lane[None, :] * q_dim, mask=q_inside, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    end = columns
    if CAUSAL:
        end = tl.minimum(columns, (pid_m + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        k_at = k_ptr + col[None, :] * k_row + lane[:, None] * k_dim
        k = tl.load(k_at, mask=(col[None, :] < columns) & (lane[:, None] < dim), other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_MASK:
            at = mask_ptr + row[:, None].to(tl.int64) * mask_row + col[None, :] * mask_col
            scores += tl.load(at, mask=(row[:, None] < rows) & (col[None, :] < columns), other=0.0).to(
                tl.float32
            )
        visible = col[None, :] < columns
        if CAUSAL:
            visible = visible & (col[None, :] <= row[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a row whose scores are all -inf so far must not produce (-inf) - (-inf)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        v_at = v_ptr + col[:, None] * v_row + lane[None, :] * v_dim
        v = tl.load(v_at, mask=(col[:, None] < columns) & (lane[None, :] < dim), other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing is 0
    at = ((batch * heads + head) * rows + row[:, None]) * dim + lane[None, :]
    tl.store(out_ptr + at, acc / total[:, None], mask=q_inside)


def kernel_fn(q, k, v, mask=None):
    batch, heads, rows, dim = q.shape
    columns = k.shape[2]
    tile_m, tile_n, warps = BLOCK_M, BLOCK_N, num_warps
    if q.element_size() == 4:  # no tensor cores: the tiles live in registers
        tile_m, tile_n, warps = min(tile_m, 32), min(tile_n, 32), 4
    out = torch.empty((batch, heads, rows, dim), dtype=q.dtype, device=q.device)
    full = mask.expand(batch, heads, rows, columns) if mask is not None else q
    attention_kernel[(triton.cdiv(rows, tile_m), batch * heads)](
        q,
        k,
        v,
        full,
        out,
        rows,
        columns,
        dim,
        heads,
        heads // k.shape[1],
        SCALE if SCALE is not None else 1.0 / math.sqrt(dim),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *full.stride(),
        CAUSAL,
        mask is not None,
        PRECISION,
        BLOCK_M=tile_m,
        BLOCK_N=tile_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=warps,
        num_stages=num_stages,
    )
    return out
