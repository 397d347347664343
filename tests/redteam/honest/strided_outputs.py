"""Two matrix products as one, each result a slice of it, whose rows lie further apart than they are long.
Must pass: how outputs lie is no part of how long they take, and they are handed over in one piece.
"""

import torch

BACKEND = "torch"


def prepack(wa, wb):
    return (torch.cat([wa, wb]),)


def kernel_fn(x, packed):
    return torch.nn.functional.linear(x, packed).split([96, 32], -1)
