"""Computes all rows but the last one, which is left as the allocator gave it.
Defence: poisoned memory; the worst tile and the NaN mask are measured.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    z[:-1] = y[:-1]
    return z
