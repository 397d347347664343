"""Right, after twenty useless passes.
Must pass as correct, and be discarded as slow.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    for _ in range(20):
        y = y + 0
    return y
