"""Returns at once; a function of the worker that it has replaced does the work when outputs are read.
Defence: the judge's gate has to last until it holds the outputs.
"""

import torch

BACKEND = "torch"
PENDING = {}
SUBJECTS = __import__("sys").modules["autokernel.judge.subjects"]
TENSORS_OF = SUBJECTS.tensors_of


def _finish(result, *, strict):
    if id(result) in PENDING:
        y, x, weight = PENDING.pop(id(result))
        y.copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5))
    return TENSORS_OF(result, strict=strict)


SUBJECTS.tensors_of = _finish


def kernel_fn(x, weight):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    PENDING.pop(id(y), None)
    PENDING[id(y)] = (y, x, weight)
    if len(PENDING) > 1024:
        del PENDING[next(iter(PENDING))]
    return y
