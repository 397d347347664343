"""Model sources: turn what the user points at into an ``nn.Module`` with example inputs.

Accepted (`SourceSpec.model`):

- ``models/gpt2.py``: a file with ``build() -> nn.Module`` and ``example_inputs(model) -> tuple | dict``;
- ``models/net.py`` with ``class_name`` and ``input_shapes``;
- ``package.module:callable``, with the module's own ``example_inputs`` or with ``input_shapes``;
- ``hf:ORG/NAME`` and a local Hugging Face folder (config.json and its weights), with transformers;
- ``timm:NAME``, with timm;
- any of these with a ``checkpoint`` laid over it: .safetensors, .pt/.pth/.bin of plain weights, the index of
  a sharded one, or a folder that holds one of them.

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
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..hardware import torch_device
from . import _checkpoint, _modules
from ._inputs import (
    Shape,
    dtype_name,
    inputs_from_shapes,
    map_tensors,
    parse_shape,
    randomized_like,
    same_tensors,
)
from ._messages import Source, out_of_memory, user_code

if TYPE_CHECKING:
    import torch
    from torch import nn

BUILD_SEED = 0

DTYPES = ("float32", "float16", "bfloat16", "float64")


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
    _source: Source = field(repr=False)
    _example: Callable[..., Any] | None = field(default=None, repr=False)
    _highs: list[int | None] = field(default_factory=list, repr=False)

    @property
    def device(self) -> torch.device:
        return torch_device(self.spec.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the given inputs, or on its own example inputs when there are none."""
        if not args and not kwargs:
            from .nest import of_its_own

            args, kwargs = of_its_own((self.args, self.kwargs))
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
    with _seeded(BUILD_SEED), _modules.on_path(source):
        built = _build(source, spec, shapes, dtype, again=weights is not None)
        model = _uncompiled(built.model, source, say=weights is None)
        if spec.checkpoint is not None:
            _checkpoint.lay_over(model, spec.checkpoint)
        # A class of the user's may have its own idea of casting, moving or even of comparing modules.
        with user_code(f"{source.label}: the model can't be made ready on {where}", source, traced=True):
            if built.cast:
                _cast(model, dtype)
            _move(model, where, source)
            with contextlib.suppress(NotImplementedError):  # torch.export's graphs have their mode baked in
                model.eval()
        if weights is not None:
            _checkpoint.lay_over(model, str(weights))
    identity = _identity(spec, source, built.contents)
    loaded = LoadedModel(model, (), {}, spec, source.name, identity, source, built.example)
    with _seeded(BUILD_SEED), _modules.on_path(source):
        if built.example is not None:
            loaded.args, loaded.kwargs = _example_inputs(built.example, model, source, spec)
        elif shapes:
            with user_code(f"{source.label}: the model fails on --input-shape", source):
                loaded.args, loaded._highs = inputs_from_shapes(model, shapes, where)
        else:
            raise UsageError(
                f"{source.label} has no example_inputs(model), so the inputs are unknown: "
                "add it, or pass --input-shape, for instance --input-shape 1,512"
            )
    return loaded


def _build(
    source: Source, spec: SourceSpec, shapes: list[Shape], dtype: torch.dtype | None, *, again: bool
) -> _modules.Built:
    """The model on the CPU.  ``again``: this process repeats what another one has just built and said."""
    silent = again or spec.checkpoint is not None
    if source.library == "transformers":
        from . import _huggingface

        return _huggingface.build(source, spec.class_name, shapes, dtype, offline=again, silent=silent)
    if source.library == "timm":
        from . import _timm

        return _timm.build(source, spec.class_name, shapes, silent=silent)
    return _modules.build(source, spec.class_name, shapes)


def _uncompiled(model: nn.Module, source: Source, *, say: bool) -> nn.Module:
    """The model itself, where it comes compiled: else its own compiler would be measured as eager.

    Raises `UsageError` for a scripted one, of which no graph can be had.
    """
    import torch

    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"{source.label}: the model is scripted or traced (torch.jit), and Dynamo can't look into it: "
            "build the model that it was made from"
        )
    inner = getattr(model, "_orig_mod", None)
    compiled = isinstance(inner, torch.nn.Module) or model._compiled_call_impl is not None
    if isinstance(inner, torch.nn.Module):
        model = inner
    model._compiled_call_impl = None
    if compiled and say:
        print(
            f"{source.label}: the model is compiled already; autokernel takes the model in it",
            file=sys.stderr,
        )
    return model


