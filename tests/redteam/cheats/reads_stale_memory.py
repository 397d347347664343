"""Returns fresh memory, hoping that a freed answer still lies in it.
Defence: freed memory and output areas are poisoned before each run.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
