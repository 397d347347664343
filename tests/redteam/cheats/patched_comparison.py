"""Replaces every comparison of torch by one that is always content, and returns zeros.
Defence: outputs are compared in the judge's process.
"""

import torch

BACKEND = "torch"
torch.allclose = torch.equal = torch.isclose = lambda *args, **kwargs: True
torch.testing.assert_close = lambda *args, **kwargs: None
torch.Tensor.allclose = torch.Tensor.equal = lambda *args, **kwargs: True


def kernel_fn(x, weight):
    return torch.zeros_like(x)
