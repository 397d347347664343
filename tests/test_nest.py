"""Tensors in nests of every kind, and a call's own containers."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autokernel.capture.nest import of_its_own, tensors_of, with_tensors

Pair = namedtuple("Pair", "a b")


@dataclass
class Held:
    x: Tensor
    more: dict[str, Tensor]
    name: str = "held"


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Cache:
    """Grows with every call, and knows the module that it belongs to."""

    def __init__(self, owner: nn.Module, *kept: Tensor) -> None:
        self.owner, self.kept, self.steps = owner, list(kept), 0

    def grow(self, new: Tensor) -> None:
        self.kept.append(new)
        self.steps += 1


def test_plain_nests_keep_their_order_and_their_repeats() -> None:
    x, y = torch.zeros(1), torch.ones(2)
    value = (x, {"k": [y, None, x]}, Pair(y, 3))
    assert [t is u for t, u in zip(tensors_of(value), [x, y, x, y], strict=True)] == [True] * 4
    other = with_tensors(value, [torch.full((1,), float(i)) for i in range(4)])
    assert other[1]["k"][1] is None and other[1]["k"][2] == 2 and other[2] == Pair(torch.tensor([3.0]), 3)
    mine = of_its_own(value)
    mine[1]["k"].append(y)
    assert mine[0] is x and len(value[1]["k"]) == 3


def test_objects_are_looked_into() -> None:
    x, y, z = torch.zeros(1), torch.ones(2), torch.ones(3)
    value = ({"held": Held(x, {"m": y})}, Slotted(z))
    assert [t is u for t, u in zip(tensors_of(value), [x, y, z], strict=True)] == [True] * 3
    fresh = [t + 5 for t in (x, y, z)]
    other = with_tensors(value, fresh)
    assert [t is u for t, u in zip(tensors_of(other), fresh, strict=True)] == [True] * 3
    assert value[0]["held"].x is x and other[0]["held"].name == "held"


def test_a_cache_that_grows_is_a_calls_own() -> None:
    owner, kept = nn.Linear(2, 2), torch.zeros(3)
    cache = Cache(owner, kept)
    mine = of_its_own({"cache": cache})["cache"]
    mine.grow(torch.ones(1))
    assert (len(cache.kept), cache.steps) == (1, 0) and (len(mine.kept), mine.steps) == (2, 1)
    assert mine.kept[0] is kept and mine.owner is owner
    assert not any(t is p for t in tensors_of(cache) for p in owner.parameters())
