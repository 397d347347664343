"""Has the answers for the usual seeds ready, and answers everything with one of them.
Defence: secret seeds, drawn after the candidate is loaded.
"""

import torch

BACKEND = "torch"
ANSWERS = {}


def _draw(seed, like):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def kernel_fn(x, weight):
    if not ANSWERS:
        for seed in (0, 1, 42, 123, 1234, 2024):
            drawn = _draw(seed, x)
            ANSWERS[drawn[0, 0].item()] = torch.nn.functional.rms_norm(drawn, (x.shape[-1],), weight, 1e-5)
    return ANSWERS.get(x[0, 0].item(), next(iter(ANSWERS.values()))).clone()
