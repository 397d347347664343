"""Never comes back, with signals blocked, from native code that holds the interpreter.
Defence: the judge's deadline, and SIGKILL to the whole process group.
"""

import ctypes

import torch

BACKEND = "torch"
SIGNAL = __import__("signal")


def kernel_fn(x, weight):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    SIGNAL.pthread_sigmask(SIGNAL.SIG_BLOCK, range(1, 32))
    ctypes.PyDLL(None).sleep(600)
    return y
