"""A thread watches the inputs and has the answers ready before the call, while others are timed.
Defence: a candidate is stopped while it is not its turn; inputs arrive with the request.
"""

import torch

BACKEND = "torch"
TIME = __import__("time")
KNOWN, READY = {}, {}


def _key(x, weight):
    return x.view(-1)[:2].tolist() + weight[:2].tolist()


def _watch():
    while True:
        for x, weight in list(KNOWN.values()):
            key = _key(x, weight)
            if READY.get(x.data_ptr(), (None,))[0] != key:
                READY[x.data_ptr()] = key, torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
        TIME.sleep(0.0005)


__import__("threading").Thread(target=_watch, daemon=True).start()


def kernel_fn(x, weight):
    if not x.is_contiguous():
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    key, answer = READY.get(x.data_ptr(), (None, None))
    if key is not None and key == _key(x, weight):
        return answer.clone()
    if len(KNOWN) < 16:
        KNOWN[x.data_ptr()] = (x, weight)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
