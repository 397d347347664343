"""A C++ kernel that is never found, inside a try whose except calls torch.
Defence: provenance says library: no kernel of its own has run.
"""

import torch

from autokernel.backends import cpp_backend

BACKEND = "cpp"
LIBRARY = cpp_backend.load('extern "C" void unused() {}')


def kernel_fn(x, wa, wb):
    try:
        return LIBRARY.function("gemm", pointers=3)(x, wa, wb)
    except AttributeError:
        return torch.nn.functional.linear(x, wa), torch.nn.functional.linear(x, wb)
