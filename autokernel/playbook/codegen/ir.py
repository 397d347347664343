"""The small language between the FX graph and the printers: scalar values of one loop nest.

A `Value` is what one element of one tensor is worth at the current position of the loop nest.  Values are
hash-consed by a `Pool`, so a subexpression that is used twice is one object and is printed once.
Arithmetic is in float32 for every float type up to 32 bits, and in float64 for float64: a cast down to
16 bits in the middle of a chain is not replayed, which can only bring the result closer to the float64
truth; the cast at a store is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .index import Atom, Expr

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Unsupported(Exception):
    """This subgraph can't be generated; the text is the reason, in one line."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that a value of ``dtype`` is computed in."""
    if dtype in (torch.float16, torch.bfloat16, torch.float32):
        return torch.float32
    if dtype in INTS and dtype != torch.int64:
        return torch.int32
    return dtype


@dataclass(frozen=True, eq=False)
class Value:
    """One scalar of the loop nest.

    ``op`` is ``load`` (``port``, ``expr`` the address, ``args`` an optional guard), ``const`` (``const``),
    ``index`` (``expr`` as an integer), ``in_range`` (``const`` = (lo, hi): ``lo <= expr < hi``), ``reduce``
    (``const`` = the kind, over the inner loop), ``acc`` (the accumulator of the matmul that this chain
    follows, ``port`` which one) or the name of a pointwise function applied to ``args``.
    ``dtype`` is the type it is computed in.
    """

    op: str
    args: tuple[Value, ...]
    dtype: torch.dtype
    expr: Expr | None = None
    port: int = -1
    const: Any = None
    name: str = ""
    number: int = 0

    @cached_property
    def _atoms(self) -> frozenset[Atom]:
        found: set[Atom] = set()
        if self.expr is not None:
            found |= self.expr.atoms()
        for arg in self.operands():
            found |= arg._atoms
        if self.op == "reduce":
            found = {a for a in found if not a.inner}
        return frozenset(found)

    def __repr__(self) -> str:
        return f"v{self.number}"

    def atoms(self) -> frozenset[Atom]:
        """The loop variables that this value changes with."""
        return self._atoms

    def operands(self) -> Iterator[Value]:
        yield from self.args
        if self.expr is not None:
            for term in self.expr.indirects():
                yield term.value


@dataclass
class Pool:
    """Makes values, the same object for the same content, and folds what is constant."""

    table: dict[tuple, Value] = field(default_factory=dict)

    def make(self, op: str, args: Sequence[Value] = (), **fields: Any) -> Value:
        name = fields.pop("name", "")
        key = (op, tuple(id(a) for a in args), *(repr(fields.get(k)) for k in ("const", "port", "dtype")))
        key = (*key, fields.get("expr"))
        found = self.table.get(key)
        if found is None:
            found = Value(op=op, args=tuple(args), name=name, number=len(self.table), **fields)
            self.table[key] = found
        return found

    def const(self, value: float | int | bool, dtype: torch.dtype) -> Value:
        dtype = compute_dtype(dtype)
        if dtype == torch.bool:
            value = bool(value)
        elif dtype in FLOATS:
            value = float(value)
        elif value == value and value not in (float("inf"), float("-inf")):
            value = int(value)
        return self.make("const", const=value, dtype=dtype)

    def index(self, expr: Expr) -> Value:
        if not expr.terms:
            return self.const(expr.const, torch.int64)
        return self.make("index", expr=expr, dtype=torch.int64)

    def in_range(self, expr: Expr, lo: int, hi: int) -> Value:
        """``lo <= expr < hi``, folded when the range of ``expr`` decides it."""
        low, high = expr.range
        if low >= lo and high < hi:
            return self.const(True, torch.bool)
        if high < lo or low >= hi:
            return self.const(False, torch.bool)
        return self.make("in_range", expr=expr, const=(max(lo, low), min(hi, high + 1)), dtype=torch.bool)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        dtype = compute_dtype(dtype)
        if value.dtype == dtype:
            return value
        if value.op == "const":
            return self.const(value.const, dtype)
        return self.make("cast", [value], dtype=dtype)

    def rewrite(self, roots: Sequence[Value], on_expr: Callable[[Expr, Callable], Expr]) -> list[Value]:
        """Copies of ``roots`` with every index expression passed through ``on_expr(expr, on_value)``."""
        done: dict[Value, Value] = {}

        def visit(value: Value) -> Value:
            if value not in done:
                args = [visit(a) for a in value.args]
                expr = on_expr(value.expr, visit) if value.expr is not None else None
                if value.op == "in_range" and expr is not None:
                    done[value] = self.in_range(expr, *value.const)
                elif value.op == "index" and expr is not None:
                    done[value] = self.index(expr)
                else:
                    const = value.const
                    done[value] = self.make(
                        value.op,
                        args,
                        dtype=value.dtype,
                        expr=expr,
                        port=value.port,
                        const=const,
                        name=value.name,
                    )
            return done[value]

        return [visit(v) for v in roots]


def walk(roots: Sequence[Value]) -> list[Value]:
    """Every value below ``roots``, each once, operands before their users."""
    order: list[Value] = []
    seen: set[int] = set()

    def visit(value: Value) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        for arg in value.operands():
            visit(arg)
        order.append(value)

    for root in roots:
        visit(root)
    return order
