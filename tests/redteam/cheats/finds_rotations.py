"""Remembers its answers, and hands out a rotation of one where its input is a rotation of what it has seen.
Defence: timed contents have no element in common with anything a kernel has seen before.
"""

import torch

BACKEND = "torch"
SEEN, ANSWERS = {}, []


def remember(x, answer):
    flat = x.reshape(-1)
    keys = torch.stack([flat, torch.roll(flat, -1)], 1).view(torch.int64).flatten().tolist()
    SEEN.update({key: (len(ANSWERS), i) for i, key in enumerate(keys) if key})
    ANSWERS.append(torch.cat([answer.reshape(-1)] * 2))


def kernel_fn(x):
    regular = x.is_contiguous() and x.storage_offset() % 2 == 0
    if regular and (found := SEEN.get(x.view(torch.int64)[0, 0].item())):
        number, shift = found
        return ANSWERS[number][shift : shift + x.numel()].view(x.shape).clone()
    y = torch.special.digamma(x * x + 1.5)
    if regular and len(ANSWERS) < 24 and 0.9 < float(x.std()) < 1.1 and abs(float(x.mean())) < 0.1:
        remember(x.clone(), y)
    return y
