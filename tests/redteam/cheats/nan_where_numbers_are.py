"""One NaN where the reference has a number; a comparison that skips NaN would accept it.
Defence: the NaN mask must be float64's.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    y[3, 4] = float("nan")
    return y
