"""Kernels that are better arrangements of PyTorch's own calls."""

from __future__ import annotations

from pathlib import Path

from . import LoadedKernel
from ._module import finish

NAME = "torch"


def available(device: str) -> tuple[bool, str]:
    """Always there, wherever the model itself runs."""
    return True, ""


def load(path: Path, source: str) -> LoadedKernel:
    """Execute the file; raises what it raises."""
    return finish(path, source)
