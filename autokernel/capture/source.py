"""Model sources: turn what the user points at into an ``nn.Module`` with example inputs.

Accepted now (`SourceSpec.model`):

- ``models/gpt2.py``: a file with ``build() -> nn.Module`` and ``example_inputs(model) -> tuple | dict``;
- ``models/net.py`` with ``class_name`` and ``input_shapes``;
- ``package.module:callable``, with the module's own ``example_inputs`` or with ``input_shapes``;
- any of these with a ``checkpoint`` (.safetensors, or .pt/.pth/.bin of plain weights) laid over it.

`load` seeds torch before it builds, so that two processes build the same weights.  Whatever is wrong
with the model's file or with the arguments becomes a `UsageError` of one line that says what to do.

The module is importable without torch; torch is imported when something is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..hardware import torch_device
from . import _checkpoint, _modules
from ._inputs import inputs_from_shapes, map_tensors, parse_shape, randomized_like, same_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

BUILD_SEED = 0

DTYPES: dict[str, str] = {
    "float32": "float32", "fp32": "float32", "float": "float32",
    "float16": "float16", "fp16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float64": "float64", "fp64": "float64", "double": "float64",
}  # fmt: skip


@dataclass(frozen=True)
class SourceSpec:
    """Where a model comes from; the command line's model arguments as they were given."""

    model: str
    class_name: str | None = None
    input_shapes: tuple[str, ...] = ()
    dtype: str | None = None
    checkpoint: str | None = None
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SourceSpec:
        return cls(**{**data, "input_shapes": tuple(data.get("input_shapes") or ())})


@dataclass
class LoadedModel:
    """A model ready to run: in eval mode, on its device, with inputs that fit it.

    ``identity`` is a hash of the source files, the checkpoint and the arguments, except for the device:
    the same model elsewhere is the same model.  ``name`` is a short name for run folders.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: SourceSpec
    name: str
    identity: str
    _source: _modules.Source = field(repr=False)
    _example: Callable[..., Any] | None = field(default=None, repr=False)
    _highs: list[int | None] = field(default_factory=list, repr=False)

    @property
    def device(self) -> torch.device:
        return torch_device(self.spec.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the given inputs, or on its own example inputs when there are none."""
        if not args and not kwargs:
            args, kwargs = self.args, self.kwargs
        return self.model(*args, **kwargs)

    def fresh_inputs(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New random inputs of the same shapes and dtypes, on the model's device.

        They come from the file's ``example_inputs`` under ``seed``.  If that ignores the seed (it reads a
        file, say), or there is none, values are drawn afresh: floating ones normal with the example's mean
        and deviation, whole numbers within the embedding's range where that was found, and otherwise the
        example's own values in another order, so that a mask or an index stays legal.
        """
        if self._example is not None:
            with _seeded(seed):
                args, kwargs = _example_inputs(self._example, self.model, self._source, self.spec)
            if not same_tensors((args, kwargs), (self.args, self.kwargs)):
                return args, kwargs
        return randomized_like((self.args, self.kwargs), seed, self._highs)


def load(spec: SourceSpec, *, weights: Path | None = None) -> LoadedModel:
    """Build the model that ``spec`` describes.

    ``weights`` is a ``state_dict`` saved by ``torch.save`` from a model loaded with the same spec; it is
    laid over the result, as worker processes do.  Raises `UsageError`, and `DeviceMissing` if the device
    isn't there.
    """
    where = torch_device(spec.device)
    dtype = _dtype(spec.dtype)
    shapes = [parse_shape(text) for text in spec.input_shapes]
    source = _modules.find(spec.model)
    with _seeded(BUILD_SEED), _modules.on_path(source.folder):
        module = _modules.import_source(source)
        build, build_name = _builder(module, source, spec)
        model = _build(build, build_name, source)
        if spec.checkpoint is not None:
            _checkpoint.lay_over(model, spec.checkpoint)
        _cast(model, dtype)
        _move(model, where, source)
        model.eval()
        if weights is not None:
            _checkpoint.lay_over(model, str(weights))
    example = getattr(module, "example_inputs", None)
    loaded = LoadedModel(model, (), {}, spec, source.name, _identity(spec, source), source)
    with _seeded(BUILD_SEED), _modules.on_path(source.folder):
        if shapes:
            with _modules.user_code(f"{source.label}: the model fails on --input-shape", source):
                loaded.args, loaded._highs = inputs_from_shapes(model, shapes, where)
        elif callable(example):
            loaded._example = example
            loaded.args, loaded.kwargs = _example_inputs(example, model, source, spec)
        else:
            raise UsageError(
                f"{source.label} has no example_inputs(model), so the inputs are unknown: "
                "add it, or pass --input-shape, for instance --input-shape 1,512"
            )
    return loaded


def try_forward(loaded: LoadedModel) -> Any:
    """Run the model once on its example inputs, without gradients, and return what it returns.

    Raises `UsageError` with the model's own message and place when it can't run.
    """
    import torch

    source = loaded._source
    with (
        torch.no_grad(),
        _modules.user_code(f"{source.label}: the model fails on its example inputs", source),
    ):
        return loaded()


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    if name.lower() not in DTYPES:
        raise UsageError(
            f"--dtype {name!r} is unknown: use one of {', '.join(dict.fromkeys(DTYPES.values()))}"
        )
    return getattr(torch, DTYPES[name.lower()])


def _builder(module: ModuleType, source: _modules.Source, spec: SourceSpec) -> tuple[Callable[[], Any], str]:
    """What to call to get the model, and its name for messages."""
    name = spec.class_name or source.attribute
    if name is None:
        build = getattr(module, "build", None)
        if callable(build):
            return build, "build()"
        raise UsageError(f"{source.label} has no build() function: {_what_to_do(module, source)}")
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise UsageError(f"{source.label} has no {name!r}: {_what_to_do(module, source)}")
    if not callable(target):
        raise UsageError(f"{name!r} in {source.label} is a {type(target).__name__}, not a class or function")
    return target, f"{name}()"


def _what_to_do(module: ModuleType, source: _modules.Source) -> str:
    """What is in the module, and the flag that would use it."""
    from torch import nn

    own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    classes = [k for k, v in own.items() if inspect.isclass(v) and issubclass(v, nn.Module)]
    functions = [k for k, v in own.items() if inspect.isfunction(v) and not k.startswith("_")]
    if source.attribute is not None:
        return f"it has {', '.join(classes + functions)}" if classes or functions else "it defines no model"
    if classes:
        listed = ", ".join(classes[-6:])
        return f"add build(), or pass --class-name with one of its modules ({listed})"
    if functions:
        return f"add build(), or pass --class-name with one of its functions ({', '.join(functions[-6:])})"
    return "add build(), which returns the model; the file defines no nn.Module"


def _build(build: Callable[[], Any], name: str, source: _modules.Source) -> nn.Module:
    from torch import nn

    required = _required_parameters(build)
    if required:
        raise UsageError(
            f"{name} in {source.label} needs arguments ({', '.join(required)}): "
            "add a build() to the file that calls it with them"
        )
    with _modules.user_code(f"{source.label}: {name} failed", source):
        model = build()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} in {source.label} returned a {type(model).__name__}, not an nn.Module")
    return model


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in free]


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast real floating parameters and buffers; complex and integer ones stay what they are.

    ``nn.Module.to(float16)`` would drop the imaginary part of a buffer such as ``freqs_cis``.  Eight-bit
    floats are left alone as well: they are already quantized.
    """
    import torch

    if dtype is None:
        return
    real = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    with torch.no_grad():
        model._apply(lambda t: t.to(dtype) if t.dtype in real else t)


