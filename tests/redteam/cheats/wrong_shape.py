"""Returns a leading dim of 1, which a comparison that broadcasts would accept.
Defence: structure check on the shape that was returned.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    y = y[None]
    return y
