"""Splits float32 into three bfloat16 parts and sums six products (3xTF32's cousin).
Must pass: as exact as float32, though no operand is.
"""

BACKEND = "torch"


def _split(t):
    parts = []
    for _ in range(3):
        parts.append(t.bfloat16().float())
        t = t - parts[-1]
    return parts


def kernel_fn(x, wa, wb):
    a, outputs = _split(x), []
    for w in (wa, wb):
        b = [part.t() for part in _split(w)]
        small = a[0] @ b[2] + a[2] @ b[0] + a[1] @ b[1]
        outputs.append(small + (a[0] @ b[1] + a[1] @ b[0]) + a[0] @ b[0])
    return tuple(outputs)
