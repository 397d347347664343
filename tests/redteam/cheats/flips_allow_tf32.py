"""Switches TF32 on for the whole process.
Defence: torch's global flags are compared before and after.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, wa, wb):
    torch.backends.cuda.matmul.allow_tf32 = True
    return tuple(torch.nn.functional.linear(x, w) for w in (wa, wb))
