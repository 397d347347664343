"""Generate kernel files from torch-level FX subgraphs.

``generate(subgraph, backend)`` gives a `Generated`: the source of a kernel.py, or None and the reason.
The pipeline: `lower` (to aten) → `build` (tensors to scalar values at symbolic indices) → `schedule`
(loop nests) → `triton` / `cpp` (text).  `compose` joins several kernels and PyTorch calls in one file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from .ir import Unsupported

__all__ = ["Generated", "Unsupported", "generate"]


class Generated(NamedTuple):
    """``source`` of a kernel.py, or None and the ``reason`` in one line."""

    source: str | None
    reason: str = ""


def generate(
    subgraph: fx.GraphModule,
    backend: str,
    *,
    mixed: bool = True,
    allow_tf32: bool = False,
    constants: dict[str, torch.Tensor] | None = None,
) -> Generated:
    """A kernel file for ``subgraph`` whose ``kernel_fn`` takes its placeholders in order.

    ``backend`` is ``triton``, ``cpp`` or ``torch``.  First everything is tried as one fused kernel; then, if
    ``mixed``, as several kernels with PyTorch calls between them.  ``constants`` holds the values of inputs
    (by placeholder name) that a rewrite may rely on, such as masks.
    """
    from . import compose, cpp, triton_file

    reason = ""
    if backend in ("triton", "cpp"):
        module = triton_file if backend == "triton" else cpp
        try:
            return Generated(module.generate(subgraph))
        except Unsupported as error:
            reason = str(error)
    if not mixed and backend != "torch":
        return Generated(None, reason)
    try:
        return Generated(compose.compose(subgraph, backend, allow_tf32=allow_tf32, constants=constants))
    except Unsupported as error:
        return Generated(None, "; ".join(dict.fromkeys(r for r in (reason, str(error)) if r)))
