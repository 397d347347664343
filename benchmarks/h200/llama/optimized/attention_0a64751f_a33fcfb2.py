"""A region of the model as Triton kernels.

Generated from the graph: full, triu, view, getitem, expand, reshape, getitem, expand, reshape, transpose,
transpose, transpose, transpose, matmul, truediv, add, float, softmax, type_as, matmul, transpose,
contiguous, view.
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "fixed"

BLOCK_M = 64  # tuned
BLOCK_N = 64  # tuned
num_warps = 4  # tuned
num_stages = 4  # tuned


@triton.jit
def attention_kernel(q_1_ptr, k_1_ptr, linear_2_ptr, out_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One tile of query rows of one head; keys and values stream past, softmax is kept online."""
    pid_m, pid_h = tl.program_id(0), tl.program_id(1)
    batch, head = pid_h // 12, pid_h % 12
    q_row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lane, v_lane = tl.arange(0, 64), tl.arange(0, 64)
    q = tl.load(q_1_ptr + (head * 64 + lane[None, :] + q_row[:, None] * 768), mask=(q_row[:, None] < 512), other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, 64], dtype=tl.float32)
    row = q_row[:, None]
    row_ok = row < 512
    for start in range(0, tl.minimum(512, (pid_m + 1) * BLOCK_M), BLOCK_N):
        k_row = start + tl.arange(0, BLOCK_N)
        col = k_row[None, :]
        col_ok = col < 512
        k = tl.load(k_1_ptr + (k_row[None, :] * 256 + lane[:, None] + (head // 3) * 64), mask=(k_row[None, :] < 512), other=0.0)
        scores = tl.dot(q, k)
        scores = scores * 0.125
        scores = tl.where(col <= row, scores, float("-inf"))
        scores = tl.where(col_ok, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a row whose scores are all -inf so far must not produce (-inf) - (-inf)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(linear_2_ptr + (k_row[:, None] * 256 + v_lane[None, :] + (head // 3) * 64), mask=(k_row[:, None] < 512), other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        top = new_top
    out = acc / total[:, None]
    where = ((batch * 512 + row) * 12 + head) * 64 + v_lane[None, :]
    tl.store(out_ptr + where, out, mask=row_ok)


def _as_expected(x, shape, stride, dtype):
    """``x`` in the layout this kernel was generated for; copied only if its strides differ."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"generated for {shape} {dtype}, called with {tuple(x.shape)} {x.dtype}")
    if x.stride() == stride or all(n == 1 or a == b for n, a, b in zip(shape, x.stride(), stride)):
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=x.device).copy_(x)


def attention_0(q_1, k_1, linear_2):
    q_1 = _as_expected(q_1, (1, 512, 12, 64), (393216, 768, 64, 1), torch.float16)
    k_1 = _as_expected(k_1, (1, 512, 4, 64), (131072, 256, 64, 1), torch.float16)
    linear_2 = _as_expected(linear_2, (1, 512, 256), (131072, 256, 1), torch.float16)
    out = torch.empty((1, 512, 12, 64), dtype=torch.float16, device=q_1.device)
    grid = (triton.cdiv(512, BLOCK_M), 12)
    attention_kernel[grid](q_1, k_1, linear_2, out, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=num_warps, num_stages=num_stages)
    return out.transpose(1, 2)


def kernel_fn(linear_2, k_1, q_1):
    matmul_1 = attention_0(q_1, k_1, linear_2)
    transpose_4 = matmul_1.transpose(1, 2)
    contiguous = transpose_4.contiguous()
    out_ = contiguous.view(1, 512, -1)
    return out_
