"""How a worker's outputs get into the judge's output arena: what is copied, and where to.

Contiguous outputs are copied to the places that the judge has set aside for them.  Others (slices of a merged
result, another order of dims) would be a launch each on a GPU.  There they are copied as they lie, holes and
neighbours included, wherever that fits: the memory that they reach over in one piece, once for all outputs
that share it.  That takes no longer than contiguous outputs of the same size do, so nobody has to be given
time for it; and where an output lies is a claim that gains nothing, because the judge reads its values from
there, out of memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_ALIGN = 16
"""Bytes. A piece keeps its distance from such a border, so that wide loads work on both sides."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Handed(NamedTuple):
    """An output of the subject's latest calls.

    ``copied``: its contents are in the slot's output area; in its own strides ``place`` bytes from the area's
    start or, if that is None, where the judge has set room aside.
    """

    slot: int
    tensor: Tensor
    copied: bool
    place: int | None = None


class HandOver(NamedTuple):
    """What is copied (``sources`` to ``places``), and what is then where."""

    handed: list[Handed]
    sources: list[Tensor]
    places: list[Tensor]


def plan(
    results: Mapping[int, Sequence[Tensor]], areas: Sequence[Sequence[Tensor]], *, in_pieces: bool
) -> HandOver:
    """``results``: the outputs by slot; ``areas``: views of the arena, for every output of every slot.

    ``in_pieces``: as they lie, where outputs are not contiguous.  That saves launches on a GPU; on a CPU it
    takes longer to find out than to copy them value by value.
    """
    made = handed, sources, places = HandOver([], [], [])
    for slot, tensors in results.items():
        room = areas[slot] if slot < len(areas) else ()
        if in_pieces and _lying(made, slot, tensors, room):
            continue
        for i, tensor in enumerate(tensors):
            place = room[i] if i < len(room) else None
            fits = place is not None and place.shape == tensor.shape and place.dtype == tensor.dtype
            if place is not None and fits and place.device == tensor.device:
                sources.append(tensor)
                places.append(place)
                handed.append(Handed(slot, tensor, True))
            else:
                handed.append(Handed(slot, tensor, False))
    return made


def _lying(made: HandOver, slot: int, tensors: Sequence[Tensor], room: Sequence[Tensor]) -> bool:
    """Add the pieces of memory that the tensors reach over; False, and nothing added, if they are contiguous
    or there is no room."""
    if all(tensor.is_contiguous() for tensor in tensors) or len(room) < len(tensors):
        return False
    if any(
        (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device)
        for a, b in zip(tensors, room, strict=False)
    ):
        return False
    pieces: dict[int, tuple[Tensor, int, int]] = {}  # by storage: one of its tensors, first byte, end
    for tensor in tensors:
        key, low = _key_and_start(tensor)
        end = low + _reach(tensor)
        if key in pieces:
            _, other_low, other_end = pieces[key]
            low, end = min(low, other_low), max(end, other_end)
        pieces[key] = (tensor, low, end)
    (_, begin), (_, last) = _key_and_start(room[0]), _key_and_start(room[-1])
    size = last + _reach(room[-1]) - begin
    cursor, starts = 0, dict[int, int]()
    for key, (_, low, end) in pieces.items():
        starts[key] = -(-cursor // PIECE_ALIGN) * PIECE_ALIGN + low % PIECE_ALIGN
        cursor = starts[key] + end - low
    if cursor > size:
        return False
    for key, (tensor, low, end) in pieces.items():
        if end > low:
            word = next(w for w in WORDS if not (low | end | (begin + starts[key])) % w.itemsize)
            made.sources.append(_words(tensor, low, end, word))
            made.places.append(_words(room[0], begin + starts[key], begin + starts[key] + end - low, word))
    for tensor in tensors:
        key, start = _key_and_start(tensor)
        made.handed.append(Handed(slot, tensor, True, starts[key] + start - pieces[key][1]))
    return True


def _key_and_start(tensor: Tensor) -> tuple[int, int]:
    """What tells its storage from others, and the byte of it where the tensor begins."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size()


def _reach(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _words(tensor: Tensor, low: int, end: int, word: torch.dtype) -> Tensor:
    """Bytes ``low`` to ``end`` of the tensor's storage."""
    empty = torch.empty(0, dtype=word, device=tensor.device)
    count = (end - low) // word.itemsize
    return empty.set_(tensor.untyped_storage(), low // word.itemsize, (count,), (1,))  # pyright: ignore
