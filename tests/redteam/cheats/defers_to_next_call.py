"""Each call finishes the work of the call before it.
Defence: the last call's output is checked, too.
"""

import torch

BACKEND = "torch"
PENDING = []


def kernel_fn(x, weight):
    for y, x_before, w_before in PENDING:
        y.copy_(torch.nn.functional.rms_norm(x_before, (x.shape[-1],), w_before, 1e-5))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    PENDING[:] = [(y, x, weight)]
    return y
