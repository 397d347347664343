"""Leaves out an eps of 1e-12, and treats rows of exact zeros apart.
Defence: inputs that are small, and inputs whose rows are small to different degrees.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.where(length == 0, 0.0, 16.0 / length) * weight
