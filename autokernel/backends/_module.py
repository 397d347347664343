"""Execute a kernel file as a module of its own, and look up its entry points."""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from . import BACKENDS, LoadedKernel
from .source import KernelSourceError, parse


def execute(path: Path, source: str) -> ModuleType:
    """A fresh module whose globals are those of the executed file.

    It is named by content, so that two versions of one file can be loaded side by side, and kept in
    ``sys.modules``, where Triton and `inspect` look for the source of its functions.
    """
    path = Path(path).resolve()
    digest = hashlib.sha256((str(path) + "\0" + source).encode()).hexdigest()[:16]
    name = f"autokernel_kernel_{digest}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    # Triton reads the text of a kernel through linecache: give it what was compiled, not a later edit
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def finish(path: Path, source: str) -> LoadedKernel:
    """Execute the file and collect what it offers."""
    info = parse(Path(path), BACKENDS)
    module = execute(path, source)
    fn = getattr(module, "kernel_fn", None)
    if not callable(fn):
        raise KernelSourceError(f"{path}: kernel_fn is not callable")
    packing: Any = getattr(module, "prepack", None)
    if not (packing is None or callable(packing)):
        raise KernelSourceError(f"{path}: prepack is not callable")
    prepack = cast(Callable[..., tuple[Any, ...]] | None, packing)
    return LoadedKernel(fn, prepack, info.space, info.backend, info.shapes, module)
