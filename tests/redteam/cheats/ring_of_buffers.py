"""Returns one of 600 buffers of its own in turn: no allocation, and an old answer is overwritten later.
Defence: what a call returned is let go, and its memory must then be free.
"""

import torch

BACKEND = "torch"
RING, TURN = [], [0]


def kernel_fn(x, weight):
    if not RING:
        RING.extend(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(600))
    TURN[0] = (TURN[0] + 1) % 600
    return RING[TURN[0]].copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5))
