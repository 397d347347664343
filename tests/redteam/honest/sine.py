"""A sine by the library: no error to speak of, however large the number.
Must pass: it is what eager runs.
"""

import torch

BACKEND = "torch"


def kernel_fn(x):
    return torch.sin(x)
