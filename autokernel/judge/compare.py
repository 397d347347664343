"""The one comparator: how far an output is from float64, in units of eager's own error.

There is no absolute tolerance.  Three measures are taken against the float64 result, and each may be at
most a small multiple of what eager's is on the same kind of data (``e0``):

    frobenius   ||actual - exact|| / ||exact||
    peak        max |actual - exact| / RMS(exact)
    tile        the worst 64 x 64 tile's (short last dims: 64 rows') relative Frobenius error

They are in units of the whole output, or of a tile of typical size at least.  `slices.lost` then holds every
row and column against its own size, with the tile's limit.

Where eager is exact (pure data movement, integers) a candidate must be, too.  Results are values whose
``reason`` says which measure, where, and by how much, so that it can be quoted in a prompt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autokernel.judge import slices
from autokernel.judge.layout import TensorSpec, name_of, stride_order

TILE = 64
FEW = 64
"""Below this many elements eager's error is luck rather than a statistic; one rounding is then allowed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many times e0 each measure may be."""

    frobenius: float
    peak: float
    tile: float


NARROW = Limits(3.0, 4.0, 4.0)
SINGLE = Limits(16.0, 32.0, 16.0)
"""Sums in float32 in the order of memory are honest and up to 13 times as far off as eager's, which are in
pairs; a textbook cross-entropy, of inputs far from zero, is at 9.8 to 10.6 times.  The mildest dishonest
variant that its error tells is at 128 times (benchmarks/judge_limits.py)."""


def limits_for(dtype: torch.dtype) -> Limits:
    """By the precision the result is kept in (JUDGE: 16-bit and narrower; float32 and wider)."""
    return SINGLE if dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else NARROW


@dataclass(frozen=True, slots=True)
class Measures:
    """Errors against float64; ``nan`` where something that should be finite is not."""

    frobenius: float = 0.0
    peak: float = 0.0
    tile: float = 0.0

    def largest(self, other: Measures) -> Measures:
        return Measures(
            max(self.frobenius, other.frobenius), max(self.peak, other.peak), max(self.tile, other.tile)
        )

    @property
    def zero(self) -> bool:
        return self.frobenius == 0 and self.peak == 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether one output passes. ``ratio`` is its Frobenius error over eager's (None if not defined)."""

    ok: bool
    reason: str = ""
    ratio: float | None = None


