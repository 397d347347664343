"""Integer index expressions: the arithmetic that turns views into addresses.

An expression is a linear form, ``const + sum(coefficient * term)``, kept normalised so that equal
expressions compare equal.  A term is an `Atom` (a loop variable with a known extent), an `Indirect`
(an index that was loaded from memory, as in an embedding), or a `FloorDiv` / `Mod` of an expression that
could not be simplified away.  Every expression knows its range, which is how reshapes dissolve:
``(a * 64 + b) // 64`` is ``a`` as soon as ``0 <= b < 64`` is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any


@dataclass(frozen=True)
class Atom:
    """A loop variable that takes the values ``0 .. extent - 1``; reductions run over the inner ones."""

    name: str
    extent: int
    inner: bool = False

    @property
    def range(self) -> tuple[int, int]:
        return 0, self.extent - 1


@dataclass(frozen=True)
class Indirect:
    """An index read from memory; ``value`` is the `ir.Value` that holds it, within ``0 .. extent - 1``."""

    value: Any
    extent: int

    @property
    def range(self) -> tuple[int, int]:
        return 0, self.extent - 1


@dataclass(frozen=True)
class FloorDiv:
    base: Expr
    by: int

    @property
    def range(self) -> tuple[int, int]:
        lo, hi = self.base.range
        return lo // self.by, hi // self.by


@dataclass(frozen=True)
class Mod:
    base: Expr
    by: int

    @property
    def range(self) -> tuple[int, int]:
        return 0, self.by - 1


Term = Atom | Indirect | FloorDiv | Mod


@dataclass(frozen=True)
class Expr:
    """``const + sum(c * t for t, c in terms)``; build it with the functions below, not directly."""

    terms: tuple[tuple[Term, int], ...] = ()
    const: int = 0
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.terms, self.const)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value, both inclusive (exact for atoms, a bound otherwise)."""
        lo = hi = self.const
        for term, c in self.terms:
            a, b = term.range
            lo += min(a * c, b * c)
            hi += max(a * c, b * c)
        return lo, hi

    def __add__(self, other: Expr | int) -> Expr:
        if isinstance(other, int):
            return Expr(self.terms, self.const + other)
        return _linear([*self.terms, *other.terms], self.const + other.const)

    def __mul__(self, k: int) -> Expr:
        return _linear([(t, c * k) for t, c in self.terms], self.const * k)

    def __sub__(self, other: Expr | int) -> Expr:
        return self + (other * -1)

    def floordiv(self, by: int) -> Expr:
        if by == 1:
            return self
        whole, rest = self._divide(by)
        lo, hi = rest.range
        if lo // by == hi // by:  # the remainder never crosses a multiple
            return whole + lo // by
        if split := rest._split(by):  # (2a + b) // 4 == a // 2 when 0 <= b < 2
            g, coarse, _ = split
            return whole + coarse.floordiv(by // g)
        return whole + Expr(((FloorDiv(rest, by), 1),))

    def mod(self, by: int) -> Expr:
        if by == 1:
            return ZERO
        _, rest = self._divide(by)
        lo, hi = rest.range
        if lo // by == hi // by:
            return rest + -(lo // by) * by
        if split := rest._split(by):  # (2a + b) % 4 == 2 (a % 2) + b
            g, coarse, fine = split
            return coarse.mod(by // g) * g + fine
        return Expr(((Mod(rest, by), 1),))

    def _split(self, by: int) -> tuple[int, Expr, Expr] | None:
        """``(g, coarse, fine)`` with ``self == g * coarse + fine``, ``g`` a divisor of ``by``, ``0 <= fine < g``."""
        for c in sorted({abs(c) for _, c in self.terms}, reverse=True):
            g = gcd(c, by)
            if g == 1:
                continue
            fine = Expr(tuple((t, k) for t, k in self.terms if k % g), self.const % g)
            lo, hi = fine.range
            if lo >= 0 and hi < g:
                coarse = Expr(tuple((t, k // g) for t, k in self.terms if k % g == 0), self.const // g)
                return g, coarse, fine
        return None

    def _divide(self, by: int) -> tuple[Expr, Expr]:
        """``(q, r)`` with ``self == q * by + r``, every coefficient of ``r`` smaller than ``by``."""
        quotient = [(t, c // by) for t, c in self.terms if c % by == 0]
        rest = [(t, c) for t, c in self.terms if c % by]
        return _linear(quotient, self.const // by), _linear(rest, self.const % by)

    def atoms(self) -> set[Atom]:
        found: set[Atom] = set()
        for term, _ in self.terms:
            if isinstance(term, Atom):
                found.add(term)
            elif isinstance(term, FloorDiv | Mod):
                found |= term.base.atoms()
            else:
                found |= term.value.atoms()
        return found

    def nonlinear(self) -> list[FloorDiv | Mod]:
        """Every division and remainder in here, the inner ones included."""
        found: list[FloorDiv | Mod] = []
        for term, _ in self.terms:
            if isinstance(term, FloorDiv | Mod):
                found += [term, *term.base.nonlinear()]
        return found

    def indirects(self) -> list[Indirect]:
        found: list[Indirect] = []
        for term, _ in self.terms:
            if isinstance(term, Indirect):
                found.append(term)
            elif isinstance(term, FloorDiv | Mod):
                found += term.base.indirects()
        return found

    def coefficient(self, atom: Atom) -> int:
        return next((c for t, c in self.terms if t == atom), 0)

    def substitute(self, atom_map: dict[Atom, Expr], on_value: Callable[[Any], Any]) -> Expr:
        """Replace atoms by expressions; ``on_value`` rewrites the values inside `Indirect` terms."""
        out = Expr((), self.const)
        for term, c in self.terms:
            if isinstance(term, Atom):
                new = atom_map.get(term) or Expr(((term, 1),))
            elif isinstance(term, Indirect):
                new = Expr(((Indirect(on_value(term.value), term.extent), 1),))
            elif isinstance(term, FloorDiv):
                new = term.base.substitute(atom_map, on_value).floordiv(term.by)
            else:
                new = term.base.substitute(atom_map, on_value).mod(term.by)
            out = out + new * c
        return out


def _linear(terms: Iterable[tuple[Term, int]], const: int) -> Expr:
    total: dict[Term, int] = {}
    for term, c in terms:
        total[term] = total.get(term, 0) + c
    # (e // k) * k * m + (e % k) * m  ==  e * m
    for term in list(total):
        if isinstance(term, Mod) and total.get(term):
            partner, m = FloorDiv(term.base, term.by), total[term]
            if total.get(partner, 0) == m * term.by:
                del total[term], total[partner]
                return _linear([*total.items(), *(term.base * m).terms], const + term.base.const * m)
    kept = [(t, c) for t, c in total.items() if c]
    kept.sort(key=lambda item: repr(item[0]))
    return Expr(tuple(kept), const)


ZERO = Expr()


def constant(value: int) -> Expr:
    return Expr((), value)


def of(term: Term) -> Expr:
    """The expression that is just ``term``; an atom of extent 1 is 0."""
    if isinstance(term, Atom) and term.extent == 1:
        return ZERO
    return Expr(((term, 1),))


def flatten(index: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """Row-major position of ``index`` in a tensor of ``shape``."""
    out = ZERO
    for i, size in zip(index, shape, strict=True):
        out = out * size + i
    return out


def unflatten(position: Expr, shape: Sequence[int]) -> tuple[Expr, ...]:
    """The row-major index of a position; inverse of `flatten`."""
    out: list[Expr] = []
    for k, size in enumerate(reversed(shape)):
        if k == len(shape) - 1:
            out.append(position)  # the leading dim can't exceed its extent
        else:
            out.append(position.mod(size))
            position = position.floordiv(size)
    return tuple(reversed(out))


def address(index: Sequence[Expr], strides: Sequence[int]) -> Expr:
    """Element offset of ``index`` under ``strides``."""
    out = ZERO
    for i, stride in zip(index, strides, strict=True):
        out = out + i * stride
    return out
