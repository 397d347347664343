"""Inputs and outputs that are more than tuples of tensors: the tensors in them, and the same with other ones.

A nest is anything that tensors hang in: tuples, lists, dicts, dataclasses, and objects such as a key-value
cache, at any depth.  A model may change such an object (a cache grows with every call), so a call gets one of
its own: `with_tensors` makes new containers around the tensors that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in order; of one that an object holds several times, once."""
    if _plain(value):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return list(_walk(value, set()))


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """``value`` with other tensors, as many as `tensors_of` finds, in new containers."""
    return filler(value)(tensors)


def filler(value: Any) -> Callable[[Sequence[Tensor]], Any]:
    """`with_tensors` for one ``value`` many times over: what it is made of is looked at once."""
    if _plain(value):
        leaves, structure = pytree.tree_flatten(value)

        def fill(tensors: Sequence[Tensor]) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return pytree.tree_unflatten(filled, structure)

        return fill
    old = tensors_of(value)
    kept = {id(m): m for m in _kept(value, set())}

    def copied(tensors: Sequence[Tensor]) -> Any:
        # What is in the memo counts as copied: the tensors as the new ones, and what is kept as itself.
        memo: dict[int, Any] = {id(a): b for a, b in zip(old, tensors, strict=True)}
        return copy.deepcopy(value, memo | kept)

    return copied


def of_its_own(value: Any) -> Any:
    """``value`` in new containers, which a model may change; the tensors are the same."""
    return with_tensors(value, tensors_of(value))


def _plain(value: Any) -> bool:
    """Whether it is built of tuples, lists and dicts alone, and so looks the same to everybody."""
    if isinstance(value, (Tensor, *_LEAVES)):
        return True
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return all(_plain(v) for v in value)
    return type(value) is dict and all(_plain(v) for v in value.values())


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, (*_LEAVES, nn.Module)) or (callable(value) and not _holds(value)):
        return
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    if _holds(value) and not isinstance(value, Tensor):
        yield from vars(value).values()
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            yield getattr(value, name)


def _holds(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type)


def _walk(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        yield value
        return
    if not isinstance(value, _LEAVES):
        seen.add(id(value))
    for child in _children(value):
        yield from _walk(child, seen)


def _kept(value: Any, seen: set[int]) -> Iterator[Any]:
    """What a call shares with all others: modules, and objects of which there can be no second one."""
    if isinstance(value, nn.Module):
        yield value
        return
    if isinstance(value, (Tensor, *_LEAVES)) or id(value) in seen:
        return
    seen.add(id(value))
    children = [*(vars(value).values() if _holds(value) else []), *_children(value)]
    if type(value) not in _CONTAINERS and not _copyable(value) and not list(_walk(value, set())):
        yield value
        return
    for child in children:
        yield from _kept(child, seen)


_CONTAINERS = (tuple, list, dict, set, frozenset)


def _copyable(value: Any) -> bool:
    """False for a lock, an open file, a generator and their like."""
    try:
        copy.deepcopy(value)
    except TypeError:  # what pickle and copy say of them
        return False
    return True
