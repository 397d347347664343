"""Backends: from a kernel file to a callable.

`read_kernel` looks at a file without running it; `load_kernel` runs it, and is for workers and for the
artifact loader only.  A backend is one module with ``NAME``, ``available(device) -> (bool, why)`` and
``load(path, source) -> LoadedKernel``, and one line in `BACKENDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from .source import KernelInfo, KernelSourceError, parse, read_source

__all__ = [
    "BACKENDS",
    "KernelInfo",
    "KernelSourceError",
    "LoadedKernel",
    "backend",
    "load_kernel",
    "read_kernel",
    "read_source",
]

BACKENDS: dict[str, str] = {
    "torch": "torch_backend",
    "triton": "triton_backend",
    "cpp": "cpp_backend",
}


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel module that has been executed.

    ``fn(*inputs)`` returns a tensor or a tuple of tensors; with ``prepack`` it is called as
    ``fn(*activations, *prepack(*static_inputs))``.
    """

    fn: Callable[..., Any]
    prepack: Callable[..., tuple[Any, ...]] | None
    space: dict[str, list[Any]] | None
    backend: str
    shapes: Literal["fixed", "any"]
    module: ModuleType


def backend(name: str) -> ModuleType:
    """The module of a backend, imported on first use; raises `KernelSourceError` for an unknown name."""
    if name not in BACKENDS:
        raise KernelSourceError(f"unknown BACKEND {name!r}; one of {', '.join(sorted(BACKENDS))}")
    return importlib.import_module(f"{__name__}.{BACKENDS[name]}")


def read_kernel(path: Path) -> KernelInfo:
    """What a kernel file declares, without executing it; raises `KernelSourceError`."""
    return parse(Path(path), BACKENDS)


def load_kernel(path: Path) -> LoadedKernel:
    """Execute a kernel file.  Only for a process that may run its code.

    Raises `KernelSourceError` when the file can't be a kernel; whatever the module itself raises while
    it is executed (a failed compilation, say) passes through.
    """
    info = read_kernel(path)
    return backend(info.backend).load(Path(path), info.source)
