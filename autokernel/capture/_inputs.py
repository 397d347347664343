"""Example inputs: made from ``--input-shape``, and drawn again under another seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_INT_TYPES = ("int64", "int32", "bool")
_FLOAT_TYPES = ("float32", "float16", "bfloat16", "float64")


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
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--input-shape {text!r} is not a shape: give whole numbers above 0, for instance 1,512 "
            "(and 1,512:int64 to say the type; repeat the flag for more inputs)"
        )
    if colon and dtype not in _INT_TYPES + _FLOAT_TYPES:
        raise UsageError(
            f"--input-shape {text!r}: unknown type {dtype!r}, use {', '.join(_INT_TYPES + _FLOAT_TYPES)}"
        )
    return Shape(tuple(int(part) for part in parts), dtype or None, text)


def inputs_from_shapes(
    model: nn.Module, shapes: list[Shape], where: torch.device
) -> tuple[tuple[Tensor, ...], list[int | None]]:
    """Random inputs for the shapes, and per input the bound (exclusive) of whole numbers where one was found.

    An input without a type is taken for token ids when the model has an embedding and the shape has one or
    two sizes; otherwise it is floating, in the dtype of the model's weights.  The model is run once on
    zeros to see which table each whole-number input is looked up in.
    """
    import torch
    from torch import nn

    embeds = any(isinstance(m, nn.Embedding) for m in model.modules())
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtypes: list[torch.dtype] = []
    for shape in shapes:
        if shape.dtype is not None:
            dtypes.append(getattr(torch, shape.dtype))
        else:
            dtypes.append(torch.int64 if embeds and len(shape.sizes) <= 2 else floating)
    highs: list[int | None] = [None] * len(shapes)
    if any(not d.is_floating_point and d != torch.bool for d in dtypes):
        zeros = [torch.zeros(s.sizes, dtype=d, device=where) for s, d in zip(shapes, dtypes, strict=True)]
        highs = embedding_sizes(model, zeros)
    values = []
    for shape, dtype, high in zip(shapes, dtypes, highs, strict=True):
        values.append(_draw(shape.sizes, dtype, high).to(where))
    return tuple(values), highs


def _draw(sizes: tuple[int, ...], dtype: torch.dtype, high: int | None) -> Tensor:
    import torch

    if dtype == torch.bool:
        return torch.ones(sizes, dtype=dtype)  # nearly always a mask: keep everything
    if dtype.is_floating_point:
        return torch.randn(sizes).to(dtype)
    return torch.randint(0, high or 2, sizes, dtype=dtype)


def embedding_sizes(model: nn.Module, values: list[Tensor]) -> list[int | None]:
    """Rows of the smallest table that each value is looked up in when the model runs on ``values``."""
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    storages = [v.untyped_storage().data_ptr() for v in values]
    sizes: list[int | None] = [None] * len(values)

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is F.embedding:
                index = args[0] if args else kwargs["input"]
                table = args[1] if len(args) > 1 else kwargs["weight"]
                pointer = index.untyped_storage().data_ptr()
                for i, storage in enumerate(storages):
                    if storage == pointer:
                        sizes[i] = min(table.shape[0], sizes[i] or table.shape[0])
            return func(*args, **kwargs)

    with torch.no_grad(), Watch():
        model(*values)
    return sizes


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists, dicts and registered containers."""
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, value)


def same_tensors(a: Any, b: Any) -> bool:
    """Whether two nests hold the same tensors, bit for bit (other leaves are ignored)."""
    import torch
    from torch.utils._pytree import tree_leaves

    left = [x for x in tree_leaves(a) if isinstance(x, torch.Tensor)]
    right = [x for x in tree_leaves(b) if isinstance(x, torch.Tensor)]
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
