"""Print a `Plan` as a C++ / OpenMP kernel file: threads over rows, vectorised loops over columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from . import emit
from . import index as ix
from .cpp_math import header
from .index import Atom, Expr
from .ir import FLOATS, Unsupported, Value
from .schedule import Part, Plan, Store, plan

INDENT = "    "
COLUMN_CHUNK = (
    4096  # columns that one task of a pointwise loop takes; also the length of a float32 partial sum
)
PARALLEL_FROM = 16384  # elements below which starting threads costs more than it gives
_CTYPES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "half_t", torch.bfloat16: "bfloat_t",
    torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t",
    torch.uint8: "uint8_t", torch.bool: "uint8_t",
}  # fmt: skip
_EXPENSIVE = {
    "exp",
    "exp2",
    "tanh",
    "erf",
    "log",
    "log2",
    "log1p",
    "expm1",
    "sigmoid",
    "sin",
    "cos",
    "sqrt",
    "rsqrt",
    "div",
}
_PATTERNS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "!{0}",
    "where": "{0} ? {1} : {2}", "maximum": "larger({0}, {1})", "minimum": "smaller({0}, {1})",
    "relu": "larger({0}, ({T})0)", "exp": "fast_exp({0})", "exp2": "fast_exp({0} * ({T})0.6931471805599453)",
    "log": "fast_log({0})", "log2": "fast_log({0}) * ({T})1.4426950408889634", "sqrt": "std::sqrt({0})",
    "rsqrt": "({T})1 / std::sqrt({0})", "sin": "std::sin({0})", "cos": "std::cos({0})", "erf": "fast_erf({0})",
    "abs": "std::abs({0})", "floor": "std::floor({0})", "ceil": "std::ceil({0})", "tanh": "fast_tanh({0})",
    "log1p": "fast_log1p({0})", "expm1": "fast_expm1({0})", "sigmoid": "({T})1 / (({T})1 + fast_exp(-{0}))",
    "reciprocal": "({T})1 / {0}", "square": "{0} * {0}",
}  # fmt: skip


def _ctype(dtype: torch.dtype) -> str:
    if dtype not in _CTYPES:
        raise Unsupported(f"{dtype} in C++")
    return _CTYPES[dtype]


def _vtype(dtype: torch.dtype) -> str:
    """The type a value is held in; truth values are ints, which share vector lanes with floats."""
    return "int" if dtype == torch.bool else _ctype(dtype)


class Printer:
    """Prints the values of one part as C++ statements."""

    def __init__(self, plan: Plan, part: Part, inputs: Sequence[str]) -> None:
        self.plan, self.part = plan, part
        self.pointers = {k: f"{name}_ptr" for k, name in enumerate(inputs)}
        self.outs = {k: f"{p.name}_ptr" for k, p in enumerate(plan.outputs)}
        self.inputs = list(inputs)
        self.taken = emit.Names({*self.pointers.values(), *self.outs.values()})
        self.atoms: dict[Atom, str] = {}
        self.names: dict[Value, str] = {}
        self.inner = set(part.inner)
        self.functions: set[str] = set()

    def ref(self, value: Value) -> str:
        if value.op != "const":
            return self.names[value]
        if value.dtype == torch.bool:
            return "1" if value.const else "0"
        if value.dtype in FLOATS:
            kind = _ctype(value.dtype)
            text = emit.literal(float(value.const), "-INF", "INF", "NAN_")
            if "N" in text:
                return f"({kind}){text}"
            text += "f" if kind == "float" else ""
            return f"({text})" if text.startswith("-") else text
        return f"({value.const})" if value.const < 0 else str(value.const)

    def index(self, expr: Expr) -> str:
        return emit.index_text(expr, lambda a: self.atoms[a], self.ref, "/")

    def statement(self, value: Value) -> list[str]:
        if value.op == "const" or value in self.names:
            return []
        label = value.name
        if value.op == "load":
            label = self.inputs[value.port] + (
                value.name[-3:] if value.name.endswith(("_re", "_im")) else "_v"
            )
        text = self.expression(value)
        name = self.taken.fresh(label or value.op)
        self.names[value] = name
        return [f"const {_vtype(value.dtype)} {name} = {text};"]

    def expression(self, value: Value) -> str:
        kind = _ctype(value.dtype)
        if value.op == "load":
            assert value.expr is not None
            dtype = self.plan.inputs[value.port].dtype
            text = f"{self.pointers[value.port]}[{self.index(value.expr)}]"
            if dtype in (torch.float16, torch.bfloat16):
                text = f"load({text})"
            if dtype == torch.bool:
                text = f"{text} != 0"
            if value.args:
                text = f"{self.ref(value.args[0])} ? {text} : ({kind})0"
            return text
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
            return f"({_vtype(value.dtype)}){self.ref(value.args[0])}"
        if value.op == "clamp_index":
            x = self.ref(value.args[0])
            return f"{x} < 0 ? 0 : ({x} > {value.const - 1} ? {value.const - 1} : {x})"
        if value.op not in _PATTERNS:
            raise Unsupported(f"the op {value.op} in C++")
        pattern = _PATTERNS[value.op]
        self.functions |= {
            n
            for n in ("fast_exp", "fast_tanh", "fast_erf", "fast_log", "fast_log1p", "fast_expm1")
            if n + "(" in pattern
        }
        self.functions |= {"larger"} if "larger" in pattern or "smaller" in pattern else set()
        return pattern.format(*(self.ref(a) for a in value.args), T=kind)

    def store(self, store: Store) -> str:
        port = self.plan.outputs[store.output]
        dtype = port.dtype.to_real() if port.dtype.is_complex else port.dtype
        target = f"{self.outs[store.output]}[{self.index(store.expr)}]"
        if dtype in (torch.float16, torch.bfloat16):
            return f"::store(&{target}, {self.ref(store.value)});"
        return f"{target} = ({_ctype(dtype)}){self.ref(store.value)};"


def _part_lines(built: Plan, part: Part, printer: Printer) -> list[str]:
    first, sweeps = emit.passes(part)
    lines: list[str] = []
    chunks = 1
    if not part.reduces and part.columns > 2 * COLUMN_CHUNK and len(part.inner) == 1:
        chunks = -(-part.columns // COLUMN_CHUNK)
    buffered = _buffered(part, sweeps)
    work = part.rows * part.columns
    go = f" if ({work}L >= {PARALLEL_FROM}L)"
    lines.append(f"#pragma omp parallel num_threads(threads){go}")
    lines.append("{")
    for value in buffered:
        name = printer.taken.fresh(f"{value.name or value.op}_row")
        buffered[value] = name
        kind = _vtype(value.dtype)
        lines.append(f"{INDENT}std::vector<{kind}> {name}_storage({part.columns});")
        lines.append(f"{INDENT}{kind}* __restrict {name} = {name}_storage.data();  // kept for a later sweep")
    lines.append(f"{INDENT}#pragma omp for schedule(static)")
    outer, middle = part.outer, None
    if len(outer) > 1 and prod(a.extent for a in outer[:-1]) >= 64 and part.columns <= 1024:
        outer, middle = outer[:-1], outer[-1]  # short rows: walk the last loop by steps, not by division
    if chunks > 1:
        lines.append(f"{INDENT}for (int64_t task = 0; task < {part.rows * chunks}; ++task) {{")
        lines.append(
            f"{INDENT * 2}const int64_t row = task / {chunks}, begin = task % {chunks} * {COLUMN_CHUNK};"
        )
        lines.append(
            f"{INDENT * 2}const int64_t end = begin + {COLUMN_CHUNK} < {part.columns} ? begin + {COLUMN_CHUNK} : {part.columns};"
        )
        bounds = ("begin", "end")
    else:
        lines.append(f"{INDENT}for (int64_t row = 0; row < {prod(a.extent for a in outer)}; ++row) {{")
        bounds = ("0", str(part.inner[-1].extent if part.inner else 1))
    body: list[str] = []
    for atom, text in emit.outer_atoms(outer, "row", "/"):
        name = "row" if text == "row" else printer.taken.fresh(atom.name)
        printer.atoms[atom] = name
        if name != "row":
            body.append(f"const int64_t {name} = {text};")
    inside: list[str] = []
    if middle is not None:
        printer.atoms[middle] = printer.taken.fresh(middle.name)
    for value in first:
        inside += printer.statement(value)
    for sweep in sweeps:
        inside += _sweep(part, printer, sweep, buffered, bounds)
    if middle is not None:
        name = printer.atoms[middle]
        inside = [
            f"for (int64_t {name} = 0; {name} < {middle.extent}; ++{name}) {{",
            *(INDENT + x for x in inside),
            "}",
        ]
    body += inside
    lines += [INDENT * 2 + line for line in body]
    lines += [f"{INDENT}}}", "}"]
    return lines


def _buffered(part: Part, sweeps: Sequence[emit.Pass]) -> dict[Value, str]:
    """Inner values worth keeping from one sweep to the next: those that are expensive to compute again."""
    result: dict[Value, str] = {}
    seen: set[Value] = set()
    covered: set[Value] = set()
    for sweep in sweeps:
        for value in reversed(sweep.inner):  # users before operands: keep the outermost only
            if value in seen and value.op in _EXPENSIVE and value not in covered and part.columns <= 1 << 20:
                result[value] = ""
                covered |= emit._inner_below([value], set(part.inner))
        seen |= set(sweep.inner)
    return result


def _sweep(
    part: Part, printer: Printer, sweep: emit.Pass, buffered: dict[Value, str], bounds: tuple[str, str]
) -> list[str]:
    before: list[str] = []
    inner = set(part.inner)
    known = dict(printer.names)
    body: list[str] = []
    for atom in part.inner[:-1]:
        printer.atoms[atom] = f"{atom.name}_col"
    if part.inner:
        printer.atoms[part.inner[-1]] = "col"
    at = emit.index_text(
        ix.flatten([ix.of(a) for a in part.inner], [a.extent for a in part.inner]),
        lambda a: printer.atoms[a],
        str,
        "/",
    )
    written = getattr(printer, "written", set())
    needed = _still_needed(sweep, inner, {v for v in buffered if v in written})
    for value in needed:
        if value in buffered and value in written:
            name = printer.taken.fresh(f"{value.name or value.op}_kept")
            printer.names[value] = name
            body.append(f"const {_vtype(value.dtype)} {name} = {buffered[value]}[{at}];")
            continue
        body += printer.statement(value)
        if value in buffered:
            body.append(f"{buffered[value]}[{at}] = {printer.names[value]};")
            written.add(value)
    printer.written = written  # type: ignore[attr-defined]
    clauses, after = [], []
    width = part.inner[-1].extent if part.inner else 1
    wide_sum = part.columns > 2 * COLUMN_CHUNK
    folded: dict[Value, str] = {}
    for value in sweep.reductions:
        (arg,) = value.args
        kind = _ctype(value.dtype)
        name = printer.taken.fresh(value.name or "folded")
        folded[value] = name
        is_sum = value.const == "sum"
        if not emit.is_inner(arg, inner):
            before.append(
                f"const {kind} {name} = {printer.ref(arg)}{f' * {part.columns}' if is_sum else ''};"
            )
            continue
        partial = f"{name}_part" if is_sum and wide_sum else name
        before.append(f"{kind} {name} = {_identity(value)};")
        x = printer.ref(arg)
        if is_sum:
            body.append(f"{partial} += {x};")
            clauses.append(f"reduction(+:{partial})")
            if wide_sum:
                after.append((kind, name, partial))
        else:
            sign = ">" if value.const == "max" else "<"
            body.append(f"{name} = {x} {sign} {name} ? {x} : {name};")
            clauses.append(f"reduction({value.const}:{name})")
            if value.dtype in FLOATS and not emit.softmax_like(part, value):
                flag = printer.taken.fresh(f"{name}_nan")
                before.append(f"int {flag} = 0;")
                body.append(f"{flag} |= {x} != {x};")
                clauses.append(f"reduction(|:{flag})")
                after.append((kind, name, flag))
    vector = [s for s in sweep.stores if emit.is_inner(s.value, inner) or s.expr.atoms() & inner]
    body += [printer.store(s) for s in vector]
    lines = list(before)
    simd = "#pragma omp simd" + "".join(f" {c}" for c in clauses)
    partials = [a for a in after if a[2].endswith("_part")]
    if any(emit.is_inner(r.args[0], inner) for r in sweep.reductions) or vector:
        if partials:  # long rows: float32 partial sums, so that rounding errors don't pile up
            chunk = [f"for (int64_t begin = 0; begin < {width}; begin += {COLUMN_CHUNK}) {{"]
            chunk.append(
                f"{INDENT}const int64_t end = begin + {COLUMN_CHUNK} < {width} ? begin + {COLUMN_CHUNK} : {width};"
            )
            chunk += [f"{INDENT}{kind} {part_name} = 0;" for kind, _, part_name in partials]
            chunk += [
                INDENT + line
                for line in [
                    simd,
                    "for (int64_t col = begin; col < end; ++col) {",
                    *(INDENT + x for x in body),
                    "}",
                ]
            ]
            chunk += [f"{INDENT}{name} += {part_name};" for _, name, part_name in partials]
            chunk.append("}")
            for atom in reversed(part.inner[:-1]):
                name = printer.atoms[atom]
                chunk = [
                    f"for (int64_t {name} = 0; {name} < {atom.extent}; ++{name}) {{",
                    *(INDENT + x for x in chunk),
                    "}",
                ]
            lines += chunk
        else:
            lines += _loop(part, printer, simd, *bounds, body)
    lines += [
        f"{name} = {flag} ? ({kind})NAN_ : {name};"
        for kind, name, flag in after
        if not flag.endswith("_part")
    ]
    printer.names = known
    printer.names.update(folded)
    for value in sweep.row:
        lines += printer.statement(value)
    lines += [printer.store(s) for s in sweep.stores if s not in vector]
    return lines


def _loop(part: Part, printer: Printer, simd: str, begin: str, end: str, body: list[str]) -> list[str]:
    """The vectorised loop over the last inner variable, inside plain loops over the others."""
    lines = [
        simd,
        f"for (int64_t col = {begin}; col < {end}; ++col) {{",
        *(INDENT + line for line in body),
        "}",
    ]
    for atom in reversed(part.inner[:-1]):
        name = printer.atoms[atom]
        head = f"for (int64_t {name} = 0; {name} < {atom.extent}; ++{name}) {{"
        lines = [head, *(INDENT + line for line in lines), "}"]
    return lines


def _still_needed(sweep: emit.Pass, inner: set[Atom], ready: set[Value]) -> list[Value]:
    """The sweep's inner values without those that only fed a value which is already in a buffer."""
    roots = [v.args[0] for v in sweep.reductions] + [s.value for s in sweep.stores]
    roots += [t.value for s in sweep.stores for t in s.expr.indirects()]
    found: set[Value] = set()
    stack = [r for r in roots if emit.is_inner(r, inner)]
    while stack:
        value = stack.pop()
        if value in found:
            continue
        found.add(value)
        if value not in ready:
            stack += [o for o in value.operands() if emit.is_inner(o, inner)]
    return [v for v in sweep.inner if v in found]


