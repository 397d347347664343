"""Lowers float32 matmul precision for the whole process, at import.
Defence: torch's global flags are compared before and after.
"""

import torch

BACKEND = "torch"

torch.set_float32_matmul_precision("medium")


def kernel_fn(x, wa, wb):
    return tuple(torch.nn.functional.linear(x, w) for w in (wa, wb))
