"""What the Triton and the C++ printer share: names, index text, passes over a row, the file's Python shell."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from textwrap import wrap

import torch

from .index import Atom, Expr, FloorDiv, Indirect
from .ir import Value
from .schedule import Part, Plan, Port, Store

# C++ keywords and the names that the generated files use themselves
_RESERVED = set(keyword.kwlist) | {
    "row", "col", "pid", "row_ok", "col_ok", "tl", "triton", "torch", "math", "start", "run", "col_start",
    "auto", "bool", "char", "const", "default", "delete", "do", "double", "enum", "extern", "float", "goto",
    "inline", "int", "long", "namespace", "new", "operator", "private", "public", "register", "short", "signed",
    "sizeof", "static", "struct", "switch", "template", "this", "typedef", "union", "unsigned", "using",
    "virtual", "void", "volatile", "case", "catch", "class", "friend", "explicit", "export", "threads", "acc",
    "half_t", "bfloat_t", "out", "num_warps", "num_stages", "main", "exp", "log", "sin", "cos", "erf", "tanh",
    "sqrt", "pow", "abs", "floor", "ceil", "div", "y0", "y1", "yn", "j0", "j1", "jn", "gamma", "signgam", "index",
}  # fmt: skip


def identifier(text: str) -> str:
    """``text`` as a name that is legal in Python and in C++."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit():
        name = "v" + name
    return name + "_" if name in _RESERVED else name


@dataclass
class Names:
    """Hands out names, each once."""

    used: set[str]

    def fresh(self, wish: str) -> str:
        base = identifier(wish)
        name, k = base, 1
        while name in self.used:
            k += 1
            name = f"{base}_{k}"
        self.used.add(name)
        return name


def short_names(plan: Plan) -> list[str]:
    """Readable argument names: Dynamo's long paths are cut to their last words."""
    names = Names(set())
    out = []
    for port in plan.inputs:
        text = re.sub(r"_+$", "", port.name)
        text = re.sub(r"^[lL]_(self_)?", "", text)
        words = [w for w in text.split("_") if w]
        for marker in ("parameters", "buffers"):
            if marker in words:
                k = len(words) - 1 - words[::-1].index(marker)
                owner = [w for w in words[:k] if w != "modules" and not w.isdigit()][-1:]
                words = owner + words[k + 1 :]
        out.append(names.fresh("_".join(words) or "x"))
    return out


def index_text(expr: Expr, atom: Callable[[Atom], str], value: Callable[[Value], str], div: str) -> str:
    """``expr`` as source text; ``div`` is ``//`` or ``/`` (operands are never negative there)."""
    parts: list[str] = []
    for term, c in expr.terms:
        if isinstance(term, Atom):
            text = atom(term)
        elif isinstance(term, Indirect):
            text = value(term.value)
        else:
            base = index_text(term.base, atom, value, div)
            op = div if isinstance(term, FloorDiv) else "%"
            text = (
                f"({base}) {op} {term.by}"
                if len(term.base.terms) > 1 or term.base.const
                else f"{base} {op} {term.by}"
            )
            text = f"({text})"
        parts.append(text if c == 1 else f"{text} * {c}" if c != -1 else f"-{text}")
    if expr.const or not parts:
        parts.append(str(expr.const))
    return " + ".join(parts).replace("+ -", "- ")


def outer_atoms(outer: Sequence[Atom], position: str, div: str) -> list[tuple[Atom, str]]:
    """How each loop variable is recovered from the flattened ``position`` of the nest."""
    out, step = [], 1
    total = 1
    for atom in outer:
        total *= atom.extent
    for atom in reversed(outer):
        text = position if step == 1 else f"{position} {div} {step}"
        if step * atom.extent != total:
            text = f"{text} % {atom.extent}"
        out.append((atom, text))
        step *= atom.extent
    return list(reversed(out))


@dataclass
class Pass:
    """One sweep over the inner loop: what it folds, and at the end what it stores."""

    inner: list[Value]
    reductions: list[Value]
    row: list[Value]
    stores: list[Store]


def is_inner(value: Value, inner: set[Atom]) -> bool:
    return bool(value.atoms() & inner)


def passes(part: Part) -> tuple[list[Value], list[Pass]]:
    """``(row values needed before any sweep, the sweeps in order)``.

    A reduction that depends on another one needs a sweep of its own.  Inner values are listed in every
    sweep that needs them: recomputing is cheap, and what is not is kept in a row buffer by the printer.
    """
    inner = set(part.inner)
    values = part.values()
    level: dict[Value, int] = {}
    for v in values:
        base = max((level[o] for o in v.operands()), default=0)
        level[v] = base + (1 if v.op == "reduce" else 0)
    first = [v for v in values if level[v] == 0 and not is_inner(v, inner)]
    sweeps: list[Pass] = []
    for number in range(max(level.values(), default=0) + 1):
        reductions = [v for v in values if v.op == "reduce" and level[v] == number + 1]
        stores = part.stores if number == max(level.values(), default=0) else []
        roots = [v.args[0] for v in reductions] + [s.value for s in stores]
        roots += [t.value for s in stores for t in s.expr.indirects()]
        needed = _inner_below(roots, inner)
        row = [v for v in values if level[v] == number + 1 and not is_inner(v, inner) and v.op != "reduce"]
        sweeps.append(Pass([v for v in values if v in needed], reductions, row, list(stores)))
    return first, sweeps


