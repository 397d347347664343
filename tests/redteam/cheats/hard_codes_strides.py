"""Reads its input as if rows were always dense.
Defence: the same values with padded rows.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    x = x.as_strided((64, 256), (256, 1), x.storage_offset())
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