def _identity(value: Value) -> str:
    kind = _ctype(value.dtype)
    if value.const == "sum":
        return "0"
    if value.dtype in FLOATS:
        return f"({kind}){'-INF' if value.const == 'max' else 'INF'}"
    return f"std::numeric_limits<{kind}>::{'lowest' if value.const == 'max' else 'max'}()"


def source(built: Plan) -> str:
    """The C++ text: one ``extern "C" run(inputs..., outputs..., threads)`` for the whole plan."""
    inputs = emit.short_names(built)
    used = sorted({k for p in built.parts for k in built.used_inputs(p)})
    functions: set[str] = set()
    bodies: list[str] = []
    for part in built.parts:
        printer = Printer(built, part, inputs)
        lines = _part_lines(built, part, printer)
        functions |= printer.functions
        bodies.append(
            "\n".join(
                [f"{INDENT}// {part.rows} rows of {part.columns} columns", *(INDENT + line for line in lines)]
            )
        )
    args = []
    for k in used:
        dtype = built.inputs[k].dtype
        args.append(
            f"const {_ctype(dtype.to_real() if dtype.is_complex else dtype)}* __restrict {inputs[k]}_ptr"
        )
    for port in built.outputs:
        dtype = port.dtype.to_real() if port.dtype.is_complex else port.dtype
        args.append(f"{_ctype(dtype)}* __restrict {port.name}_ptr")
    dtypes = {p.dtype for p in [*built.inputs, *built.outputs]}
    head = header(functions, torch.float16 in dtypes, torch.bfloat16 in dtypes)
    text = ",\n         ".join([*args, "int threads"])
    return f'{head}\nextern "C" void run({text}) {{\n' + "\n".join(bodies) + "\n}\n"


