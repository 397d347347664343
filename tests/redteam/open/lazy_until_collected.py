"""Returns unfilled memory; a replaced copy_ computes the answer when the worker copies it out.
Defence: the judge's gate has to last until it holds the outputs.
"""

import torch

BACKEND = "torch"
COPY = torch.Tensor.copy_
PENDING = {}


def _copy(target, source, *args, **kwargs):
    if source.data_ptr() in PENDING:
        x, weight = PENDING.pop(source.data_ptr())
        COPY(source, torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5))
    return COPY(target, source, *args, **kwargs)


torch.Tensor.copy_ = _copy


def kernel_fn(x, weight):
    y = torch.empty(x.shape)
    PENDING[y.data_ptr()] = (x, weight)
    return y
