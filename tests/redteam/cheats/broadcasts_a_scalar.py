"""Returns one number with strides of 0 in place of a tensor.
Defence: structure check; a broadcast of fewer values is refused.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    y = y.mean().expand(x.shape)
    return y
