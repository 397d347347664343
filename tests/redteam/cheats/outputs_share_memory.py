"""Two outputs that eager computes separately are one tensor: whoever writes into one changes the other.
Defence: outputs of one call may overlap only where eager's do.
"""

BACKEND = "torch"


def kernel_fn(x):
    y = x * 2
    return y, y