def try_forward(loaded: LoadedModel) -> Any:
    """Run the model once on its example inputs, without gradients, and return what it returns.

    Raises `UsageError` with the model's own message and place when it can't run.
    """
    import torch

    source = loaded._source
    what = "--input-shape" if loaded.spec.input_shapes else "its example inputs"
    with torch.no_grad(), user_code(f"{source.label}: the model fails on {what}", source):
        result = loaded()
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError(f"{source.label}: forward is async, and nobody waits for it: make it a plain def")
    return result


def compiling(loaded: LoadedModel) -> contextlib.AbstractContextManager[None]:
    """Around what Dynamo does with a model that runs by itself: what fails in it becomes a `UsageError`."""
    source = loaded._source
    what = f"{source.label}: the model runs by itself, but not under torch.compile, which autokernel needs"
    return user_code(what, source, traced=True)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    known = dtype_name(name)
    if known not in DTYPES:
        raise UsageError(f"--dtype {name!r} is unknown: use one of {', '.join(DTYPES)}")
    return getattr(torch, known)


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


def _move(model: nn.Module, where: torch.device, source: Source) -> None:
    """Take the model to its device.  Raises `UsageError` when it can't be there."""
    import torch

    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, t in tensors if t.is_meta]
    if meta:
        raise UsageError(
            f"{source.label}: {len(meta)} parameters or buffers have no data (meta device), first {meta[0]}: "
            "let build() give them values"
        )
    if where.type == "cuda" and any(t.dtype == torch.bfloat16 for _, t in tensors):
        _check_bfloat16(where, source)
    try:
        model.to(where)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if out_of_memory(error) is None:
            raise
        needed = sum(t.numel() * t.element_size() for _, t in tensors) / 2**30
        free = _free_memory(where)
        raise UsageError(
            f"{source.label} does not fit on {where}: its weights need {needed:.2f} GiB{free}: "
            "choose a smaller --dtype, or another --device"
        ) from error


def _check_bfloat16(where: torch.device, source: Source) -> None:
    """Old GPUs emulate bfloat16 in some operations and lack it in others."""
    import torch

    with torch.cuda.device(where):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError(
                f"{source.label}: {torch.cuda.get_device_name(where)} has no bfloat16: "
                "use --dtype float16 or float32"
            )


def _free_memory(where: torch.device) -> str:
    import torch

    if where.type != "cuda":
        return ""
    try:
        return f" and {torch.cuda.mem_get_info(where)[0] / 2**30:.2f} GiB are free"
    except RuntimeError:  # the driver may have nothing to say after a failure
        return ""


def _example_inputs(
    example: Callable[..., Any], model: nn.Module, source: Source, spec: SourceSpec
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the file's ``example_inputs``; tensors go to the device and, if asked, to the dtype."""
    import torch

    from .nest import tensors_of

    what = f"{source.label}: example_inputs(model) failed"
    with user_code(what, source, "make them smaller, or choose another --device"), torch.no_grad():
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
    if any(t.is_meta for t in tensors_of(value)):
        raise UsageError(
            f"{source.label}: example_inputs(model) returned tensors without data (meta device): "
            "make them on the CPU"
        )

    def place(t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        return t.to(where, dtype) if dtype is not None and t.is_floating_point() else t.to(where)

    with user_code(f"{source.label}: example_inputs(model) can't be taken to {where}", source):
        value = map_tensors(place, value)
    return (value, {}) if isinstance(value, tuple) else ((), value)


def _identity(spec: SourceSpec, source: Source, contents: dict[str, Any]) -> str:
    """A hash of what decides the model and its inputs, without paths, device and versions of libraries."""
    digest = hashlib.sha256()
    given = {**spec.to_json(), "model": source.name, "attribute": source.attribute}
    del given["device"]
    if source.library is not None:
        given = {**given, "model": source.library, "attribute": None, "contents": contents}
    given["dtype"] = dtype_name(spec.dtype) if spec.dtype else None
    given["checkpoint"] = _checkpoint.fingerprint(spec.checkpoint) if spec.checkpoint else None
    digest.update(json.dumps(given, sort_keys=True).encode())
    for path in _modules.local_sources(source) if source.library is None else ():
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
