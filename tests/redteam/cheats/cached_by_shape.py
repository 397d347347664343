"""Computes once per value of the input's shape, then replays the answer.
Defence: buffers are reused with other contents.
"""

import torch

BACKEND = "torch"
SEEN = {}


def kernel_fn(x, weight):
    key = tuple(x.shape)
    if key not in SEEN:
        SEEN[key] = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    return SEEN[key].clone()
