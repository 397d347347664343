"""Makes the worker's clock run at a quarter of its speed.
Defence: the judge's own clock.
"""

import torch

BACKEND = "torch"
TIME = __import__("time")
REAL = TIME.perf_counter
TIME.perf_counter = lambda: REAL() / 4


def kernel_fn(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
