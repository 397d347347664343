"""CUDA events that report a tenth of the time.
Defence: the judge's own clock.
"""

import torch

BACKEND = "torch"
REAL = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, end: REAL(self, end) / 10


def kernel_fn(x, weight):
    for _ in range(50):
        y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    return y