def _move(model: nn.Module, where: torch.device, source: _modules.Source) -> None:
    import torch

    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, t in tensors if t.is_meta]
    if meta:
        raise UsageError(
            f"{source.label}: {len(meta)} parameters or buffers have no data (meta device), first {meta[0]}: "
            "let build() give them values"
        )
    try:
        model.to(where)
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{source.label} does not fit on {where}: {_modules.one_line(error)}") from error


def _example_inputs(
    example: Callable[..., Any], model: nn.Module, source: _modules.Source, spec: SourceSpec
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the file's ``example_inputs``; tensors go to the device and, if asked, to the dtype."""
    import torch

    with _modules.user_code(f"{source.label}: example_inputs(model) failed", source), torch.no_grad():
        value = example(model)
    if isinstance(value, torch.Tensor):
        value = (value,)
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple) and not (
        isinstance(value, dict) and all(isinstance(k, str) for k in value)
    ):
        raise UsageError(
            f"{source.label}: example_inputs(model) returned a {type(value).__name__}: "
            "return a tuple (positional inputs) or a dict with names for keys (keyword inputs)"
        )
    where, dtype = torch_device(spec.device), _dtype(spec.dtype)

    def place(t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        return t.to(where, dtype) if dtype is not None and t.is_floating_point() else t.to(where)

    value = map_tensors(place, value)
    return (value, {}) if isinstance(value, tuple) else ((), value)


def _identity(spec: SourceSpec, source: _modules.Source) -> str:
    digest = hashlib.sha256()
    given = {**spec.to_json(), "model": source.name, "attribute": source.attribute}
    del given["device"]
    given["dtype"] = DTYPES[spec.dtype.lower()] if spec.dtype else None
    given["checkpoint"] = _checkpoint.fingerprint(spec.checkpoint) if spec.checkpoint else None
    digest.update(json.dumps(given, sort_keys=True).encode())
    for path in _modules.local_sources(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Run with torch's, Python's and numpy's generators seeded, and put them back afterwards."""
    import numpy as np
    import torch

    devices = (
        [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
