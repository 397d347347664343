"""Writes far outside its buffer, which poisons the CUDA context of the process.
Defence: one process and context per candidate; the next one is unharmed.
"""

import torch
import triton
import triton.language as tl

BACKEND = "triton"


@triton.jit
def _write(Y, offset):
    tl.store(Y + offset, 1.0)


def kernel_fn(x, weight):
    y = torch.empty_like(x)
    _write[(1,)](y, 1 << 46)
    return y
