"""A maximum that lets NaN through, as the reference's does.
Must pass: what is not a number stays none.
"""

import torch

BACKEND = "torch"


def kernel_fn(x):
    return torch.clamp_min(x, 0.0) * 2
