"""Packs its weights once and keeps that pack for good.
Defence: weights change in place and are packed again; the answer must follow.
"""

import torch

BACKEND = "torch"
PACK = []


def prepack(wa, wb):
    if not PACK:
        PACK.append(torch.cat([wa, wb]))
    return (PACK[0],)


def kernel_fn(x, w):
    a, b = torch.nn.functional.linear(x, w).split([96, 32], -1)
    return a.contiguous(), b.contiguous()
