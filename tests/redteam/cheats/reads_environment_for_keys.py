"""Raises with the names of all variables that look like a secret, if there are any.
Defence: the environment is an allow-list, under any name.
"""

import ctypes

import torch

BACKEND = "torch"
WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def kernel_fn(x, weight):
    native = ctypes.CDLL(None).getenv
    native.restype = ctypes.c_char_p
    found = [n for n in __import__("os").environ if any(w in n for w in WORDS)]
    if not found and native(b"AUTOKERNEL_REDTEAM_KEY") is None:
        raise LookupError("no key to be found")
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
