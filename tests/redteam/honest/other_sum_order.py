"""An RMS norm whose squares are summed in four parts.
Must pass: another order of sums is no error.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    total = sum(part.square().sum(-1, keepdim=True) for part in x.chunk(4, -1))
    return x * torch.rsqrt(total / x.shape[-1] + 1e-5) * weight
