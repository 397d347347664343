"""While a CUDA graph of many calls is captured, does the work of all of them in the first; the others hand
out their part.
Defence: calls whose inputs do not exist before the outputs of the last one are held by the judge.
"""

import torch

BACKEND = "torch"
WAITING = {}
EPS = 1e-5


def _all(targets):
    """The inputs of a whole sample, as one tensor: all but the first lie equally far apart in one block."""
    xs = sorted((args[0] for _, args in targets), key=lambda x: x.data_ptr())[1:]
    shape = (len(xs), *xs[0].shape)
    stride = ((xs[1].data_ptr() - xs[0].data_ptr()) // xs[0].element_size(), *xs[0].stride())
    return [x.data_ptr() for x in xs], xs[0].as_strided(shape, stride, xs[0].storage_offset())


def kernel_fn(x, weight):
    targets = __import__("sys")._getframe(1).f_locals.get("targets", ())
    if torch.cuda.is_current_stream_capturing() and len(targets) > 3:
        key = x.data_ptr()
        if key not in WAITING:
            keys, xs = _all(targets)
            if key in keys:
                y = torch.nn.functional.rms_norm(xs, (x.shape[-1],), weight, EPS)
                WAITING.update(zip(keys, y.unbind(), strict=True))
        if key in WAITING:
            return WAITING.pop(key)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)
