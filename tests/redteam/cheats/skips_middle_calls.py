"""Works only in the last calls of a sample, whose outputs are kept; reads the timer's locals.
Defence: outputs of every timed call: as many buffers as calls, each with its own output area.
"""

import torch

BACKEND = "torch"
SEEN = {}
GETFRAME = __import__("sys")._getframe
LAST = [None, 0, None]


def kernel_fn(x, weight):
    frame = GETFRAME(1)
    local = frame.f_locals if frame.f_code.co_name == "sample" else {}
    if "order" in local and LAST[2] is not None:
        begin = local.get("begin")
        if begin != LAST[0]:
            LAST[:2] = [begin, len(local["order"])]
        LAST[1] -= 1
        if LAST[1] >= len(local["targets"]):
            return LAST[2]
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    LAST[2] = y.clone()
    return y
