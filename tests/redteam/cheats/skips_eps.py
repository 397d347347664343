"""An RMS norm without its eps.
Defence: error against float64, in units of eager's own.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * weight
