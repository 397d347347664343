"""Helpers for ``prepack``: pack weights without holding them twice where that is possible."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_rows(*weights: Tensor) -> Tensor:
    """Stack matrices (n_i, k) into one (Σ n_i, k).

    Where they already lie one behind the other in one storage (`merge_in_place` put them there), the
    result is a view: it costs no memory and can't go stale.  Else it is a copy.
    """
    return adjacent_rows(weights) if adjacent(weights) else torch.cat(weights)


def adjacent(weights: tuple[Tensor, ...] | list[Tensor]) -> bool:
    """Whether contiguous tensors follow one another in one storage without a gap."""
    first = weights[0]
    end = None
    for w in weights:
        same = w.dtype == first.dtype and w.shape[1:] == first.shape[1:]
        if not same or not w.is_contiguous() or type(w.data) is not Tensor:
            return False
        if w.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        if end is not None and w.storage_offset() != end:
            return False
        end = w.storage_offset() + w.numel()
    return True


def adjacent_rows(weights: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    first = weights[0].detach()
    rows = sum(w.shape[0] for w in weights)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def merge_in_place(weights: list[Tensor]) -> bool:
    """Re-point parameters at consecutive slices of one new buffer, values kept; False if they can't be.

    To be done before the model is compiled.  Afterwards ``copy_``, ``load_state_dict`` and optimizers write
    through to the merged buffer.  ``.half()``, ``deepcopy`` and ``.data = new`` undo it.
    """
    first = weights[0]
    if adjacent(weights):
        return True
    if len({id(w) for w in weights}) != len(weights):
        return False
    if any(w.dtype != first.dtype or w.device != first.device or w.shape[1:] != first.shape[1:] for w in weights):
        return False
    if not all(w.is_contiguous() for w in weights):
        return False
    merged = torch.cat([w.detach() for w in weights])
    start = 0
    for w in weights:
        w.data = merged[start : start + w.shape[0]]
        start += w.shape[0]
    return True
