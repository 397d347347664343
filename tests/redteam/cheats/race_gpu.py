"""Rows of one tile add into the same cells without atomics: right only if nobody interferes.
Defence: outputs of every timed call are checked (and racecheck in the audit).
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"


@triton.jit
def _sum_of_squares(X, S, N, PART: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    x = tl.load(X + row * N + part * PART + tl.arange(0, PART))
    seen = tl.load(S + row)
    tl.store(S + row, seen + tl.sum(x * x))


def kernel_fn(x, weight):
    x = x.contiguous()
    total = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
    _sum_of_squares[(x.shape[0], x.shape[1] // 32)](x, total, x.shape[1], PART=32)
    return x * torch.rsqrt(total[:, None] / x.shape[1] + 1e-5) * weight
