"""What the timed calls run on: contents that no call has had before, dealt anew for every round.

All arms of a round work on the same contents, one set per slot, one call per slot.  So an answer can't be
remembered, no call can be left out, and what the trusted eager arm returns in that very round says what
everyone else's outputs must be.  Bytes that differ from eager's are normal (another order of sums): by
eager's own error plus the candidate's allowance at most.  What is further off is compared with float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autokernel.judge.buffers import InputBuffers, OutputBuffers
from autokernel.judge.cases import Case, CaseMaker, fresh_seed
from autokernel.judge.compare import Measures, is_inexact, limits_for
from autokernel.judge.inputs import spec_of
from autokernel.judge.layout import fill
from autokernel.records import Port

SMALL = 4096
"""Integers and booleans: fewer are drawn for every call, more are rotated."""
SPREAD = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Random numbers are drawn for so many elements at most; more are made of several mixtures of them."""
SHIFTS = 1 << 14
"""So many places there are where a mixture may begin to read each of its two rows of random numbers."""


class Contents:
    """Deals the slots of ``inputs``; ``values[slot]`` is what lies there, judge-held.

    A floating activation is the sum of two windows of normal numbers, at places and in a proportion of its
    own, which costs a tenth of drawing it; the numbers are drawn anew for every round and are part of nothing
    else.  So no call of a round has an element in common with another, no round with what a kernel has seen
    before, and all have the distribution of a normal case (their deviation is 0.97 to 1.03).  Integers are
    drawn anew for every round and rotated, or drawn anew for every call.

    The activations lie as they do in ``inputs``, so that they are put there, and compared, all at once.

    ``statics``: a case's inputs, in contract order, of which the static ones stay what they are.
    """

    def __init__(self, inputs: InputBuffers, maker: CaseMaker, statics: Sequence[Tensor]) -> None:
        self.inputs, self.maker = inputs, maker
        self._random = random.SystemRandom()
        self._generator = torch.Generator(inputs.arena.device)
        ports = list(enumerate(maker.source.task.inputs))
        self._drawn = [(i, port) for i, port in ports if port.role == "activation"]
        specs = [spec_of(port) for _, port in ports]
        placed = maker.place(statics)
        active = {i for i, _ in self._drawn}
        self._mirror = torch.zeros(inputs.dealt_bytes // 8, dtype=torch.int64, device=inputs.arena.device)
        mirror = self._mirror.untyped_storage()
        self.values = [
            [slot[i].view(mirror) if i in active else placed[i] for i, _ in ports]
            for slot in inputs.slots[: inputs.timed]
        ]
        floating = [specs[i] for i in active if is_inexact(specs[i].dtype)]
        numel = max((s.numel * (1 + s.dtype.is_complex) for s in floating), default=1)
        double = any(s.dtype in (torch.float64, torch.complex128) for s in floating)
        self._numbers = torch.empty(
            (2, min(max(numel, 1), SPREAD[inputs.arena.device.type]) + SHIFTS),
            dtype=torch.float64 if double else torch.float32,
            device=inputs.arena.device,
        )

    def deal(self) -> None:
        """Put new contents into every slot that is timed."""
        self.draw()
        self.inputs.dealt().copy_(self._mirror)
        self.inputs.arena.sync()

    def draw(self) -> None:
        """New contents for every slot that is timed, in place of the last ones, but not put there yet."""
        self._generator.manual_seed(fresh_seed())
        self._numbers.normal_(generator=self._generator)
        self._numbers[0].mul_(0.8)
        for i, port in self._drawn:
            deal = self._mix if is_inexact(self.values[0][i].dtype) else self._discrete(port)
            for values in self.values:
                deal(values[i])

    def write(self, slot: int) -> None:
        self.inputs.write(slot, self.values[slot])

    def _discrete(self, port: Port) -> Callable[[Tensor], None]:
        drawn = self._activation(port)

        def deal(target: Tensor) -> None:
            few = drawn.numel() < SMALL
            fill(target, self._activation(port) if few else drawn.roll(self._random.randrange(drawn.numel())))

        return deal

    def _activation(self, port: Port) -> Tensor:
        return self.maker.source.activation(port, "normal", self._generator)

    def _mix(self, target: Tensor) -> None:
        dense = target
        if not target.is_contiguous():
            dense = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        flat = (torch.view_as_real(dense) if dense.dtype.is_complex else dense).view(-1)
        width = self._numbers.shape[1] - SHIFTS
        for start in range(0, flat.numel(), width):
            part = flat[start : start + width]
            if part.dtype in ADDABLE:
                self._window(part.numel(), out=part)
            else:
                part.copy_(self._window(part.numel()))
        if dense.dtype.is_complex:
            flat.mul_(0.5**0.5)
        if dense is not target:
            fill(target, dense)

    def _window(self, numel: int, out: Tensor | None = None) -> Tensor:
        first, second = (
            row[shift : shift + numel]
            for row, shift in zip(
                self._numbers, (self._random.randrange(SHIFTS) for _ in range(2)), strict=True
            )
        )
        share = self._random.uniform(0.55, 0.65) * self._random.choice((-1, 1))
        return torch.add(first, second, alpha=share, out=out)

    def changed(self, *, statics: bool = False) -> str:
        """Name of an input that no longer holds what was dealt, or ``""``; ``statics``: of those, too."""
        if not statics and torch.equal(self.inputs.dealt().to(self._mirror.device), self._mirror):
            return ""
        for slot, values in enumerate(self.values):
            if name := self.inputs.changed_input(slot, values):
                return name
        return ""

    def case(self, slot: int) -> Case:
        """The slot's contents with float64's and eager's answer."""
        return self.maker.case_of("fresh", self.values[slot])


SUSPECTS = 4
"""At most so many slots of an output are compared with float64 per round: the ones that are furthest off."""
ADDABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""What a sum of wider numbers can be written to without a step in between."""


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
