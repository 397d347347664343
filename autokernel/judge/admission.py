"""Whether a task proves anything, found out before any kernel is tried on it.

A task is refused when an answer that computes nothing would pass, or when an input that claims to matter
does not.  Both come from the task (weights that are all zero, a constant output, an input that only lends its
shape), and then every verdict on it is worthless, however good the comparator.

Trivial answers, each held against the comparator with `MARGIN` times its limits:

- zeros;
- a constant, the mean of the output, and a cached answer, both from a call on *other* activations (what is
  known of this very call is no constant: of a scalar loss the mean would be the answer itself);
- each input, reshaped or broadcast where its shape allows.

The task is refused when every output has such an answer, on every kind of data that a screening uses (one
where it fails is enough to catch the kernel).  An output that *is* a copy, float64's values being an
input's own and eager's being those in the output's dtype (``contiguous``, ``reshape``, ``expand``, a cast, a
residual handed on), may be answered by that copy: it is then the honest kernel.  The other trivial answers
must fail there, too.  Cuts, concatenations, transposes and look-ups have other elements than their inputs in
these places, so that a copy fails by itself.  ``x + 1e-8 * w`` is no copy, but can't be told from one.

Dependence: each input is redrawn while the others are held, and float64's output must move by more than one
rounding of its dtype in some element of some output.  That part of an input is never read (a mask, rows
that are not looked up) is no fault.  Exempt: ``constant`` inputs, on whose value a rewrite may rely, and
inputs that can't be redrawn (whole numbers with one possible value, empty tensors).

Not covered: an output that is trivial beside one that isn't, a reference that is random, and influence that
only other data would show.  An input that only lends its shape or dtype has no influence and is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autokernel.judge import oracle
from autokernel.judge.cases import Case, CaseMaker, fresh_seed, worst_e0
from autokernel.judge.compare import (
    Limits,
    Measures,
    compare,
    is_finite,
    is_inexact,
    limits_for,
    measure,
    nonfinite_masks_equal,
    rounding,
)
from autokernel.judge.inputs import distributions_for
from autokernel.judge.subjects import tensors_of
from autokernel.records import Port

MARGIN = 10.0
"""How many times the comparator's limits a trivial answer must fail by."""
SLOW_S = 1.5
"""When eager and float64 together take longer (eager about a third), influence is looked for with eager."""
REDRAWS = 8


def refusal(maker: CaseMaker) -> str:
    """Why the task proves nothing, in one sentence; ``""`` when it is admitted.

    Costs two evaluations in eager and float64, and one in float64 per input beyond the first activation.
    """
    return _Admission(maker).refusal()


