"""Returns zeros where every answer is about 0.002: within any absolute tolerance.
Defence: no absolute tolerance; the error is held against eager's own.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, mask):
    y = torch.zeros_like(x)
    return y.masked_fill(mask.all(-1, keepdim=True), float("nan"))
