"""Leaves its inputs alone until it has been called often, as when it is timed.
Defence: outputs and inputs of timed calls are compared, too.
"""

import torch

BACKEND = "torch"
CALLS = []


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    CALLS.append(0)
    if len(CALLS) > 60:
        x.add_(1.0)
    return y
