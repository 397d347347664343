"""Whole-model correctness: a float64 answer, eager's own error, and what a variant may have.

At every output a variant may have 1.5 times eager's error, and for outputs that are scores over classes,
top-1 agreement with float64 must be no worse than eager's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autokernel.capture.source import LoadedModel
from autokernel.integrate.subjects import tensors_of
from autokernel.judge import oracle
from autokernel.judge.compare import error_of, is_finite

MAX_ERROR_RATIO = 1.5
CLASSES = 16
"""A last dimension of at least so many scores counts as a choice among classes."""


@dataclass
class Answer:
    """One set of inputs with what float64 and eager make of it."""

    inputs: list[Tensor]
    exact: list[Tensor]
    eager: list[Tensor]
    flagged: str = ""

    @property
    def eager_error(self) -> float:
        return max((_error(e, x) for e, x in zip(self.eager, self.exact, strict=True)), default=0.0)


@dataclass(frozen=True)
class Agreement:
    ok: bool
    reason: str
    error_ratio: float | None


class WholeModelOracle:
    """Float64 answers for fresh inputs of one model.  Keeps a wide copy of the model while it is open."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._wide: Any = None

    def answer(self, seed: int) -> Answer:
        args, kwargs = self.loaded.fresh_inputs(seed)
        eager = _outputs(oracle.eager(self.loaded.model, args, kwargs))
        flagged = ""
        try:
            if self._wide is None:
                self._wide = _widened(self.loaded.model)
            exact = _outputs(oracle.exact(self._wide, args, kwargs))
        except oracle.NoWideForm as why:
            exact, flagged = eager, f"no float64 form ({why}); compared with eager"
        return Answer(tensors_of(args, kwargs), exact, eager, flagged)

    def close(self) -> None:
        self._wide = None


def _widened(model: Any) -> Any:
    """Raises NoWideForm for a model of which there can be no copy: one that holds a lock or a generator."""
    try:
        return oracle.widen_module(model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise oracle.NoWideForm(f"the model can't be copied: {error}") from error


def agree(answers: Sequence[Answer], outputs: Sequence[Sequence[Tensor]]) -> Agreement:
    """Whether a variant's ``outputs`` (one list per answer) are as good as eager's."""
    worst = 0.0
    for answer, got in zip(answers, outputs, strict=True):
        if len(got) != len(answer.exact):
            return Agreement(False, f"{len(got)} outputs instead of {len(answer.exact)}", None)
        for i, (mine, eager, exact) in enumerate(zip(got, answer.eager, answer.exact, strict=True)):
            label = "the output" if len(got) == 1 else f"output {i}"
            if mine.shape != eager.shape or mine.dtype != eager.dtype:
                return Agreement(False, f"{label} is {mine.dtype}{list(mine.shape)}, not {eager.dtype}"
                                 f"{list(eager.shape)}", None)  # fmt: skip
            if not mine.is_floating_point() and not mine.is_complex():
                if not torch.equal(mine, eager):
                    return Agreement(False, f"{label} (integers) differs from eager's", None)
                continue
            finite = is_finite(exact) & is_finite(eager)
            if not bool((is_finite(mine) | ~finite).all()):
                return Agreement(False, f"{label} has NaN or Inf where eager has numbers", None)
            e0, e = _error(eager, exact), _error(mine, exact)
            floor = torch.finfo(mine.dtype).eps if answer.flagged else torch.finfo(mine.dtype).eps / 8
            ratio = e / max(e0, floor)
            worst = max(worst, ratio)
            if ratio > MAX_ERROR_RATIO:
                return Agreement(False, f"{label}: error {e:.2e} is {ratio:.2f} times eager's {e0:.2e} "
                                 f"(limit {MAX_ERROR_RATIO})", ratio)  # fmt: skip
            if mine.dim() >= 2 and mine.shape[-1] >= CLASSES:
                theirs, ours = _wrong_top1(eager, exact), _wrong_top1(mine, exact)
                # Counts of near-ties scatter like counts do; two deviations are no evidence of a fault.
                if ours > theirs + 2 * max(1, theirs) ** 0.5:
                    return Agreement(False, f"{label}: {ours} positions differ from float64 in their top-1, "
                                     f"{theirs} with eager", ratio)  # fmt: skip
    return Agreement(True, "", worst)


def _outputs(result: Any) -> list[Tensor]:
    return [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _error(actual: Tensor, exact: Tensor) -> float:
    if not actual.is_floating_point() and not actual.is_complex():
        return 0.0
    return error_of(actual, exact).frobenius


def _wrong_top1(actual: Tensor, exact: Tensor) -> int:
    return int((actual.argmax(-1) != exact.argmax(-1)).sum())
