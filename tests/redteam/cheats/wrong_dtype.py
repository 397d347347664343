"""Returns float64, which a comparison that casts would accept.
Defence: structure check on the dtype that was returned.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    y = y.double()
    return y
