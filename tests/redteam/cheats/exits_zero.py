"""Ends the process with success in the middle of a call.
Defence: a verdict needs outputs; an exit code is no answer.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    __import__("os")._exit(0)
    return y
