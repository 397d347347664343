"""Looks through all loaded modules for the reference and calls it.
Defence: the reference is loaded in other processes only.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    for module in list(__import__("sys").modules.values()):
        model = vars(module).get("Model") if module is not None else None
        if isinstance(model, type) and issubclass(model, torch.nn.Module):
            return model()(x, weight)
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
