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


def merge_in_place(weights: list[Tensor], spare_rows: int = 0) -> bool:
    """Re-point parameters at consecutive slices of one new buffer, values kept; False if that can't be.

    To be done before the model is compiled.  Afterwards ``copy_``, ``load_state_dict`` and optimizers write
    through to the merged buffer.  ``.half()``, ``deepcopy`` and ``.data = new`` undo it.  ``spare_rows``
    rows of zeros are left behind the last one (see `pad_rows`).
    """
    first = weights[0]
    if not spare_rows and adjacent(weights):
        return True
    if len({id(w) for w in weights}) != len(weights):
        return False
    if any(
        w.dtype != first.dtype or w.device != first.device or w.shape[1:] != first.shape[1:] for w in weights
    ):
        return False
    if not all(w.is_contiguous() for w in weights):
        return False
    spare = [first.new_zeros((spare_rows, *first.shape[1:]))] if spare_rows else []
    merged = torch.cat([*(w.detach() for w in weights), *spare])
    start = 0
    for w in weights:
        w.data = merged[start : start + w.shape[0]]
        start += w.shape[0]
    return True


def pad_rows(weight: Tensor, rows: int) -> Tensor:
    """``weight`` (n, k) with at least ``rows`` further rows behind it, whose content is arbitrary.

    A view where the storage already goes on behind the weight (`merge_in_place` left room), else a copy
    padded with zeros.  For results whose columns beyond n are cut away again.
    """
    if weight.dim() == 2 and weight.is_contiguous():
        row = weight.shape[1]
        end = weight.storage_offset() + (weight.shape[0] + rows) * row
        if weight.untyped_storage().nbytes() >= end * weight.element_size():
            return weight.detach().as_strided(
                (weight.shape[0] + rows, row), (row, 1), weight.storage_offset()
            )
    return torch.nn.functional.pad(weight, (0, 0, 0, rows))
