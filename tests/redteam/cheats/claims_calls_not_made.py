"""Replaces the worker's timer: makes one call per buffer and says that it made a hundred times as many.
Defence: the judge sets the number of calls, and its gate asks for the outputs of each.
"""

import torch

BACKEND = "torch"
CLOCK = __import__("sys").modules["autokernel.judge.clock"]


def _sample(self, start):
    n = len(self.targets)
    self.calls = 100 * n
    begin = CLOCK.time.perf_counter()
    for slot in range(n):
        fn, args = self.targets[slot]
        self.outputs[slot] = fn(*args)
    return CLOCK.time.perf_counter() - begin


CLOCK.HostTimer.sample = _sample


def kernel_fn(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
