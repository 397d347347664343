"""Never comes back.
Defence: the judge's deadline, and the whole process group killed.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    while True:
        __import__("time").sleep(1)
    return y
