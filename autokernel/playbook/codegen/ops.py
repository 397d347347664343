"""What each pointwise aten / prims op means as scalar arithmetic.

`POINTWISE` maps an op's base name to ``(rule, ir name)``.  The rules: ``same`` computes in the result's
type, ``compare`` in the arguments' common type, ``bool`` on truth values.  `SPECIAL` holds the few ops
that need more than a change of name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .index import constant
from .ir import FLOATS, Pool, Unsupported, Value, compute_dtype

Scalar = Value | float | int | bool

POINTWISE: dict[str, tuple[str, str]] = {
    **{
        name: ("same", name)
        for name in (
            "neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf",
            "abs", "floor", "ceil", "mul", "maximum", "minimum", "log1p", "expm1",
        )
    },
    "relu": ("same", "relu"),
    "reciprocal": ("same", "reciprocal"),
    "square": ("same", "square"),
    **{name: ("compare", name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"logical_{name}": ("bool", name) for name in ("and", "or", "not", "xor")},
}  # fmt: skip


def scalar(pool: Pool, value: Scalar, dtype: torch.dtype) -> Value:
    """``value`` as a `Value` of ``dtype``'s compute type; float to bool compares with zero."""
    if not isinstance(value, Value):
        return pool.const(value, dtype)
    if dtype == torch.bool and value.dtype != torch.bool:
        return pool.make("ne", [value, pool.const(0, value.dtype)], dtype=torch.bool)
    return pool.cast(value, dtype)


def common_dtype(args: Sequence[Scalar]) -> torch.dtype:
    """The type in which PyTorch compares ``args``; a Python scalar only raises the category."""
    tensors = [a.dtype for a in args if isinstance(a, Value)]
    dtype = tensors[0] if tensors else torch.int64
    for other in tensors[1:]:
        dtype = torch.promote_types(dtype, other)
    for a in args:
        if isinstance(a, bool):
            continue
        if isinstance(a, float) and dtype not in FLOATS:
            dtype = torch.float32
        if isinstance(a, int) and dtype == torch.bool:
            dtype = torch.int64
    return dtype


def pointwise(
    pool: Pool, name: str, args: Sequence[Scalar], kwargs: dict[str, Any], out: torch.dtype, label: str
) -> Value:
    """The value of op ``name`` on scalar ``args``; ``out`` is the dtype of the node, ``label`` its name."""

    def op(ir_name: str, operands: Sequence[Value], dtype: torch.dtype = out) -> Value:
        return pool.make(ir_name, operands, dtype=compute_dtype(dtype), name=label)

    if name in SPECIAL:
        return SPECIAL[name](pool, op, list(args), kwargs, out)
    rule, ir_name = POINTWISE[name]
    if rule == "compare":
        dtype = common_dtype(args)
        if (folded := _compare_positions(pool, name, args)) is not None:
            return folded
        return op(ir_name, [scalar(pool, a, dtype) for a in args], torch.bool)
    if rule == "bool":
        return op(ir_name, [scalar(pool, a, torch.bool) for a in args], torch.bool)
    if out in FLOATS or name in ("mul", "neg", "abs", "maximum", "minimum", "relu", "square"):
        return op(ir_name, [scalar(pool, a, out) for a in args])
    raise Unsupported(f"{name} on {out}")


def _compare_positions(pool: Pool, name: str, args: Sequence[Scalar]) -> Value | None:
    """Comparing two positions (a causal mask) is a range test, which may even be decided now."""
    sides = []
    for a in args:
        if isinstance(a, Value) and a.op == "index" and a.expr is not None:
            sides.append(a.expr)
        elif isinstance(a, int) or (isinstance(a, Value) and a.op == "const" and a.dtype == torch.int64):
            sides.append(constant(a.const if isinstance(a, Value) else a))
        else:
            return None
    if name == "ne" or not (sides[0].terms or sides[1].terms):
        return None
    gap, far = sides[0] - sides[1], 1 << 62
    lo, hi = {"lt": (-far, 0), "le": (-far, 1), "gt": (1, far), "ge": (0, far), "eq": (0, 1)}[name]
    return pool.in_range(gap, lo, hi)


def _add(
    pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype, sign: str
) -> Value:
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    a, b = (scalar(pool, x, out) for x in args[:2])
    if alpha == 1 and out == torch.int64 and a.op in ("index", "const") and b.op in ("index", "const"):
        left, right = (v.expr if v.expr is not None else constant(v.const) for v in (a, b))
        return pool.index(left + right if sign == "add" else left - right)  # positions stay symbolic
    if alpha != 1:
        b = pool.make("mul", [b, pool.const(alpha, out)], dtype=b.dtype)
    return op(sign, [a, b])


