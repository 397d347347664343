"""Starters: a correct kernel.py to begin from.

`STARTERS` are general kernels, one file each, that serve any shape: to copy, to bench, to show a model.
`starter_for` gives the kernel.py of one particular region: generated from its graph, so that it is
correct for exactly that region, whatever way the model spells it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import fx

    from ...records import Task

# name -> (op family, file)
STARTERS: dict[str, tuple[str, str]] = {
    "layer_norm": ("norm", "layer_norm.py"),
    "rms_norm": ("norm", "rms_norm.py"),
    "softmax": ("softmax", "softmax.py"),
    "gated_activation": ("pointwise", "gated_activation.py"),
    "matmul": ("linear", "matmul.py"),
    "cross_entropy": ("cross_entropy", "cross_entropy.py"),
    "row_reduction": ("reduction", "row_reduction.py"),
    "rope": ("rope", "rope.py"),
    "rope_complex": ("rope", "rope_complex.py"),
    "attention": ("attention", "attention.py"),
}


def starter_path(name: str) -> Path:
    """The file of a starter; raises `KeyError` for an unknown name."""
    return Path(__file__).parent / STARTERS[name][1]


def backends_for(device: str) -> list[str]:
    """Backends to try for a starter on ``device``, the best first."""
    if device.startswith("cuda"):
        return ["triton", "torch"]
    from ...backends import cpp_backend

    return ["cpp", "torch"] if cpp_backend.available("cpu")[0] else ["torch"]


def starter_for(
    task: Task, subgraph: fx.GraphModule, constants: dict[str, torch.Tensor] | None = None
) -> str | None:
    """Source of a correct kernel.py for the region ``subgraph``, or None if it can't be written as code.

    ``kernel_fn`` takes ``task.inputs`` in order.  On a GPU: Triton, with PyTorch calls for what has no kernel;
    on a CPU: C++ likewise; failing both (or without a compiler), the region itself as PyTorch code.
    ``constants``: values of inputs whose content is part of the region (by name), such as masks.
    """
    from ..codegen import generate

    for name in backends_for(task.device):
        result = generate(subgraph, name, allow_tf32=task.allow_tf32, constants=constants)
        if result.source is not None:
            return result.source
    return None
