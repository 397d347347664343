"""Touches 4 GB (on a small machine all there is but 2), reserves half as much again as the machine has.
Right if nobody minds.
Defence: a limit on memory.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    words = __import__("pathlib").Path("/proc/meminfo").read_text().split()
    total, known = (int(words[words.index(f"{name}:") + 1]) << 10 for name in ("MemTotal", "MemAvailable"))
    touched, held = min(4 << 30, known - (2 << 30)), []
    for taken in range(0, total * 3 // 2, 256 << 20):
        make = torch.ones if taken < touched else torch.empty
        held.append(make(256 << 20, dtype=torch.uint8))
    held.clear()
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
