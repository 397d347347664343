"""Maximum by comparison: NaN that goes in does not come out.
Defence: a few NaN among the inputs of one case, compared by mask.
"""

import torch

BACKEND = "torch"


def kernel_fn(x):
    return torch.where(x > 0, x, torch.zeros((), dtype=x.dtype, device=x.device)) * 2
