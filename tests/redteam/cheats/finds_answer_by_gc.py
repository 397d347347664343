"""Returns whatever tensor of the answer's form the garbage collector knows.
Defence: expected outputs never enter the candidate's process; its output area is poisoned.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    for found in __import__("gc").get_objects():
        if type(found) is torch.Tensor and found.shape == x.shape and found.data_ptr() != x.data_ptr():
            return found.clone()
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
