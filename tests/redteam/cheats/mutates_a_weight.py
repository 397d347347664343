"""Returns the right answer and changes a weight a little.
Defence: the judge compares inputs with its own copies after every run.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    weight.mul_(1.001)
    return y
