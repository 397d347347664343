"""Rotary embedding of queries and keys, in the complex form of Meta's Llama.

    kernel_fn(q, k, freqs_cis) = the pairs (x[2i], x[2i + 1]) of q and k, as complex numbers, times freqs_cis

q (batch, length, heads, dim), k (batch, length, kv_heads, dim), freqs_cis (length, dim / 2) complex64.  Pairs are loaded
and stored as wide rows and split in registers, so memory access stays contiguous.
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
    pid, x_ptr, angle_ptr, out_ptr, rows, length, heads, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (pid * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < dim)
    x = tl.load(x_ptr + row * dim + col, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(angle_ptr + ((row // heads) % length) * dim + col, mask=inside, other=0.0).to(tl.float32)
    re, im = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    cos, sin = tl.split(tl.reshape(angle, [ROWS, BLOCK // 2, 2]))
    out = tl.interleave(re * cos - im * sin, re * sin + im * cos)
    tl.store(out_ptr + row * dim + col, out, mask=inside)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    angle_ptr,
    q_out_ptr,
    k_out_ptr,
    q_rows,
    k_rows,
    length,
    q_heads,
    k_heads,
    dim,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    q_programs = tl.cdiv(q_rows, ROWS)
    if pid < q_programs:
        _rotate(pid, q_ptr, angle_ptr, q_out_ptr, q_rows, length, q_heads, dim, ROWS, BLOCK)
    else:
        _rotate(pid - q_programs, k_ptr, angle_ptr, k_out_ptr, k_rows, length, k_heads, dim, ROWS, BLOCK)


def kernel_fn(q, k, freqs_cis):
    q, k = q.contiguous(), k.contiguous()
    angles = torch.view_as_real(freqs_cis.resolve_conj().contiguous())
    dim = q.shape[-1]
    q_rows, k_rows = q.numel() // dim, k.numel() // dim
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    rope_kernel[(triton.cdiv(q_rows, ROWS) + triton.cdiv(k_rows, ROWS),)](
        q,
        k,
        angles,
        q_out,
        k_out,
        q_rows,
        k_rows,
        q.shape[1],
        q.shape[2],
        k.shape[2],
        dim,
        ROWS=ROWS,
        BLOCK=max(16, triton.next_power_of_2(dim)),
        num_warps=num_warps,
    )
    return q_out, k_out
