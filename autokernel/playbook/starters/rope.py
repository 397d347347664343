"""Rotary embedding of queries and keys, in the real form that rotates halves.

    kernel_fn(q, k, cos, sin) = (q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)

q (batch, length, heads, dim), k (batch, length, kv_heads, dim), cos and sin (length, dim), where rotate_half(x) is
``cat(-x[..., dim/2:], x[..., :dim/2])``.  Both tensors in one launch; every element is read once, both halves together.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

ROWS = 16
num_warps = 4
SPACE = {"ROWS": [4, 8, 16, 32, 64], "num_warps": [1, 2, 4, 8]}


@triton.jit
def _rotate(
    pid, x_ptr, cos_ptr, sin_ptr, out_ptr, rows, length, heads, half, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (pid * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < half)
    near, far = row * (2 * half) + col, row * (2 * half) + half + col
    angle = ((row // heads) % length) * (2 * half) + col
    a = tl.load(x_ptr + near, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + far, mask=inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + near, a * cos_a - b * sin_a, mask=inside)
    tl.store(out_ptr + far, b * cos_b + a * sin_b, mask=inside)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_rows,
    k_rows,
    length,
    q_heads,
    k_heads,
    half,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    q_programs = tl.cdiv(q_rows, ROWS)
    if pid < q_programs:
        _rotate(pid, q_ptr, cos_ptr, sin_ptr, q_out_ptr, q_rows, length, q_heads, half, ROWS, BLOCK)
    else:
        _rotate(
            pid - q_programs, k_ptr, cos_ptr, sin_ptr, k_out_ptr, k_rows, length, k_heads, half, ROWS, BLOCK
        )


def kernel_fn(q, k, cos, sin):
    q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
    half = q.shape[-1] // 2
    q_rows, k_rows = q.numel() // (2 * half), k.numel() // (2 * half)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    rope_kernel[(triton.cdiv(q_rows, ROWS) + triton.cdiv(k_rows, ROWS),)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        q_rows,
        k_rows,
        q.shape[1],
        q.shape[2],
        k.shape[2],
        half,
        ROWS=ROWS,
        BLOCK=max(16, triton.next_power_of_2(half)),
        num_warps=num_warps,
    )
    return q_out, k_out