class _Admission:
    def __init__(self, maker: CaseMaker) -> None:
        self.maker, self.task = maker, maker.source.task
        self.kinds = distributions_for(self.task, "screen")
        begin = time.perf_counter()
        self.case = maker.make(self.kinds[0])
        self.slow = time.perf_counter() - begin > SLOW_S
        self.other = maker.make(self.kinds[0])
        if maker.source.has_captured and self.task.activations:
            self.kinds.append("captured")

    def refusal(self) -> str:
        if not any(t.numel() for t in self.case.exact):
            return "it proves nothing: its outputs are empty"
        reason = self._trivial(self.case, self.other)
        for kind in self.kinds[1:]:
            if not reason:
                break
            case = self.maker.make(kind)
            reason = reason if self._trivial(case, self.other) else ""
        return reason or self._unused()

    # -- trivial answers -----------------------------------------------------------------------------

    def _trivial(self, case: Case, other: Case) -> str:
        """The sentence when every output has a trivial answer that passes."""
        e0 = worst_e0([case, other]) if case.kind == other.kind else case.e0
        found = []
        for i, exact in enumerate(case.exact):
            if exact.numel() == 0:
                continue
            answer = self._passing(case, other, e0[i], i)
            if not answer:
                return ""
            found.append(f"{answer} would pass as {_label(case, i)}")
        zero = [p.name for p, v in zip(self.task.inputs, case.inputs, strict=True)
                if p.role != "activation" and v.numel() and not v.any()]  # fmt: skip
        cause = f" ({_quoted(zero)} {'is' if len(zero) == 1 else 'are'} all zero)" if zero else ""
        return f"it proves nothing: {' and '.join(found)}{cause}"

    def _passing(self, case: Case, other: Case, e0: Measures, i: int) -> str:
        for what, answer in _answers(self.task.inputs, case, other, i):
            limits = limits_for(answer.dtype)
            wider = Limits(MARGIN * limits.frobenius, MARGIN * limits.peak, MARGIN * limits.tile)
            if compare(
                answer, case.exact[i], case.eager[i], e0,
                label="", limits=wider, exact_required=self.maker.exact_outputs[i],
            ).ok:  # fmt: skip
                return what
        return ""

    # -- dependence ----------------------------------------------------------------------------------

    def _unused(self) -> str:
        """The sentence when an input has no influence, on any kind of data."""
        idle = self._idle_activations() + self._idle_statics()
        for kind in (*self.kinds[1:], self.kinds[0]):
            if not idle:
                break
            case = self.maker.make(kind)
            before = self._known(case)
            idle = [i for i in idle if not self._moves(case.inputs, before, i)]
        if not idle:
            return ""
        what = "the output does not depend" if len(self.case.exact) == 1 else "no output depends"
        names = [self.task.inputs[i].name for i in idle]
        return f"it proves nothing: {what} on {_quoted(names)}"

    def _idle_activations(self) -> list[int]:
        """Activations without influence: replaced one after the other, until all are the other case's."""
        places = [i for i, p in enumerate(self.task.inputs) if p.role == "activation"]
        idle, inputs, before = [], list(self.case.inputs), self._known(self.case)
        for i in places:
            fresh = self._redrawn(i, inputs[i], first=self.other.inputs[i])
            if fresh is None:
                continue
            inputs[i] = fresh
            if all(inputs[j] is self.other.inputs[j] for j in places):
                after = self._known(self.other)
            else:
                after = self._evaluate(inputs)
            if not self._differ(before, after):
                idle.append(i)
            before = after
        return idle

    def _idle_statics(self) -> list[int]:
        before = self._known(self.case)
        places = [i for i, p in enumerate(self.task.inputs) if p.role in ("parameter", "buffer")]
        return [i for i in places if not self._moves(self.case.inputs, before, i)]

    def _moves(self, inputs: Sequence[Tensor], before: Sequence[Tensor], i: int) -> bool:
        """Whether redrawing input ``i`` alone changes an output, or can't be done."""
        fresh = self._redrawn(i, inputs[i])
        if fresh is None:
            return True
        return self._differ(before, self._evaluate([*inputs[:i], fresh, *inputs[i + 1 :]]))

    def _redrawn(self, i: int, value: Tensor, first: Tensor | None = None) -> Tensor | None:
        """Other values for input ``i``, ``first`` if that differs; None when there are none."""
        source, port = self.maker.source, self.task.inputs[i]
        for attempt in range(REDRAWS):
            if attempt == 0 and first is not None:
                fresh = first
            elif port.role == "activation":
                fresh = self._placed(i, source.draw("normal", fresh_seed(), 1.0)[i])
            else:
                fresh = self._placed(i, _other_static(value, source.generator(fresh_seed())))
            if not torch.equal(fresh, value):
                return fresh
        return None

    def _placed(self, i: int, value: Tensor) -> Tensor:
        values = list(self.case.inputs)
        values[i] = value
        return self.maker.place(values)[i]

    def _known(self, case: Case) -> list[Tensor]:
        return case.eager if self.slow else case.exact

    def _evaluate(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if not self.slow:
            try:
                return tensors_of(oracle.exact(self.maker.wide, inputs), strict=True)
            except oracle.NoWideForm:
                pass
        return self.maker.eager(inputs)

    def _differ(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            dtype = self.case.eager[i].dtype
            if not is_inexact(dtype):
                if not torch.equal(a, b):
                    return True
                continue
            if not nonfinite_masks_equal(a, b):
                return True
            noise = rounding(dtype)
            if self.slow and math.isfinite(self.case.e0[i].peak):
                noise += 2 * self.case.e0[i].peak
            if measure(b, a, is_finite(a) & is_finite(b))[0].peak > noise:
                return True
        return False


def _answers(ports: Sequence[Port], case: Case, other: Case, i: int) -> Iterator[tuple[str, Tensor]]:
    """Answers that compute nothing, by what they are."""
    eager, exact = case.eager[i], case.exact[i]
    yield "zeros", torch.zeros_like(eager)
    yield "a constant", torch.full_like(eager, _mean(other.exact[i], eager.dtype))
    yield "the answer to other inputs", other.eager[i]
    for port, value in zip(ports, case.inputs, strict=True):
        copy = _shaped(value, eager)
        if copy is None:
            continue
        cast = copy.to(eager.dtype)
        moved = torch.equal(cast, eager) and torch.equal(oracle.widen(copy).to(exact.dtype), exact)
        if not moved:  # else the copy is the honest kernel
            yield f"a copy of {port.name!r}", cast


def _mean(values: Tensor, dtype: torch.dtype) -> complex:
    finite = values[is_finite(values)]
    wide = finite.to(torch.complex128 if values.dtype.is_complex else torch.float64)
    mean = wide.mean().item() if finite.numel() else 0.0
    return mean if is_inexact(dtype) else round(mean)


def _shaped(value: Tensor, like: Tensor) -> Tensor | None:
    """``value`` in the shape of ``like``, element by element or broadcast; None where that can't be."""
    if (value.dtype.is_complex and not like.dtype.is_complex) or value.numel() == 0:
        return None
    if value.numel() == like.numel():
        return value.reshape(like.shape)
    try:
        return value.expand(like.shape)
    except RuntimeError:
        return None


def _other_static(value: Tensor, gen: torch.Generator) -> Tensor:
    """Normal values of at least unit size, positive where the old ones are; whole numbers are reordered."""
    if not is_inexact(value.dtype):
        order = torch.randperm(value.numel(), generator=gen, device=value.device)
        return value.reshape(-1)[order].reshape(value.shape)
    wide = value.to(torch.complex64 if value.dtype.is_complex else torch.float32)
    size = max(1.0, float(wide.abs().square().mean().sqrt())) if value.numel() else 1.0
    fresh = size * torch.randn(value.shape, generator=gen, device=value.device, dtype=wide.dtype)
    if not value.dtype.is_complex and value.numel() and float(wide.min()) >= 0 and bool(wide.any()):
        fresh = fresh.abs()  # a variance must stay positive
    return fresh.to(value.dtype)


def _label(case: Case, i: int) -> str:
    return "the output" if len(case.exact) == 1 else f"output {i}"


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(repr(n) for n in names)
