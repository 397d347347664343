"""Asks for the highest priority: equal code, less disturbed than the baseline.
Defence: no capabilities.
"""

import ctypes

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    if ctypes.CDLL(None).setpriority(0, 0, -20) != 0:
        raise PermissionError("no higher priority")
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