def _div(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
    mode = kwargs.get("rounding_mode")
    if out not in FLOATS:
        raise Unsupported("integer division")
    value = op("div", [scalar(pool, a, out) for a in args[:2]])
    if mode == "floor":
        return op("floor", [value])
    if mode == "trunc":
        raise Unsupported("truncating division")
    return value


def _pow(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
    base, exponent = args
    if isinstance(exponent, Value) and exponent.op == "const":
        exponent = exponent.const
    if isinstance(base, Value) and isinstance(exponent, int | float):
        x = scalar(pool, base, out)
        if exponent == int(exponent) and 0 <= abs(exponent) <= 8 and (out in FLOATS or exponent >= 0):
            n = abs(int(exponent))
            power, square = None, x
            while n:  # binary powering: few multiplications, each correctly rounded
                if n & 1:
                    power = square if power is None else op("mul", [power, square])
                n >>= 1
                if n:
                    square = op("mul", [square, square])
            power = power if power is not None else pool.const(1, out)
            return op("reciprocal", [power]) if exponent < 0 else power
        if out in FLOATS and abs(exponent) == 0.5:
            return op("sqrt" if exponent > 0 else "rsqrt", [x])
        if out in FLOATS and exponent == 1.5:
            return op("mul", [x, op("sqrt", [x])])
    if isinstance(base, int | float) and not isinstance(base, bool) and base > 0 and out in FLOATS:
        scaled = op("mul", [scalar(pool, exponent, out), pool.const(math.log2(base), out)])
        return op("exp2", [scaled])
    raise Unsupported(f"pow with exponent {exponent}")


def _where(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
    cond = scalar(pool, args[0], torch.bool)
    a, b = (scalar(pool, x, out) for x in args[1:])
    if cond.op == "const":
        return a if cond.const else b
    return op("where", [cond, a, b])


def _clamp(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
    value = scalar(pool, args[0], out)
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    if low is not None:
        value = op("maximum", [value, scalar(pool, low, out)])
    if high is not None:
        value = op("minimum", [value, scalar(pool, high, out)])
    return value


def _bitwise(ir_name: str) -> Callable:
    def rule(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
        if out != torch.bool:
            raise Unsupported(f"bitwise {ir_name} on integers")
        return op(ir_name, [scalar(pool, a, torch.bool) for a in args])

    return rule


def _is(ir_name: str) -> Callable:
    def rule(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
        (x,) = args
        if not isinstance(x, Value) or x.dtype not in FLOATS:
            return pool.const(False, torch.bool)
        if ir_name == "isnan":
            return op("ne", [x, x], torch.bool)
        size = pool.make("abs", [x], dtype=x.dtype)
        return op("eq", [size, pool.const(math.inf, x.dtype)], torch.bool)

    return rule


def _sign(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
    x, zero = scalar(pool, args[0], out), pool.const(0, out)
    below = op("where", [op("lt", [x, zero], torch.bool), pool.const(-1, out), op("mul", [x, zero])])
    return op("where", [op("gt", [x, zero], torch.bool), pool.const(1, out), below])


def _cast(pool: Pool, op: Callable, args: list[Scalar], kwargs: dict[str, Any], out: torch.dtype) -> Value:
    return scalar(pool, args[0], out)


SPECIAL: dict[str, Callable[..., Value]] = {
    "add": lambda p, o, a, k, d: _add(p, o, a, k, d, "add"),
    "sub": lambda p, o, a, k, d: _add(p, o, a, k, d, "sub"),
    "add_": lambda p, o, a, k, d: _add(p, o, a, k, d, "add"),
    "mul_": lambda p, o, a, k, d: o("mul", [scalar(p, x, d) for x in a]),
    "div": _div,
    "div_": _div,
    "true_divide": _div,
    "pow": _pow,
    "where": _where,
    "clamp": _clamp,
    "clamp_min": lambda p, o, a, k, d: _clamp(p, o, a[:2], {}, d),
    "clamp_max": lambda p, o, a, k, d: _clamp(p, o, a[:1], {"max": a[1] if len(a) > 1 else k["max"]}, d),
    "bitwise_and": _bitwise("and"),
    "bitwise_or": _bitwise("or"),
    "bitwise_not": _bitwise("not"),
    "bitwise_xor": _bitwise("xor"),
    "isnan": _is("isnan"),
    "isinf": _is("isinf"),
    "sign": _sign,
    "_to_copy": _cast,
    "convert_element_type": _cast,
}
