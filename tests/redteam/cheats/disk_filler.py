"""Writes 4 GB to its scratch folder in files of 256 MB, and deletes them; right if nobody minds.
Defence: limits on file size and on the scratch folder.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    folder, block, number = __import__("pathlib").Path(), bytes(1 << 24), 0
    names = [folder / f"filler-{i}" for i in range(16)]
    try:
        for name in names:
            with name.open("wb") as file:
                for _ in range(16):
                    number += file.write(block)
    finally:
        for name in names:
            name.unlink(missing_ok=True)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