def _inner_below(roots: Sequence[Value], inner: set[Atom]) -> set[Value]:
    found: set[Value] = set()
    stack = [r for r in roots if is_inner(r, inner)]
    while stack:
        v = stack.pop()
        if v in found:
            continue
        found.add(v)
        stack += [o for o in v.operands() if is_inner(o, inner)]
    return found


def softmax_like(part: Part, reduction: Value) -> bool:
    """The maximum is only subtracted from what it was taken over, so a NaN shows up by itself."""
    users = [v for v in part.values() if reduction in v.args]
    return bool(users) and all(v.op == "sub" and v.args == (reduction.args[0], reduction) for v in users)


def literal(value: object, minus_inf: str, plus_inf: str, nan: str) -> str:
    if isinstance(value, float):
        if value != value:
            return nan
        if value == inf:
            return plus_inf
        if value == -inf:
            return minus_inf
    return repr(value)


AS_EXPECTED = '''
def _as_expected(x, shape, stride, dtype):
    """``x`` in the layout this kernel was generated for; copied only if its strides differ."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"generated for {shape} {dtype}, called with {tuple(x.shape)} {x.dtype}")
    if x.stride() == stride or all(n == 1 or a == b for n, a, b in zip(shape, x.stride(), stride)):
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=x.device).copy_(x)
'''


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype)


def prologue(plan: Plan, names: Sequence[str], used: Sequence[int]) -> list[str]:
    """Lines of ``kernel_fn`` that check and normalise the inputs that are read."""
    lines = []
    for k in used:
        port = plan.inputs[k]
        lines.append(
            f"{names[k]} = _as_expected({names[k]}, {port.shape}, {port.stride}, {dtype_text(port.dtype)})"
        )
    return lines


def allocation(port: Port, device: str) -> str:
    if port.dense:
        return f"torch.empty({port.shape}, dtype={port.dtype}, device={device})"
    return f"torch.empty_strided({port.shape}, {port.stride}, dtype={port.dtype}, device={device})"


def real_view(name: str, port: Port) -> str:
    """The tensor that the kernel gets: complex tensors are passed as pairs of reals."""
    return f"torch.view_as_real({name})" if port.dtype.is_complex else name


@dataclass
class Fragment:
    """A piece of a kernel file: the constants that can be tuned, kernels, and one Python function."""

    constants: list[tuple[str, object]] = field(default_factory=list)
    space: dict[str, list] = field(default_factory=dict)
    fits: list[str] = field(default_factory=list)
    helpers: dict[str, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    function: list[str] = field(default_factory=list)


def file_text(
    title: str, detail: str, backend: str, fragments: Sequence[Fragment], main: Sequence[str] = ()
) -> str:
    """The text of a kernel file: docstring, imports, constants, helpers, kernels, functions."""
    imports = {
        "triton": ["import torch", "import triton", "import triton.language as tl"],
        "cpp": ["import torch", "", "from autokernel.backends import cpp_backend"],
        "torch": ["import math", "import operator", "", "import torch"],
    }[backend]
    lines = [
        f'"""{title}',
        "",
        *wrap(detail, 108),
        '"""',
        "",
        *imports,
        "",
        f'BACKEND = "{backend}"',
        'SHAPES = "fixed"',
        "",
    ]
    space: dict[str, list] = {}
    for fragment in fragments:
        lines += [f"{name} = {value!r}" for name, value in fragment.constants]
        space.update({name: values for name, values in fragment.space.items() if len(values) > 1})
    if space:
        lines.append("SPACE = {" + ", ".join(f'"{name}": {values}' for name, values in space.items()) + "}")
        if fits := [text for fragment in fragments for text in fragment.fits]:
            lines.append(f'SPACE_FITS = "{" and ".join(fits)}"')
    helpers: dict[str, str] = {}
    for fragment in fragments:
        helpers.update(fragment.helpers)
    blocks = [text.strip("\n") for text in helpers.values()]
    blocks += [text.strip("\n") for fragment in fragments for text in fragment.code]
    functions = ["\n".join(fragment.function) for fragment in fragments] + (["\n".join(main)] if main else [])
    if any("_as_expected(" in text for text in functions):
        functions.insert(0, AS_EXPECTED.strip("\n"))
    text = "\n".join(lines).rstrip("\n") + "\n\n\n" + "\n\n\n".join([*blocks, *functions]) + "\n"
    return text


def returned(plan: Plan) -> str:
    """The operand of ``return``: a tensor, or a tuple as the graph has it."""
    names = ", ".join(p.name for p in plan.outputs)
    return names if plan.single else f"({names},)" if len(plan.outputs) == 1 else names


def graph_ops(plan: Plan) -> str:
    return "Generated from the graph: " + ", ".join(plan.ops) + "."
