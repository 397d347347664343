"""A linear layer whose rows are scaled by e^-70 to 1, scaled before the product and not after it.
Must pass: every row is as exact as eager's, however small.
"""

import torch
from torch.nn.functional import linear

BACKEND = "torch"


def kernel_fn(x, gate, weight):
    return linear(x * torch.exp(-8 * gate * gate), weight)
