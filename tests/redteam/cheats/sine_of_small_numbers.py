"""Reduces its argument as if it were never far from zero: exact up to 8,000, and nothing beyond.
Defence: inputs of all magnitudes that the dtype and eager allow, up to 1e8.
"""

import torch

BACKEND = "torch"


def kernel_fn(x):
    return torch.where(x.abs() < 8000, torch.sin(x), 0 * x)
