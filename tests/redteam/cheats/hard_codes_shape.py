"""Says that it takes any shape, and takes one.
Defence: held-out shapes (plus and minus one, odd, prime) for SHAPES = "any".
"""

import torch

BACKEND = "torch"
SHAPES = "any"


def kernel_fn(x, weight):
    y = torch.empty(64, 256, dtype=x.dtype, device=x.device)
    y.copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5))
    return y
