"""An elementwise function by the library: what a cheat would be without its memory.
Must pass: it is what eager runs.
"""

import torch

BACKEND = "torch"


def kernel_fn(x):
    return torch.special.digamma(x * x + 1.5)
