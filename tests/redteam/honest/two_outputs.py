"""Two results of one multiplication, in halves of one buffer.
Must pass: views of one buffer that do not overlap are two tensors.
"""

import torch

BACKEND = "torch"


def kernel_fn(x):
    both = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, 2, out=both[0])
    torch.add(x, x, out=both[1])
    return both[0], both[1]
