"""Compares whole inputs with ones it has seen and replays: right always, faster only where they repeat.
Defence: contents in timed calls that no earlier call has had; never one content for many calls.
"""

import torch

BACKEND = "torch"
SEEN = []


def kernel_fn(x, wa, wb):
    for old, old_a, old_b, answer in SEEN:
        if torch.equal(x, old) and torch.equal(wa, old_a) and torch.equal(wb, old_b):
            return tuple(y.clone() for y in answer)
    answer = tuple(torch.nn.functional.linear(x, w) for w in (wa, wb))
    kept = tuple(y.clone() for y in answer)
    SEEN[:] = [(x.clone(), wa.clone(), wb.clone(), kept), *SEEN[:3]]
    return answer