PASS = Comparison(True)


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def rounding(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative."""
    return torch.finfo(dtype).eps / 2


def _as_wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 0 else tensor.reshape(1, 1)


def _tile_sums(squares: Tensor) -> Tensor:
    """Sums of a 2-d tensor over 64 x 64 tiles, padded with zeros."""
    rows, cols = squares.shape
    pad_r, pad_c = -rows % TILE, -cols % TILE
    if pad_r or pad_c:
        squares = torch.nn.functional.pad(squares, (0, pad_c, 0, pad_r))
    return squares.reshape((rows + pad_r) // TILE, TILE, (cols + pad_c) // TILE, TILE).sum(dim=(1, 3))


@dataclass(frozen=True)
class Where:
    """Where the errors were largest, found when it is asked for."""

    _element: Callable[[], tuple[int, ...]] = tuple
    _tile: Callable[[], tuple[int, int]] = lambda: (0, 0)

    @functools.cached_property
    def element(self) -> tuple[int, ...]:
        """Its index."""
        return self._element()

    @functools.cached_property
    def tile(self) -> tuple[int, int]:
        """Row and column of the tile in the flattened output."""
        return self._tile()


def measure(actual: Tensor, exact: Tensor, counted: Tensor | None = None) -> tuple[Measures, Where]:
    """The three measures over the elements in ``counted`` (all finite ones by default)."""
    if exact.numel() == 0:
        return Measures(), Where()
    reference = _as_wide(exact)
    if counted is None:
        counted = torch.isfinite(reference)
    zero = torch.zeros((), dtype=reference.dtype, device=reference.device)
    difference = torch.where(counted, _as_wide(actual) - reference, zero).abs()
    magnitude = torch.where(counted, reference, zero).abs()
    scale = magnitude.max()
    unit = torch.where(scale > 0, scale, 1.0)
    d2, r2 = (difference / unit).square(), (magnitude / unit).square()  # scaled: squares can't overflow
    total, n = r2.sum(), counted.sum().clamp_min(1)
    tiles_d, tiles_r = _tile_sums(_rows(d2)), _tile_sums(_rows(r2))
    # A tile that is zero in the reference (a masked-out corner) is held against 1 % of the typical tile.
    floor = 1e-4 * total / n * TILE * min(TILE, _rows(d2).shape[1])
    tile_errors = (tiles_d / (tiles_r + floor)).sqrt()
    found = (scale, difference.max(), total, n, d2.sum(), tile_errors.max())
    largest, worst, total, n, squares, tile = torch.stack([t.double() for t in found]).tolist()  # waits once
    where = Where(
        lambda: _unravel(int(difference.argmax()), exact.shape),
        lambda: _tile_at(int(tile_errors.argmax()), tiles_d.shape[1]),
    )
    if largest == 0:
        bad = math.inf if worst > 0 else (math.nan if math.isnan(worst) else 0.0)
        return Measures(bad, bad, bad), where
    frobenius, peak = math.sqrt(squares / total), worst / largest / math.sqrt(total / n)
    return Measures(frobenius, peak, tile), where


def _tile_at(index: int, columns: int) -> tuple[int, int]:
    return index // columns * TILE, index % columns * TILE


def is_finite(tensor: Tensor) -> Tensor:
    """``torch.isfinite``, which torch 2.11 doesn't have for float8_e4m3fn."""
    float8 = tensor.dtype.is_floating_point and tensor.element_size() == 1
    return torch.isfinite(tensor.float() if float8 else tensor)


def error_of(actual: Tensor, exact: Tensor) -> Measures:
    """e0 of one output of eager's. For integers ``frobenius`` is the number of elements that differ."""
    if is_inexact(actual.dtype):
        return measure(actual, exact, is_finite(exact) & is_finite(actual))[0]
    return Measures(float((actual != exact).sum()), 0.0, 0.0)


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        out.append(index % size)
        index //= size
    return tuple(reversed(out))


def check_structure(spec: TensorSpec, want: TensorSpec, label: str) -> str:
    """Why an output's form differs from the reference's (shape, dtype, stride order), or ``""``."""
    if spec.shape != want.shape:
        return f"{label} has shape {list(spec.shape)}, the reference's is {list(want.shape)}"
    if spec.dtype != want.dtype:
        return f"{label} is {name_of(spec.dtype)}, the reference's is {name_of(want.dtype)}"
    real = [d for d in range(len(want.shape)) if want.shape[d] > 1 and want.stride[d] != 0]
    if spec.numel and any(spec.stride[d] == 0 for d in real):
        return f"{label} is a broadcast of fewer values (strides {list(spec.stride)})"
    order = [d for d in stride_order(want.shape, want.stride) if d in real]
    got = [d for d in stride_order(spec.shape, spec.stride) if d in real]
    if order != got and spec.numel:
        return (
            f"{label} has strides {list(spec.stride)}; the next operator sees the reference's order, "
            f"{list(want.stride)}"
        )
    return ""


def nonfinite_masks_equal(a: Tensor, b: Tensor) -> bool:
    """Whether NaN, +inf and -inf stand in the same places."""
    if not is_inexact(a.dtype):
        return True
    if a.dtype.is_complex:
        return nonfinite_masks_equal(torch.view_as_real(a), torch.view_as_real(b))
    a, b = a.to(torch.float64), b.to(torch.float64)
    return bool(
        (torch.isnan(a) == torch.isnan(b)).all()
        and (torch.isposinf(a) == torch.isposinf(b)).all()
        and (torch.isneginf(a) == torch.isneginf(b)).all()
    )


def compare(
    actual: Tensor,
    exact: Tensor,
    eager: Tensor,
    e0: Measures,
    *,
    label: str,
    limits: Limits | None = None,
    exact_required: bool = False,
    fragile: Callable[[], Tensor] | None = None,
    excused: Tensor | None = None,
) -> Comparison:
    """Judge one output whose structure has been checked.

    ``exact``: float64's result. ``eager``: eager's on the same inputs. ``e0``: eager's largest error over
    the seeds of this kind of data. ``exact_required``: a rounding is an error here, because this is pure
    data movement (eager was exact on every kind of data), or sums of integers. ``fragile``: for integer
    outputs, called only if needed; marks the elements that change when inputs move by one rounding, the only
    ones where a mismatch is forgiven. ``excused`` marks elements that need not be NaN though float64's are.
    """
    if not is_inexact(eager.dtype):
        return _compare_integers(actual, exact, eager, int(e0.frobenius), label, fragile)
    limits = limits or limits_for(eager.dtype)
    verdict = _compare_nonfinite(actual, exact, eager, label, excused)
    if verdict is not None:
        return verdict
    counted = is_finite(exact) & is_finite(eager) & is_finite(actual)
    errors, where = measure(actual, exact, counted)
    floor = 0.0
    if not exact_required and (int(counted.sum()) < FEW or eager.dtype in (torch.float64, torch.complex128)):
        floor = 2 * rounding(eager.dtype)
    allowed = Measures(max(e0.frobenius, floor), max(e0.peak, floor), max(e0.tile, floor))
    if not exact_required and beyond(errors, allowed, limits):
        # Eager may happen to be exact, or nearly, on this kind of data only: softmax of large numbers is one.
        allowed = allowed.largest(rounded_once(exact, eager.dtype, counted))
    if allowed.zero:
        if errors.zero:
            return Comparison(True, ratio=0.0)
        got, want = actual[where.element].item(), exact[where.element].item()
        return Comparison(
            False,
            f"{label} must be exact, as eager is: element {list(where.element)} is {got!r}, not {want!r}",
        )
    ratio = errors.frobenius / allowed.frobenius if allowed.frobenius else math.inf
    if worst := beyond(errors, allowed, limits):
        return Comparison(False, _reason(label, *worst, actual, exact, where), ratio)
    if lost := slices.lost(actual, exact, eager, counted, limit=limits.tile, typical=allowed.tile):
        return Comparison(False, f"{label}: {lost}", ratio)
    return Comparison(True, ratio=ratio)


def beyond(errors: Measures, allowed: Measures, limits: Limits) -> tuple[str, float, float, float] | None:
    """The first measure that is more than its limit times the allowed: name, value, allowed, limit."""
    for name, value, unit, limit in (
        ("relative Frobenius error", errors.frobenius, allowed.frobenius, limits.frobenius),
        ("largest element error over RMS", errors.peak, allowed.peak, limits.peak),
        ("worst tile's relative error", errors.tile, allowed.tile, limits.tile),
    ):
        if not value <= limit * unit:
            return name, value, unit, limit
    return None


def rounded_once(exact: Tensor, dtype: torch.dtype, counted: Tensor) -> Measures:
    """The error of a right result that was rounded to ``dtype``: on average 0.4 of the largest rounding, and
    where it is largest 0.6, so that another number next to it is within the limits of 16 bits."""
    largest = measure(_as_wide(exact) * (1 + rounding(dtype)), exact, counted)[0]
    return Measures(0.4 * largest.frobenius, 0.6 * largest.peak, 0.4 * largest.tile)


def _reason(
    label: str, name: str, value: float, unit: float, limit: float, actual: Tensor, exact: Tensor,
    where: Where,
) -> str:  # fmt: skip
    times = f"{value / unit:.3g}x" if unit else "infinitely many times"
    place = (
        f"element {list(where.element)}: got {_number(actual, where)}, float64 has {_number(exact, where)}"
    )
    row, column = where.tile
    return (
        f"{label}: {name} {value:.3g} is {times} eager's own {unit:.3g} (limit {limit:g}x); worst {place}; "
        f"worst tile starts at row {row}, column {column} of {list(_rows(exact).shape)}"
    )


def _number(tensor: Tensor, where: Where) -> str:
    value = tensor[where.element].item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _compare_nonfinite(
    actual: Tensor, exact: Tensor, eager: Tensor, label: str, excused: Tensor | None
) -> Comparison | None:
    """NaN and infinities must stand where float64 has them, except where only eager overflowed."""
    if actual.dtype.is_complex:
        actual, exact, eager = (torch.view_as_real(t.resolve_conj()) for t in (actual, exact, eager))
        excused = None if excused is None else excused.unsqueeze(-1).expand(exact.shape)
    a, r = actual.to(torch.float64), exact.to(torch.float64)
    if bool((torch.isfinite(a) & torch.isfinite(r)).all()):
        return None
    forgiven = ~is_finite(eager) & torch.isfinite(r)
    if excused is not None:
        forgiven = forgiven | excused
    for name, of in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (of(a) != of(r)) & ~forgiven
        if bool(wrong.any()):
            index = _unravel(int(wrong.flatten().to(torch.uint8).argmax()), exact.shape)
            return Comparison(
                False,
                f"{label}: {int(wrong.sum())} of {exact.numel()} elements differ in where they are {name}; "
                f"element {list(index)} is {a[index].item()}, float64 has {r[index].item()}",
            )
    return None


def _compare_integers(
    actual: Tensor,
    exact: Tensor,
    eager: Tensor,
    budget: int,
    label: str,
    fragile: Callable[[], Tensor] | None,
) -> Comparison:
    """Exact, but for as many elements as eager gets wrong, and only where float64 itself is on the edge."""
    wrong = actual != exact
    count = int(wrong.sum())
    if count == 0 or torch.equal(actual, eager):
        return Comparison(True, ratio=float(count > 0))
    edge = eager != exact
    if fragile is not None and count <= budget:
        edge = edge | fragile()
    if count > budget or bool((wrong & ~edge).any()):
        index = _unravel(int(wrong.flatten().to(torch.uint8).argmax()), exact.shape)
        return Comparison(
            False,
            f"{label}: {count} of {exact.numel()} elements differ (eager: at most {budget}); element "
            f"{list(index)} is {actual[index].item()}, expected {exact[index].item()}",
        )
    return Comparison(True, ratio=count / budget)
