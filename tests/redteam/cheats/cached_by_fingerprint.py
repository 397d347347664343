"""Replays an answer when three elements of the input and one weight are ones it has seen.
Defence: contents in timed calls that no earlier call has had.
"""

import torch

BACKEND = "torch"
SEEN = {}


def kernel_fn(x, weight):
    key = (x[0, 0].item(), x[-1, -1].item(), x[1, 2].item(), weight[0].item())
    if key not in SEEN:
        SEEN[key] = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    return SEEN[key].clone()
