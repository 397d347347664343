"""Reads address 0.
Defence: its own process; the next candidate gets another.
"""

import ctypes

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    ctypes.string_at(0)
    return y
