"""Print a `Plan` as a Triton kernel file: one launch, whole rows in registers where they fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import emit
from .index import Atom, Expr
from .ir import FLOATS, Unsupported, Value
from .schedule import Part, Plan, Store

MAX_ROW = 16384  # elements of a row that one program keeps in registers
DTYPES = {
    torch.float32: "tl.float32", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.bool: "tl.int1",
}  # fmt: skip

HELPERS = {
    "_exp": '''
@triton.jit
def _exp(x):
    """exp to float32 accuracy: the argument is reduced exactly before the hardware's exp2."""
    x = tl.where(x < -104.0, -104.0, tl.where(x > 90.0, 90.0, x))
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(n - 1.0) * 2.0
''',
    "_tanh": '''
@triton.jit
def _tanh(x):
    """tanh without cancellation near 0."""
    t = tl.abs(x)
    s = x * x
    p = ((((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
         - 3.33332819422e-1) * s * x + x
    e = tl.exp(-2.0 * t)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(t < 0.625, p, tl.where(x < 0, -far, far))
''',
    "_log1p": '''
@triton.jit
def _log1p(x):
    u = 1.0 + x
    safe = tl.where(u == 1.0, 2.0, u)
    exact = tl.log(safe) * (x / (safe - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, exact))
''',
    "_expm1": '''
@triton.jit
def _expm1(x):
    small = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334))))
    return tl.where(tl.abs(x) < 0.25, small, tl.exp(x) - 1.0)
