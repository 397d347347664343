"""Rows and columns on their own scale: values that are small beside others must be right, too.

The comparator's measures are in units of the whole output, or of a tile of typical size.  Where rows differ
by orders of magnitude, the small ones could be anything.  Here each is held against its own size: its
relative error may be as large as the worst tile's usually may, or as many times eager's own in that very row.
What cancels is small by chance, and eager is off there as well; where eager itself is off by more than
`RESOLVED` it resolves nothing that a kernel would have to.  Where a row has few values that are independent,
eager may be right by luck in some of the rows that a kernel is off in: it takes most of them, and more than
`BY_LUCK`, to be a fault.

A slice that is e^-65 of the others comes from an exponential whose argument no two ways of computing it agree
on beyond one rounding of 65: that much is allowed as well.  And in 16 bits a column may be off by what the
whole output may: inputs far from zero make a column cancel, and partial sums that are kept in 16 bits, which
are honest, leave there the error of what has cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FEW = 64
"""Elements that a row or column has at least: in fewer, what cancels is a matter of luck."""
RESOLVED = 1 / 16
BY_LUCK = 3


def rows_of(tensor: Tensor) -> Tensor | None:
    """(rows, elements): what has the same leading indices, `FEW` elements or more; None if that is all."""
    elements = 1
    for dim in range(tensor.dim() - 1, 0, -1):
        elements *= tensor.shape[dim]
        if elements >= FEW:
            return tensor.reshape(-1, elements)
    return None


def columns_of(tensor: Tensor) -> Tensor | None:
    """(columns, elements): what has the same last index, and of the dims before as few as make `FEW`."""
    elements = 1
    if tensor.dim() < 2 or tensor.shape[-1] < 2:
        return None
    for dim in range(tensor.dim() - 2, -1, -1):
        elements *= tensor.shape[dim]
        if elements >= FEW:
            return tensor.reshape(-1, elements, tensor.shape[-1]).transpose(1, 2).reshape(-1, elements)
    return None


class _Suspected(NamedTuple):
    """The rows or the columns: norms of each (``of``, and ``usual``) in units of the whole tensor's largest
    number, which of them are normal numbers, relative errors, and which of those are large."""

    name: str
    fold: Callable[[Tensor], Tensor | None]
    elements: int
    of: Tensor
    usual: Tensor
    normal: Tensor
    error: Tensor
    off_scale: Tensor


def lost(
    actual: Tensor, exact: Tensor, eager: Tensor, counted: Tensor, *, limit: float, typical: float
) -> str:
    """Which row or column is further off on its own scale than eager explains, or ``""``.

    ``counted`` marks the elements that are finite in all three.  ``typical`` is eager's error in the worst
    tile, ``limit`` how many times an error of eager's is allowed.
    """
    wide = torch.complex128 if exact.is_complex() else torch.float64
    reference = torch.where(counted, exact, 0).to(wide)
    if not reference.numel():
        return ""
    scale = reference.abs().max()
    unit = torch.where(scale > 0, scale, 1.0)
    size = reference.abs() / unit
    off = torch.where(counted, actual.to(wide) - reference, 0).abs() / unit
    suspected: list[_Suspected] = []
    for name, fold in (("row", rows_of), ("column", columns_of)):
        sizes, offs = fold(size), fold(off)
        if sizes is None or offs is None:
            continue
        of = torch.linalg.vector_norm(sizes, dim=1)
        usual = torch.linalg.vector_norm(of) / math.sqrt(len(of))
        normal = of * scale > smallest(eager.dtype) * math.sqrt(sizes.shape[1])
        error = torch.where(normal, torch.linalg.vector_norm(offs, dim=1) / of, 0.0)
        depth = torch.where(normal, (usual / of).log(), 0.0).clamp_min(0.0)
        off_scale = error > limit * (typical + depth * torch.finfo(eager.dtype).eps / 2)
        suspected.append(_Suspected(name, fold, sizes.shape[1], of, usual, normal, error, off_scale))
    if not suspected or not bool(torch.cat([s.off_scale for s in suspected]).any()):  # all waited for at once
        return ""
    for name, fold, elements, of, usual, normal, error, off_scale in suspected:
        theirs = fold(torch.where(counted, eager.to(wide) - reference, 0).abs() / unit)
        assert theirs is not None
        eagers = torch.where(normal, torch.linalg.vector_norm(theirs, dim=1) / of, 0.0)
        wrong = off_scale & (eagers <= RESOLVED) & (error > limit * eagers)
        if name == "column" and torch.finfo(eager.dtype).eps > torch.finfo(torch.float32).eps:
            wrong &= error * of > limit * typical * usual
        if int(wrong.sum()) > BY_LUCK + int(off_scale.sum()) / 2:
            worst = int(torch.where(wrong, error, 0.0).argmax())
            rms = float(of[worst] * scale) / math.sqrt(elements)
            return (
                f"{int(wrong.sum())} of {len(wrong)} {name}s are wrong on their own scale: {name} {worst} "
                f"(RMS {rms:.3g}) is off by {float(error[worst]):.3g} of its size, eager by "
                f"{float(eagers[worst]):.3g}"
            )
    return ""


def smallest(dtype: torch.dtype) -> float:
    """RMS of a row below which elements may be flushed to zero: some are too small to be normal numbers."""
    info = torch.finfo(dtype)
    return info.tiny if dtype == torch.float16 else info.tiny / info.eps
