"""A softmax without subtracting the maximum.
Defence: inputs times 1000, where exp overflows.
"""

BACKEND = "torch"


def kernel_fn(x, mask):
    e = x.masked_fill(mask, float("-inf")).exp()
    return e / e.sum(-1, keepdim=True)
