"""A case: one set of inputs with its float64 answer, eager's answer, and eager's own error.

`CaseMaker` also knows the reference's output structure, and which outputs are pure data movement.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autokernel.judge import oracle
from autokernel.judge.compare import (
    Comparison,
    Measures,
    compare,
    error_of,
    is_inexact,
    nonfinite_masks_equal,
    rounding,
)
from autokernel.judge.inputs import DISTRIBUTIONS, InputSource
from autokernel.judge.layout import TensorSpec, fill
from autokernel.judge.subjects import tensors_of


def fresh_seed() -> int:
    return secrets.randbits(62)


@dataclass(slots=True)
class Case:
    """``inputs`` in contract order; ``exact``, ``eager`` and ``e0`` per output."""

    kind: str
    seed: int
    inputs: list[Tensor]
    exact: list[Tensor]
    eager: list[Tensor]
    e0: list[Measures]
    flags: list[str] = field(default_factory=list)
    excused: list[Tensor] = field(default_factory=list)
    """Per output, where it need not be NaN though float64's answer is; empty for nowhere."""

    @property
    def label(self) -> str:
        return f"{self.kind} inputs" if not self.flags else f"{self.kind} inputs ({'; '.join(self.flags)})"


class CaseMaker:
    """Makes cases for one task. Everything here is trusted and runs in the judge's process."""

    def __init__(self, source: InputSource, reference: nn.Module) -> None:
        self.source, self.reference = source, reference
        self.wide = oracle.widen_module(reference)
        self.exact_outputs: list[bool] = []
        """Per output: eager has been exact on every case so far, so a candidate must be."""

    def eager(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return tensors_of(oracle.eager(self.reference, inputs), strict=True)

    def output_specs(self) -> list[TensorSpec]:
        """Shape, dtype and strides of what eager returns."""
        inputs = self.place(self.source.draw("captured", fresh_seed(), 1.0))
        return [TensorSpec.of(t) for t in self.eager(inputs)]

    def place(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The values in the strides of the task's own inputs."""
        placed = []
        for port, value in zip(self.source.task.inputs, values, strict=True):
            if tuple(value.stride()) != tuple(port.stride):
                spec = TensorSpec(value.dtype, tuple(port.shape), tuple(port.stride))
                target = spec.view(torch.UntypedStorage(max(spec.extent, 1), device=value.device))
                fill(target, value)
                value = target
            placed.append(value)
        return placed

    def make(self, kind: str, *, seed: int | None = None, fresh_statics: bool = False) -> Case:
        """A case of this kind; its scale shrinks until eager and float64 are finite in the same places."""
        seed = fresh_seed() if seed is None else seed
        scales = DISTRIBUTIONS[kind].scales if kind in DISTRIBUTIONS else (1.0,)
        case = None
        for scale in scales:
            values = self.source.draw(kind, seed, scale, fresh_statics=fresh_statics)
            case = self._evaluate(kind, seed, self.place(values))
            if scale != scales[0]:
                case.flags.append(f"scale {scale:g}")
            if all(nonfinite_masks_equal(e, x) for e, x in zip(case.eager, case.exact, strict=True)):
                break
        assert case is not None
        self._learn(case)
        if kind == "nan":
            case.excused = self._excused(seed, case)
        return case

    def _excused(self, seed: int, case: Case) -> list[Tensor]:
        """Where an output is NaN by arithmetic alone, and the inputs that are NaN don't matter.

        ``0 * v`` is NaN where ``v`` is, and a kernel need not look at what a mask leaves out.  So: where
        float64's answer is the same whatever number stands in place of the NaN.
        """
        try:
            up, down = (
                tensors_of(oracle.exact(self.wide, self.place(self._poked(seed, number))), strict=True)
                for number in (10.0, -10.0)
            )
        except oracle.NoWideForm:
            return [torch.isnan(x) for x in case.exact]
        return [
            torch.isnan(x) & ((a == b) | (torch.isnan(e) != torch.isnan(x)))
            for x, e, a, b in zip(case.exact, case.eager, up, down, strict=True)
        ]

    def _poked(self, seed: int, number: float) -> list[Tensor]:
        return self.source.draw("nan", seed, 1.0, poke=number)

    def case_of(self, kind: str, inputs: list[Tensor]) -> Case:
        """The case that these inputs are (placed ones)."""
        return self._evaluate(kind, 0, inputs)

    def _evaluate(self, kind: str, seed: int, inputs: list[Tensor]) -> Case:
        eager = self.eager(inputs)
        try:
            exact = tensors_of(oracle.exact(self.wide, inputs), strict=True)
        except oracle.NoWideForm as why:
            exact = [oracle.widen(t) for t in eager]
            e0 = [
                Measures(*[2 * rounding(t.dtype)] * 3) if is_inexact(t.dtype) else Measures() for t in eager
            ]
            return Case(kind, seed, inputs, exact, eager, e0, [f"no float64 form: {why}"])
        e0 = [error_of(a, b) for a, b in zip(eager, exact, strict=True)]
        return Case(kind, seed, inputs, exact, eager, e0)

    def _learn(self, case: Case) -> None:
        exact = [m.zero for m in case.e0]
        self.exact_outputs = (
            [a and b for a, b in zip(self.exact_outputs, exact, strict=True)] if self.exact_outputs else exact
        )

    def check(self, case: Case, actual: Sequence[Tensor], e0: Sequence[Measures] | None = None) -> Comparison:
        """Judge the outputs of one case; ``e0`` is eager's largest error over cases of its kind."""
        worst: float | None = None
        e0 = e0 or case.e0
        for i, (got, exact, eager) in enumerate(zip(actual, case.exact, case.eager, strict=True)):
            name = "the output" if len(case.exact) == 1 else f"output {i}"
            result = compare(
                got, exact, eager, e0[i],
                label=f"{name} on {case.label}",
                exact_required=self.exact_outputs[i] or (case.kind == "integers" and e0[i].zero),
                fragile=lambda i=i: self._fragile(case, i),
                excused=case.excused[i] if case.excused else None,
            )  # fmt: skip
            if not result.ok:
                return result
            if result.ratio is not None:
                worst = max(worst or 0.0, result.ratio)
        return Comparison(True, ratio=worst)

    def _fragile(self, case: Case, output: int) -> Tensor:
        """Where an integer output changes when the floating inputs move by a few roundings."""
        gen = self.source.generator(fresh_seed())
        double = any(v.dtype == torch.float64 for v in case.inputs)
        changed = torch.zeros_like(case.exact[output], dtype=torch.bool)
        for _ in range(4):
            moved = []
            for value in case.inputs:
                if is_inexact(value.dtype):
                    noise = torch.randn(value.shape, generator=gen, device=value.device, dtype=torch.float64)
                    value = oracle.widen(value) * (1 + 4 * rounding(value.dtype) * noise)
                moved.append(value)
            result = oracle.exact(self.wide, moved, double_inputs=double)
            changed |= tensors_of(result, strict=True)[output] != case.exact[output]
        return changed


def worst_e0(cases: Sequence[Case]) -> list[Measures]:
    """Per output, the largest of each measure over the cases."""
    worst = list(cases[0].e0)
    for case in cases[1:]:
        worst = [a.largest(b) for a, b in zip(worst, case.e0, strict=True)]
    return worst