def fragment(built: Plan, entry: str = "kernel_fn", suffix: str = "") -> emit.Fragment:
    """The kernel of a plan as a piece of a file; ``entry`` is its Python function, ``suffix`` sets its names apart."""
    inputs = emit.short_names(built)
    used = sorted({k for p in built.parts for k in built.used_inputs(p)})
    count = len(used) + len(built.outputs)
    code = ['SOURCE{0} = r"""{1}\n"""\n\nRUN{0} = cpp_backend.load(SOURCE{0}).function("run", pointers={2}, ints=1)'.format(
        suffix, source(built).rstrip("\n"), count
    )]  # fmt: skip
    lines = [f"def {entry}({', '.join(inputs)}):"]
    lines += [INDENT + line for line in emit.prologue(built, inputs, used)]
    lines += [f"{INDENT}{p.name} = {emit.allocation(p, chr(34) + 'cpu' + chr(34))}" for p in built.outputs]
    args = [f"{inputs[k]}.data_ptr()" for k in used] + [f"{p.name}.data_ptr()" for p in built.outputs]
    lines.append(f"{INDENT}RUN{suffix}({', '.join(args)}, torch.get_num_threads())")
    lines.append(f"{INDENT}return {emit.returned(built)}")
    return emit.Fragment(code=code, function=lines)


def checked_plan(gm: fx.GraphModule) -> Plan:
    """`plan`, refused where there is nothing to compute."""
    built = plan(gm)
    if any(prod(p.shape) == 0 for p in built.inputs):
        raise Unsupported("an empty input")
    return built


def generate(gm: fx.GraphModule) -> str:
    """The C++ kernel file of a subgraph; raises `Unsupported`."""
    built = checked_plan(gm)
    return emit.file_text("A fused C++ / OpenMP kernel.", emit.graph_ops(built), "cpp", [fragment(built)])
