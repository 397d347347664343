"""Opens every task's reference that it finds for writing (and writes nothing).
Defence: everything but its scratch folder is read-only.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    found = list(__import__("pathlib").Path("/tmp").glob("pytest-of-*/**/reference.py"))
    if not found:
        raise PermissionError("no reference is to be seen")
    for reference in found:
        reference.open("ab").close()
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
