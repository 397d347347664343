"""Linear with its 50257 output features padded to 50304.

Takes the place of lm_head.
"""

import torch
import torch.nn.functional as F

from autokernel.backends.packing import pad_rows

BACKEND = "torch"


def prepack(wte_weight):
    return (pad_rows(wte_weight, 47),)


def kernel_fn(layer_norm_24, weight):
    padded = F.linear(layer_norm_24, weight)
    linear_48 = padded[..., :50257]
    return linear_48
