"""Leaves out an eps of 1e-12: right on all data but a row of zeros, where it gives NaN.
Defence: rows of zeros among the inputs.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * weight
