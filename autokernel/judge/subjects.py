"""What a worker can load and call: the four kinds of subject.

``{"kind": "reference", "source" or "path"}``  Model of a reference.py, eager
``{"kind": "reference-compiled", ...}``        torch.compile of it
``{"kind": "kernel", "name", "source", "activations"}``  a kernel.py, by its text; the first so many inputs
                                              are activations; with ``compiler``, a rewrite may be compiled
``{"kind": "factory", "module", "function", "args"}``  module.function(args) -> a callable on the inputs

Only kernels are untrusted.  Factories are chosen by our own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autokernel.judge.clock import Target

Spec = dict[str, Any]


class StructureError(Exception):
    """A subject returned something that is no tensor or sequence of tensors."""


def load_module(path: Path, name: str) -> ModuleType:
    """Execute a Python file as a module of its own, without putting it in ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_reference(path: Path, device: torch.device) -> nn.Module:
    module = load_module(path, "autokernel_reference")
    init = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    return module.Model(*init).to(device).eval()


class Subject:
    """A loaded callable. ``bind`` gives what is called, and timed, for one set of inputs."""

    strict = False
    """Whether the return value must be exactly a tensor or a tuple or list of plain tensors."""
    names: Mapping[str, Any] = {}
    """What its module defines, where it has one of its own."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def bind(self, inputs: Sequence[Tensor]) -> Target:
        return self.fn, tuple(inputs)

    def repack(self) -> None:
        """The static inputs have changed in place."""


class KernelSubject(Subject):
    """A kernel.py. Packs are made once per distinct set of static inputs, as a loader would."""

    strict = True

    def __init__(self, loaded: Any, activations: int, *, compiler: bool = False) -> None:
        fn = loaded.fn
        if compiler and loaded.backend == "torch" and getattr(loaded.module, "COMPILE", False):
            # A rewrite that leaves pointwise work to Inductor is measured as it will run in the model.
            fn = torch.compile(fn, dynamic=False)
        super().__init__(fn)
        self.prepack, self.activations = loaded.prepack, activations
        self.names = vars(loaded.module)
        self.packs: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def bind(self, inputs: Sequence[Tensor]) -> Target:
        if self.prepack is None:
            return self.fn, tuple(inputs)
        static = tuple(inputs[self.activations :])
        key = tuple(t.data_ptr() for t in static)
        if key not in self.packs:
            packed = self.prepack(*static)
            self.packs[key] = tuple(packed) if isinstance(packed, tuple | list) else (packed,)
        return self.fn, (*inputs[: self.activations], *self.packs[key])

    def repack(self) -> None:
        self.packs.clear()


def load_subject(spec: Spec, device: torch.device) -> Subject:
    kind = spec["kind"]
    if kind in ("reference", "reference-compiled"):
        path = Path(spec["path"]) if "path" in spec else _written("reference", spec["source"])
        model = load_reference(path, device)
        if kind == "reference-compiled":
            return Subject(torch.compile(model, dynamic=False))
        return Subject(model.forward)  # calling a module takes a microsecond that no kernel would pay
    if kind == "kernel":
        from autokernel.backends import load_kernel

        loaded = load_kernel(_written(spec["name"], spec["source"]))
        return KernelSubject(loaded, spec["activations"], compiler=spec.get("compiler", False))
    if kind == "factory":
        make = getattr(importlib.import_module(spec["module"]), spec["function"])
        return Subject(make(spec.get("args", {})))
    raise ValueError(f"unknown kind of subject {kind!r}")


def _written(name: str, source: str) -> Path:
    """``source`` as a file in the worker's scratch folder: nothing else need be readable."""
    path = Path(tempfile.gettempdir()).resolve() / f"{name}.py"
    path.write_text(source, encoding="utf-8", errors="surrogateescape", newline="")
    return path


PLAIN = frozenset({Tensor, nn.Parameter})


def tensors_of(result: Any, *, strict: bool) -> list[Tensor]:
    """The tensors of a return value, in pytree order.

    Plain ones, which is what nearly all subjects return, take the same few steps whether ``strict`` or not:
    this happens while the judge's clock runs, and must not favour either kind.
    """
    leaves = [result] if isinstance(result, Tensor) else result
    if type(leaves) in (list, tuple):
        for leaf in leaves:
            if type(leaf) not in PLAIN or leaf.layout is not torch.strided:
                break
        else:
            return list(leaves)
    if not strict:
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    leaves = list(result) if isinstance(result, tuple | list) else [result]
    for i, leaf in enumerate(leaves):
        if type(leaf) not in PLAIN:
            what = "the return value" if len(leaves) == 1 else f"return value {i}"
            raise StructureError(f"{what} is a {type(leaf).__name__}, not a tensor")
        if leaf.layout != torch.strided:
            raise StructureError(f"return value {i} has layout {leaf.layout}")
    return leaves
