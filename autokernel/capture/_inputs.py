"""Example inputs: made from ``--input-shape``, and drawn again under another seed."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ._messages import out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_INT_TYPES = ("int64", "int32", "bool")
_FLOAT_TYPES = ("float32", "float16", "bfloat16", "float64")
_ALIASES = {
    "fp32": "float32", "float": "float32",
    "fp16": "float16", "half": "float16",
    "bf16": "bfloat16",
    "fp64": "float64", "double": "float64",
    "int": "int32", "long": "int64",
}  # fmt: skip
_MOST = 2**60  # elements; sizes in bytes have to fit 64 bits
_WHOLE = re.compile(r"(^|_)(ids?|idx|index|indices|tokens?|labels)$")
_TRIES = 32


@dataclass(frozen=True)
class Shape:
    """One ``--input-shape``: sizes and, after a colon, the dtype (``1,512:int64``)."""

    sizes: tuple[int, ...]
    dtype: str | None
    text: str


def parse_shape(text: str) -> Shape:
    """``"1,3,224,224"`` or ``"1,512:int64"`` -> `Shape`; also ``1x512``.  Raises `UsageError`."""
    sizes, colon, dtype = text.strip().partition(":")
    parts = sizes.strip("()[] ").replace("x", ",").split(",")
    parts = [part.strip() for part in parts]
    if parts and parts[-1] == "" and len(parts) > 1:
        parts.pop()  # a tuple's trailing comma
    if not all(part.isascii() and part.isdecimal() and part.strip("0") for part in parts):
        raise UsageError(
            f"--input-shape {text!r} is not a shape: give whole numbers above 0, for instance 1,512 "
            "(and 1,512:int64 to say the type; repeat the flag for more inputs)"
        )
    if any(len(part) > 18 for part in parts) or math.prod(map(int, parts)) > _MOST:
        short = text if len(text) < 60 else f"{text[:50]}..."
        raise UsageError(f"--input-shape {short!r} is more than fits any memory: give smaller sizes")
    known = dtype_name(dtype)
    if colon and known not in _INT_TYPES + _FLOAT_TYPES:
        raise UsageError(
            f"--input-shape {text!r}: unknown type {dtype!r}, use {', '.join(_INT_TYPES + _FLOAT_TYPES)}"
        )
    return Shape(tuple(int(part) for part in parts), known, text)


def dtype_name(text: str) -> str | None:
    """``fp16``, ``half``, ``torch.float16`` -> ``float16``; a name that is none of these as it is."""
    name = text.strip().lower().removeprefix("torch.")
    return _ALIASES.get(name, name) or None


def inputs_from_shapes(
    model: nn.Module, shapes: list[Shape], where: torch.device
) -> tuple[tuple[Tensor, ...], list[int | None]]:
    """Random inputs for the shapes, and per input the bound (exclusive) of whole numbers where one was found.

    An input without a type gets the likeliest with which the model runs on zeros.  That run also shows which
    table each whole-number input is looked up in.  Raises `UsageError` when the model takes another number of
    inputs, and what the model raises when no choice of types works.
    """
    import torch

    names = _names(model, shapes)
    types = [_types(model, shape, name) for shape, name in zip(shapes, names, strict=True)]
    dtypes = [options[0] for options in types]
    highs: list[int | None] = [None] * len(shapes)
    if len(shapes) > 1 or not dtypes[0].is_floating_point:

        def run(dtypes: Sequence[torch.dtype]) -> list[int | None]:
            zeros = [torch.zeros(s.sizes, dtype=d, device=where) for s, d in zip(shapes, dtypes, strict=True)]
            return table_sizes(model, zeros)

        dtypes, highs = _first_that_runs(types, names, run)
    values = []
    for shape, name, dtype, high in zip(shapes, names, dtypes, highs, strict=True):
        # Nearly every mask says what to keep, and nothing is known of this one: keep everything.
        mask = dtype == torch.bool or "mask" in name
        values.append(
            (torch.ones(shape.sizes, dtype=dtype) if mask else draw(shape.sizes, dtype, high)).to(where)
        )
    return tuple(values), highs


def _names(model: nn.Module, shapes: list[Shape]) -> list[str]:
    """The names that ``forward`` has for the inputs; ``""`` where they go into its ``*args``."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return [""] * len(shapes)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(shapes) < len(required) or (len(shapes) > len(named) and not several):
        takes = (
            ", ".join(p.name if p.default is p.empty else f"{p.name} (optional)" for p in named) or "nothing"
        )
        raise UsageError(
            f"{len(shapes)} --input-shape for {type(model).__name__}.forward, which takes {takes}: "
            "give one for each, in that order"
        )
    return [p.name for p in named[: len(shapes)]] + [""] * (len(shapes) - len(named))


