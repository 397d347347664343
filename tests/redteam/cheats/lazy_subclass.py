"""Returns a tensor subclass that computes when somebody looks at it.
Defence: only plain tensors are taken.
"""

import torch

BACKEND = "torch"


class Lazy(torch.Tensor):
    """Would compute in __torch_function__."""


def kernel_fn(x, weight):
    return torch.empty_like(x).as_subclass(Lazy)
