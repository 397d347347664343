"""autokernel makes whole PyTorch models faster than torch.compile does, and proves it.

    import autokernel
    model = autokernel.load("runs/gpt2")(model)        # put a run's kernels into a model
    frame = autokernel.results_frame("runs/gpt2")      # every experiment of a run, as a typed frame

``import autokernel`` imports neither torch nor pandas; they come with the first use of a name that needs
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autokernel.errors import AutokernelError, DeviceMissing, RunFolderError, UsageError

if TYPE_CHECKING:
    from autokernel.capture.source import SourceSpec as SourceSpec
    from autokernel.integrate.artifact import load as load
    from autokernel.integrate.loaded import unload as unload
    from autokernel.results import read_results as read_results
    from autokernel.results import results_frame as results_frame

__version__: str

__all__ = [
    "AutokernelError",
    "DeviceMissing",
    "RunFolderError",
    "SourceSpec",
    "UsageError",
    "__version__",
    "load",
    "read_results",
    "results_frame",
    "unload",
]

_LAZY = {
    "SourceSpec": "autokernel.capture.source",
    "load": "autokernel.integrate.artifact",
    "read_results": "autokernel.results",
    "results_frame": "autokernel.results",
    "unload": "autokernel.integrate.loaded",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("autokernel")
        except PackageNotFoundError:  # a source tree that isn't installed
            return "0+source"
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'autokernel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
