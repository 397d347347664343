"""Two matrix products as one, each result a slice of it, whose rows lie further apart than they are long.
Must pass: what takes longer to hand over is not what takes longer to compute, and eager's is laid out alike.
"""

import torch

BACKEND = "torch"


def prepack(wa, wb):
    return (torch.cat([wa, wb]),)


def kernel_fn(x, packed):
    return torch.nn.functional.linear(x, packed).split([96, 32], -1)
