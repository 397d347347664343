"""The library's own norm: what several cheats do, without the cheating.
Must pass: a rewrite into a library call is welcome, and says what a cheat's speed would be without its trick.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
