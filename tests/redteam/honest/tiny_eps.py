"""An RMS norm by the library, with the reference's eps of 1e-12.
Must pass: right on rows of zeros, too.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-12)
