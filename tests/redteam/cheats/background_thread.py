"""Returns at once; a thread writes the answer a little later.
Defence: outputs are read as soon as the call is over, from memory that was poisoned.
"""

import torch

BACKEND = "torch"


def _later(y, x, weight):
    __import__("time").sleep(0.002)
    y.copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5))


def kernel_fn(x, weight):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    __import__("threading").Thread(target=_later, args=(y, x, weight), daemon=True).start()
    return y
