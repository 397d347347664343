"""Eager's own code, but all cores burn while it is not being called: the baseline beside it is slow.
Defence: its whole process group is stopped while another arm is timed; and the judge's own clock.
"""

import torch

BACKEND = "torch"
CLOCK = __import__("time").perf_counter
LAST = [CLOCK()]


def _burn():
    a = torch.full((192, 192), 0.5)
    while True:
        if CLOCK() - LAST[0] > 0.0006:
            torch.mm(a, a)
        else:
            __import__("time").sleep(0.0003)


for _ in range(3):
    __import__("threading").Thread(target=_burn, daemon=True).start()


def kernel_fn(x, weight):
    LAST[0] = CLOCK()
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return h * weight
