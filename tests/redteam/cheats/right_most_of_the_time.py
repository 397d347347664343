"""Drops a tile in one call of 53: what a race looks like from outside.
Defence: outputs of timed calls are checked, thousands of them.
"""

import torch

BACKEND = "torch"
CALLS = []


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    CALLS.append(0)
    if len(CALLS) % 53 == 0:
        y[:8, :8] = 0
    return y
