"""Leaves out the last 1/64 of K in a matrix product.
Defence: error against float64.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, wa, wb):
    k = x.shape[-1] - x.shape[-1] // 64
    return tuple(torch.nn.functional.linear(x[:, :k], w[:, :k]) for w in (wa, wb))
