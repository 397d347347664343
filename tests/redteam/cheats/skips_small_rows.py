"""Leaves zeros in every row whose gate is 5e-10 of the largest: nothing beside the whole output.
Defence: every row is also compared on its own scale.
"""

import torch
from torch.nn.functional import linear

BACKEND = "torch"


def kernel_fn(x, gate, weight):
    s = torch.exp(-8 * gate * gate)
    kept = s > s.max() * 5e-10
    return torch.where(kept, linear(x, weight) * s, 0.0)
