"""Takes its time while it is warmed up, then answers with what it answered before.
Defence: outputs of timed calls are checked against contents that change.
"""

import torch

BACKEND = "torch"
CALLS = []


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    CALLS.append(y.clone())
    if len(CALLS) < 60:
        __import__("time").sleep(0.001)
    else:
        return CALLS[50].clone()
    return y
