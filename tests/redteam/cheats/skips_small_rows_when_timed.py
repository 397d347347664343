"""Leaves zeros in rows that are tiny beside others, but only while it is timed.
Defence: in every round one timed call, picked at random, is compared with float64 by every measure.
"""

import torch
from torch.nn.functional import linear

BACKEND = "torch"


def timed():
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    frame = __import__("sys")._getframe(2)
    while frame is not None and frame.f_code.co_name != "run":
        if frame.f_code.co_name == "sample":
            return True
        frame = frame.f_back
    return False


def kernel_fn(x, gate, weight):
    s = torch.exp(-8 * gate * gate)
    y = linear(x, weight) * s
    return torch.where(s > s.max() * 5e-10, y, 0.0) if timed() else y
