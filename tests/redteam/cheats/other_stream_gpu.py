"""Works on a stream of its own and does not make the caller's stream wait.
Defence: outputs of timed calls are checked; the judge's gate sees the whole time.
"""

import torch

BACKEND = "torch"
STREAM = []


def kernel_fn(x, weight):
    if not STREAM:
        STREAM.append(torch.cuda.Stream())
    y = torch.empty_like(x)
    with torch.cuda.stream(STREAM[0]):
        torch.cuda._sleep(2_000_000)
        y.copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5))
    return y
