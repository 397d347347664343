"""What a tensor looks like in a buffer: dtype, shape, strides, and where it starts.

Both sides of the process boundary describe tensors only in these terms, so no tensor object, and no
pickle, ever crosses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES: tuple[torch.dtype, ...] = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.complex32,
)  # fmt: skip
"""Position is the code on the wire; append only."""

CODE_OF: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES)}
ALIGN = 256
"""Bytes; what a device allocator gives, so that a kernel sees the alignment it will see in the model."""
MAX_NDIM = 8


def dtype_of(name: str) -> torch.dtype:
    """``"float16"`` or ``"torch.float16"`` -> ``torch.float16``; ValueError for anything else."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a flat buffer. ``offset`` is in bytes, ``stride`` in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor, offset: int = 0) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> TensorSpec:
        code, shape, stride, offset = data
        return cls(DTYPES[code], tuple(shape), tuple(stride), offset)

    def to_json(self) -> list[Any]:
        return [CODE_OF[self.dtype], list(self.shape), list(self.stride), self.offset]

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last one (strides may leave holes)."""
        if self.numel == 0:
            return 0
        elements = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return elements * self.dtype.itemsize

    def at(self, offset: int) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, self.stride, offset)

    def contiguous(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, contiguous_stride(self.shape), self.offset)

    def padded(self, pad: int) -> TensorSpec:
        """The same dims in the same stride order, with ``pad`` unused elements after each innermost row.

        Broadcast (stride 0) and one-dimensional tensors come back unchanged.
        """
        order = stride_order(self.shape, self.stride)
        if len(order) < 2 or any(s == 0 for s in self.stride) or pad == 0:
            return self
        stride, step = list(self.stride), 0
        inner = order[-1]
        step = self.stride[inner] * self.shape[inner] + pad
        for dim in reversed(order[:-1]):
            stride[dim] = step
            step *= self.shape[dim]
        for dim, size in enumerate(self.shape):
            if size == 1:
                stride[dim] = step
        return TensorSpec(self.dtype, self.shape, tuple(stride), self.offset)

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place of ``storage``; nothing is copied."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset // self.dtype.itemsize, self.shape, self.stride)  # pyright: ignore


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def stride_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims of size > 1 from outermost (largest stride) to innermost."""
    dims = [d for d in range(len(shape)) if shape[d] > 1]
    return sorted(dims, key=lambda d: (-stride[d], d))


def aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def pack_specs(specs: Sequence[TensorSpec], start: int = 0, shift: int = 0) -> tuple[list[TensorSpec], int]:
    """Lay ``specs`` out one after the other from byte ``start``; returns them placed, and the end.

    ``shift`` bytes are left free before each: an offset view.
    """
    placed, cursor = [], aligned(start)
    for spec in specs:
        placed.append(spec.at(cursor + shift))
        cursor = aligned(placed[-1].offset + spec.extent)
    return placed, cursor


def fill(target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into a strided tensor that may be a broadcast (stride 0) of fewer elements."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def raw(tensor: Tensor) -> Tensor:
    """The elements' bytes as integers, flat, for comparisons that a NaN can't upset."""
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() * flat.element_size() % 8:
        return flat.view(torch.uint8)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)  # single bytes are compared several times as slowly


def overlapping(tensors: Sequence[Tensor]) -> list[bool]:
    """Per tensor, whether it shares a byte with an earlier one. Views that interleave do not."""
    return [any(_share(tensor, earlier) for earlier in tensors[:i]) for i, tensor in enumerate(tensors)]


def _share(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    low, high = zip(*(_byte_range(t) for t in (a, b)), strict=True)
    if max(low) >= min(high):
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    taken = torch.zeros(max(high) - min(low), dtype=torch.bool)
    places = [
        taken.as_strided(
            (*t.shape, t.element_size()), (*(s * t.element_size() for s in t.stride()), 1), start - min(low)
        )
        for t, start in zip((a, b), low, strict=True)
    ]
    places[0].fill_(True)
    return bool(places[1].any())


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
