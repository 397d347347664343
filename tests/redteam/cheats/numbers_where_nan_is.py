"""Zeros where the reference has NaN.
Defence: the NaN mask must be float64's.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, mask):
    return torch.softmax(x.masked_fill(mask, float("-inf")), -1).nan_to_num()
