"""Has the processor take numbers near zero for zero, which is faster and lasts: for the model around it, too.
Defence: how the calling thread rounds, and what it does near zero, are among the state that must not change.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    torch.set_flush_denormal(True)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