def _types(model: nn.Module, shape: Shape, name: str) -> list[torch.dtype]:
    """What an input may be, likeliest first: what was said, else by name, size and the model's modules.

    Floating inputs have the dtype of the model's weights.
    """
    import torch
    from torch import nn

    if shape.dtype is not None:
        return [getattr(torch, shape.dtype)]
    floating = floating_dtype(model)
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    if "mask" in name:
        return [torch.bool, floating, torch.int64]
    if len(shape.sizes) <= 2 and (embeds or _WHOLE.search(name)):
        return [torch.int64, floating, torch.bool]
    return [floating, torch.int64, torch.bool]


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first floating weights."""
    import torch

    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _first_that_runs(
    types: list[list[torch.dtype]],
    names: list[str],
    run: Callable[[Sequence[torch.dtype]], list[int | None]],
) -> tuple[list[torch.dtype], list[int | None]]:
    """The likeliest types with which the model runs, and the sizes of the tables that it looks up in then."""

    def attempt(dtypes: Sequence[torch.dtype]) -> list[int | None] | Exception:
        try:
            return run(dtypes)
        except Exception as error:  # the model's own code may raise anything
            if out_of_memory(error) is not None:
                raise
            return error

    choices = itertools.product(*(range(len(options)) for options in types))
    outcomes = []
    for choice in sorted(choices, key=lambda c: (sum(c), max(c)))[:_TRIES]:
        dtypes = [options[i] for options, i in zip(types, choice, strict=True)]
        outcomes.append(attempt(dtypes))
        if not isinstance(outcomes[-1], Exception):
            break
    highs = outcomes[-1]
    if isinstance(highs, Exception):
        assert isinstance(outcomes[0], Exception)
        raise outcomes[0]  # what is wrong with the likeliest choice says most
    # A model may compute with whole numbers where features are meant, so what it looks up nowhere is floating
    # if it runs with that as well.
    for i, (options, name) in enumerate(zip(types, names, strict=True)):
        if len(options) > 1 and dtypes[i] == options[0] and highs[i] is None and not _WHOLE.search(name):
            other = [*dtypes[:i], options[1], *dtypes[i + 1 :]]
            if options[1].is_floating_point and "mask" not in name:
                outcome = attempt(other)
                if not isinstance(outcome, Exception):
                    dtypes, highs = other, outcome
    return dtypes, highs


def draw(sizes: Sequence[int], dtype: torch.dtype, high: int | None) -> Tensor:
    """Normal numbers, or whole ones below ``high`` (0 and 1 where no bound is known)."""
    import torch

    if dtype.is_floating_point:
        return torch.randn(*sizes).to(dtype)
    return torch.randint(0, high or 2, tuple(sizes), dtype=dtype)


def table_sizes(model: nn.Module, values: list[Tensor]) -> list[int | None]:
    """Rows of the smallest table that each value is looked up in when the model runs on ``values``."""
    import torch
    from torch.overrides import TorchFunctionMode

    from .nodes import is_plain

    storages = [v.untyped_storage().data_ptr() for v in values]
    sizes: list[int | None] = [None] * len(values)

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            index, rows = _lookup(func, args, kwargs or {})
            if index is not None and is_plain(index) and index.dtype in (torch.int64, torch.int32):
                pointer = index.untyped_storage().data_ptr()
                for i, storage in enumerate(storages):
                    if storage == pointer:
                        sizes[i] = min(rows, sizes[i] or rows)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        model(*values)
    return sizes


def _lookup(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, int]:
    """The index, and how many rows there are to choose from, when ``func`` looks something up."""
    import torch
    from torch.nn import functional as F

    def argument(position: int, name: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(name)

    name = getattr(func, "__name__", "")
    if func is F.embedding or func is F.embedding_bag:
        return argument(0, "input"), argument(1, "weight").shape[0]
    if name in ("index_select", "gather", "take_along_dim"):
        table, dim, index = argument(0, "input"), argument(1, "dim"), argument(2, "index")
        return (index, table.shape[dim]) if isinstance(dim, int) and index is not None else (None, 0)
    if name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[0].dim():
        return args[1], args[0].shape[0]
    return None, 0


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists, dicts and objects."""
    from .nest import tensors_of, with_tensors

    return with_tensors(value, [function(tensor) for tensor in tensors_of(value)])


def same_tensors(a: Any, b: Any) -> bool:
    """Whether two nests hold the same tensors, bit for bit (other leaves are ignored)."""
    import torch

    from .nest import tensors_of

    left, right = tensors_of(a), tensors_of(b)
    return len(left) == len(right) and all(
        x.shape == y.shape and x.dtype == y.dtype and bool(torch.equal(x, y))
        for x, y in zip(left, right, strict=True)
    )


def randomized_like(value: Any, seed: int, highs: list[int | None]) -> Any:
    """A nest of the same form with new values; ``highs`` are bounds for its tensors, in order, where known.

    Floating tensors are normal with the mean and deviation of the old ones; whole numbers are uniform below
    their bound, or the old ones in another order; booleans are the old ones in another order.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    bounds = iter(highs)

    def again(t: Tensor) -> Tensor:
        high = next(bounds, None)
        if t.is_floating_point() or t.is_complex():
            wide = t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64)
            real = torch.view_as_real(wide) if t.is_complex() else wide
            finite = real[real.isfinite()]
            mean = finite.mean() if finite.numel() else torch.tensor(0.0, dtype=torch.float64)
            deviation = finite.std() if finite.numel() > 1 else torch.tensor(1.0, dtype=torch.float64)
            fresh = torch.randn(real.shape, generator=generator, dtype=torch.float64) * deviation + mean
            fresh = torch.where(real.isfinite(), fresh, real)
            new = (torch.view_as_complex(fresh) if t.is_complex() else fresh).to(t.dtype)
        elif high is not None:
            new = torch.randint(0, high, t.shape, generator=generator).to(t.dtype)
        else:
            order = torch.randperm(t.numel(), generator=generator)
            new = t.detach().cpu().reshape(-1)[order].reshape(t.shape)
        return new.to(t.device)

    return map_tensors(again, value)
