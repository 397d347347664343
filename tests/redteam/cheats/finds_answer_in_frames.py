"""Walks up the stack for an expected output, and into the objects it meets there.
Defence: expected outputs never enter the candidate's process; its output area is poisoned.
"""

import torch

BACKEND = "torch"


def _search(value, x, depth=0):
    if type(value) is torch.Tensor:
        return value if value.shape == x.shape and value.data_ptr() != x.data_ptr() else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    inner = [*inner, *getattr(value, "__dict__", {}).values()]
    found = (_search(item, x, depth + 1) for item in inner) if depth < 4 else ()
    return next((item for item in found if item is not None), None)


def kernel_fn(x, weight):
    frame = __import__("sys")._getframe(1)
    while frame is not None:
        for name, value in frame.f_locals.items():
            if name == "self" or "expect" in name or "exact" in name or "eager" in name:
                found = _search(getattr(value, "outputs", value), x)
                if found is not None:
                    return found.clone()
        frame = frame.f_back
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
