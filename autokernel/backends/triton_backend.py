"""Triton kernels: compiled for the GPU on first call, or run by Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from . import LoadedKernel
from ._module import finish

NAME = "triton"


def available(device: str) -> tuple[bool, str]:
    """Whether Triton kernels run on ``device``; on a CPU only in the interpreter, which is never timed."""
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed"
    if device.startswith("cuda"):
        import torch

        return (True, "") if torch.cuda.is_available() else (False, "no CUDA device")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, ""
    return False, "Triton needs a GPU (TRITON_INTERPRET=1 checks correctness on a CPU)"


def load(path: Path, source: str) -> LoadedKernel:
    """Execute the file; raises what it raises.  Compilation happens at the first launch."""
    return finish(path, source)
