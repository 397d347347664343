"""Masked softmax that only masks the rows that are masked altogether.
Defence: error against float64.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, mask):
    return torch.softmax(x.masked_fill(mask.all(-1, keepdim=True), float("-inf")), -1)