''',
}  # fmt: skip

_PATTERNS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}",
    "where": "tl.where({0}, {1}, {2})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "exp": "{exp}({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "erf": "tl.erf({0})", "abs": "tl.abs({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "tanh": "_tanh({0})", "log1p": "_log1p({0})", "expm1": "_expm1({0})",
    "sigmoid": "1.0 / (1.0 + {exp}(-{0}))", "reciprocal": "1.0 / {0}", "square": "{0} * {0}",
}  # fmt: skip


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Printer:
    """Prints the values of one part; ``lines`` is the body, ``names`` what each value is called."""

    def __init__(
        self, plan: Plan, part: Part, pointers: dict[int, str], exact: bool, reserved: Sequence[str] = ()
    ) -> None:
        self.plan, self.part, self.pointers, self.exact = plan, part, pointers, exact
        self.names: dict[Value, str] = {}
        self.inputs = emit.short_names(plan)
        self.taken = emit.Names({*pointers.values(), *reserved, "row", "col"})
        self.atoms: dict[Atom, str] = {}
        self.inner = set(part.inner)
        self.masks: tuple[str, str] = ("row_ok", "col_ok")
        self.used: set[str] = set()

    def atom(self, atom: Atom) -> str:
        return self.atoms[atom]

    def ref(self, value: Value) -> str:
        if value.op == "const":
            text = emit.literal(value.const, 'float("-inf")', 'float("inf")', 'float("nan")')
            return f"({text})" if text.startswith("-") else text
        return self.names[value]

    def index(self, expr: Expr) -> str:
        return emit.index_text(expr, self.atom, self.ref, "//")

    def mask(self, outer: bool, inner: bool, guard: Value | None) -> str:
        terms = [m for m, on in zip(self.masks, (outer, inner), strict=True) if on and m]
        if guard is not None:
            terms.append(self.ref(guard))
        return " & ".join(terms)

    def depends(self, atoms: frozenset[Atom] | set[Atom]) -> tuple[bool, bool]:
        return any(not a.inner for a in atoms), bool(set(atoms) & self.inner)

    def statement(self, value: Value) -> str | None:
        """The line that computes ``value``, or None when it needs none."""
        if value.op in ("const", "acc"):
            return None
        label = value.name
        if value.op == "load":
            label = self.inputs[value.port] + (value.name[-3:] if value.name.endswith(("_re", "_im")) else "")
        name = self.taken.fresh(label or value.op)
        text = self.expression(value)
        self.names[value] = name
        return f"{name} = {text}"

    def expression(self, value: Value) -> str:
        if value.op == "load":
            assert value.expr is not None
            guard = value.args[0] if value.args else None
            atoms = value.expr.atoms()
            mask = self.mask(*self.depends(atoms), guard)
            dtype = self.plan.inputs[value.port].dtype
            options = (
                f", mask={mask}, other={'0' if dtype not in FLOATS and not dtype.is_complex else '0.0'}"
                if mask
                else ""
            )
            text = f"tl.load({self.pointers[value.port]} + ({self.index(value.expr)}){options})"
            stored = dtype.to_real() if dtype.is_complex else dtype
            return (
                text
                if stored == value.dtype and stored != torch.bool
                else f"{text}.to({DTYPES[value.dtype]})"
            )
        if value.op == "index":
            assert value.expr is not None
            return self.index(value.expr)
        if value.op == "in_range":
            assert value.expr is not None
            lo, hi = value.const
            text, (low, high) = f"({self.index(value.expr)})", value.expr.range
            tests = ([f"({text} >= {lo})"] if low < lo else []) + ([f"({text} < {hi})"] if high >= hi else [])
            return " & ".join(tests)
        if value.op == "cast":
            (arg,) = value.args
            return f"{self.ref(arg)}.to({DTYPES[value.dtype]})"
        if value.op == "clamp_index":
            return f"tl.minimum(tl.maximum({self.ref(value.args[0])}, 0), {value.const - 1})"
        if value.op not in _PATTERNS:
            raise Unsupported(f"the op {value.op} in Triton")
        pattern = _PATTERNS[value.op]
        text = pattern.format(*(self.ref(a) for a in value.args), exp="_exp" if self.exact else "tl.exp")
        self.used |= {h for h in HELPERS if text.startswith(f"{h}(") or f" {h}(" in text or f"+ {h}(" in text}
        return text

    def reduction(self, value: Value, tile: str, masked: bool) -> list[str]:
        """Fold a tile over its columns into a column vector."""
        (arg,) = value.args
        name = self.taken.fresh(value.name or "folded")
        self.names[value] = name
        if arg.op == "const" or not emit.is_inner(arg, self.inner):
            times = f"{tile} * {self.part.columns}" if value.const == "sum" else tile
            return [f"{name} = {times}"]
        if masked:
            tile = f"tl.where(col_ok, {tile}, {identity(value)})"
        lines = [f"{name} = tl.{value.const}({tile}, axis=1)[:, None]"]
        if value.const != "sum" and value.dtype in FLOATS and not emit.softmax_like(self.part, value):
            x = self.ref(arg)
            bad = f"({x} != {x})" + (" & col_ok" if masked else "")
            lines.append(
                f'{name} = tl.where(tl.max(({bad}).to(tl.int32), axis=1)[:, None] > 0, float("nan"), {name})'
            )
        return lines

    def stores(self, stores: Sequence[Store], pointers: dict[int, str]) -> list[str]:
        lines, done = [], set()
        for k, store in enumerate(stores):
            if k in done:
                continue
            mate = self._pair(stores, k)
            if mate is not None:
                done |= {k, mate}
                lines += self._store_pair(store, stores[mate], pointers[store.output])
                continue
            atoms = set(store.expr.atoms())
            mask = self.mask(*self.depends(atoms), None)
            where = self.index(store.expr) if atoms or store.expr.terms else f"row * 0 + {store.expr.const}"
            tail = f", mask={mask}" if mask else ""
            lines.append(f"tl.store({pointers[store.output]} + ({where}), {self.ref(store.value)}{tail})")
        return lines

    def _pair(self, stores: Sequence[Store], k: int) -> int | None:
        """The store that fills the odd lanes between those of store ``k``."""
        first = stores[k]
        column = self.part.inner[-1] if self.part.inner else None
        if column is None or first.expr.coefficient(column) != 2 or len(self.part.inner) > 1:
            return None
        for j in range(k + 1, len(stores)):
            other = stores[j]
            if other.output == first.output and other.expr == first.expr + 1:
                both = [self.depends(s.value.atoms()) for s in (first, other)]
                full = self.depends(frozenset(first.expr.atoms()))
                return j if all(b == full for b in both) else None
        return None

    def _store_pair(self, even: Store, odd: Store, pointer: str) -> list[str]:
        column = self.part.inner[-1]
        base = Expr(tuple((t, c) for t, c in even.expr.terms if t != column), even.expr.const)
        outer = self.depends(frozenset(even.expr.atoms()))[0]
        pair, lane = self.taken.fresh("pair"), self.taken.fresh("lane")
        mask = (["row_ok"] if outer and self.masks[0] else []) + (
            [f"({lane} < {2 * column.extent})"] if self.masks[1] else []
        )
        return [
            f"{pair} = tl.interleave({self.ref(even.value)}, {self.ref(odd.value)})  # even and odd lanes, one wide store",
            f"{lane} = col_start * 2 + tl.arange(0, 2 * BLOCK)[None, :]",
            f"tl.store({pointer} + ({self.index(base)} + {lane}), {pair}{', mask=' + ' & '.join(mask) if mask else ''})",
        ]


def identity(value: Value) -> str:
    if value.const == "sum":
        return "0.0" if value.dtype in FLOATS else "0"
    if value.dtype in FLOATS:
        return f'float("{"-inf" if value.const == "max" else "inf"}")'
    return str(-(2**31) if value.const == "max" else 2**31 - 1)


def wide(plan: Plan) -> bool:
    """Whether addresses need 64 bits."""
    scale = [p.extent * (2 if p.dtype.is_complex else 1) for p in [*plan.inputs, *plan.outputs]]
    return any(n >= 2**31 for n in scale)


def check_dtypes(plan: Plan) -> None:
    for port in [*plan.inputs, *plan.outputs]:
        if port.dtype in (torch.float64, torch.complex128, torch.complex32):
            raise Unsupported(f"{port.dtype} in Triton")
    for part in plan.parts:
        for value in part.values():
            if value.dtype == torch.float64:
                raise Unsupported("float64 arithmetic in Triton")


def exact_math(plan: Plan) -> bool:
    """float32 outputs deserve a float32-accurate exp; 16-bit ones don't notice."""
    return any(p.dtype in (torch.float32, torch.complex64) for p in plan.outputs)
