"""What the timed calls run on: contents that no call has had before, dealt anew for every round.

All arms of a round work on the same contents, one set per slot, one call per slot.  So an answer can't be
remembered, no call can be left out, and what the trusted eager arm returns in that very round says what
everyone else's outputs must be.  Bytes that differ from eager's are normal (another order of sums): by
eager's own error plus the candidate's allowance at most.  What is further off is compared with float64.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from autokernel.judge.buffers import InputBuffers, OutputBuffers
from autokernel.judge.cases import Case, CaseMaker
from autokernel.judge.compare import Measures, is_inexact, limits_for

SMALL = 4096
"""Elements of an activation below which it is drawn anew; larger ones are a base case's, rotated."""
SUSPECTS = 4
"""At most so many slots of an output are compared with float64 per round: the ones that are furthest off."""


class Contents:
    """Deals the slots of ``inputs``; ``values[slot]`` is what lies there, judge-held.

    ``bases`` are inputs of normal cases, in the strides of the task; static inputs are taken from the first.
    """

    def __init__(self, inputs: InputBuffers, maker: CaseMaker, bases: Sequence[Sequence[Tensor]]) -> None:
        self.inputs, self.maker, self.bases = inputs, maker, [list(b) for b in bases]
        self.values: list[list[Tensor]] = []
        self._random = random.SystemRandom()

    def deal(self) -> None:
        """Put new contents into every slot that is timed."""
        self.draw()
        for slot in range(self.inputs.timed):
            self.write(slot)
        self.inputs.arena.sync()

    def draw(self) -> None:
        """New contents for every slot that is timed, without putting them there."""
        self.values = [self._fresh() for _ in range(self.inputs.timed)]

    def write(self, slot: int) -> None:
        self.inputs.write(slot, self.values[slot])

    def _fresh(self) -> list[Tensor]:
        base = self._random.choice(self.bases)
        drawn: list[Tensor] | None = None
        values = []
        for i, port in enumerate(self.maker.source.task.inputs):
            value = base[i]
            if port.role != "activation":
                value = self.bases[0][i]
            elif value.numel() < SMALL:
                drawn = drawn or self.maker.fresh_inputs()
                value = drawn[i]
            else:
                value = torch.roll(value, self._random.randrange(1, value.numel()))
            values.append(value)
        return self.maker.place(values)

    def changed(self, *, statics: bool = False) -> str:
        """Name of an input that no longer holds what was dealt, or ``""``; ``statics``: of those, too."""
        if not statics and not self.inputs.activations_changed(self.values):
            return ""
        for slot, values in enumerate(self.values):
            if name := self.inputs.changed_input(slot, values):
                return name
        return ""

    def case(self, slot: int) -> Case:
        """The slot's contents with float64's and eager's answer."""
        return self.maker.case_of("fresh", self.values[slot])


def suspects(
    outputs: OutputBuffers, got: Tensor, eager: Tensor, count: int, e0: Sequence[Measures]
) -> list[int]:
    """Slots whose outputs are further from eager's than rounding explains, the furthest of each output first.

    ``got`` and ``eager`` are the rows of two output arenas (slots, bytes).
    """
    found: dict[int, None] = {}
    for spec, error in zip(outputs.slots[0], e0, strict=True):
        nbytes = spec.numel * spec.dtype.itemsize
        if nbytes == 0:
            continue
        mine, theirs = (rows[:count, spec.offset : spec.offset + nbytes] for rows in (got, eager))
        for slot in _furthest(mine, theirs, spec.dtype, error):
            found[slot] = None
    return list(found)


def _furthest(mine: Tensor, theirs: Tensor, dtype: torch.dtype, e0: Measures) -> list[int]:
    if not is_inexact(dtype):
        excess = (mine != theirs).sum(dim=1).double()
    else:
        a, b = (_numbers(rows, dtype) for rows in (mine, theirs))
        limits, off = limits_for(dtype), a - b
        scale, distance = (torch.linalg.vector_norm(x, dim=1) for x in (b, off))
        furthest = off.abs().amax(dim=1)
        rms = scale / b.shape[1] ** 0.5
        frobenius = distance / ((limits.frobenius + 1) * e0.frobenius * scale)
        excess = torch.maximum(frobenius, furthest / ((limits.peak + 1) * e0.peak * rms)) - 1
        for slot in excess.isnan().nonzero().flatten().tolist():
            # 0 / 0 where eager is exact, or not a number: of no concern if eager has the same
            excess[slot] = -1 if torch.equal(mine[slot], theirs[slot]) else torch.inf
    order = excess.argsort(descending=True)[:SUSPECTS].tolist()
    return [slot for slot in order if excess[slot] > 0]


def _numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as real numbers, wide enough that their differences are meaningful."""
    values = rows.contiguous().view(dtype)
    if dtype.is_complex:
        values = torch.view_as_real(values).flatten(1)
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
