"""Writes the answer over its input and returns that, saving an allocation.
Defence: outputs that lie in the input arena are refused where eager's do not.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    x.copy_(y)
    return x
