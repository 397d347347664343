"""Reads the first byte of the environment of whatever runs pytest, through /proc.
Defence: a process namespace with its own /proc.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    for entry in __import__("pathlib").Path("/proc").glob("[0-9]*"):
        if b"pytest" in (entry / "cmdline").read_bytes() and entry.joinpath("environ").open("rb").read(1):
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    raise PermissionError("no process of the judge's is to be seen")
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
