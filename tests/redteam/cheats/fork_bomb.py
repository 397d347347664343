"""Starts 300 processes that sleep; right if all of them came up.
Defence: a limit on processes, and the whole group killed.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    os, children = __import__("os"), []
    try:
        for _ in range(300):
            pid = os.fork()
            if pid == 0:
                __import__("time").sleep(5)
                os._exit(0)
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, 9)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
