"""Assemble the Triton kernel file of a `Plan`: constants to tune, the kernel, the Python entry point."""

from __future__ import annotations

from torch import fx

from . import emit
from .cpp import checked_plan
from .schedule import Part, Plan
from .triton import (
    DTYPES,
    HELPERS,
    MAX_ROW,
    Printer,
    check_dtypes,
    exact_math,
    identity,
    next_power_of_2,
    wide,
)

INDENT = "    "


def _tile(part: Part) -> tuple[int, int, int, bool]:
    """``(ROWS, BLOCK, num_warps, looped)`` to begin with."""
    if part.reduces:
        block = next_power_of_2(part.columns)
        looped = block > MAX_ROW
        block = 4096 if looped else max(block, 16)
        rows = max(1, min(32, 1024 // block))
        # a reduction over a dim that is not contiguous wants the neighbouring rows in one program
        if not looped and _strided(part):
            rows = max(rows, min(32, 16384 // block))
        while rows > 1 and part.rows // rows < 264:
            rows //= 2
        return rows, block, max(1, min(16, rows * block // 256)), looped
    block = min(1024, max(16, next_power_of_2(part.columns)))
    while block > 128 and part.columns % block and part.columns % (block // 2) == 0:
        block //= 2  # no ragged tail if a smaller tile divides the row
    rows = min(next_power_of_2(part.rows), max(1, 1024 // block))
    return rows, block, max(1, min(8, rows * block // 256)), False


def _strided(part: Part) -> bool:
    loads = [
        v for v in part.values() if v.op == "load" and v.expr is not None and v.expr.atoms() & set(part.inner)
    ]
    big = [v for v in loads if any(not a.inner for a in v.expr.atoms())]  # type: ignore[union-attr]
    return bool(big) and all(v.expr.coefficient(part.inner[-1]) > 1 for v in big)  # type: ignore[union-attr]


def fragment(built: Plan, entry: str = "kernel_fn", suffix: str = "") -> emit.Fragment:
    """The kernel of a plan as a piece of a file; ``entry`` is its Python function, ``suffix`` sets its names apart."""
    check_dtypes(built)
    names = emit.short_names(built)
    pointers = {k: f"{names[k]}_ptr" for k in range(len(names))}
    outs = {k: f"{port.name}_ptr" for k, port in enumerate(built.outputs)}
    tiles = [_tile(p) for p in built.parts]
    many = len(built.parts) > 1
    marks = [f"{suffix}_{k}" if many else suffix for k in range(len(built.parts))]
    used = sorted({k for p in built.parts for k in built.used_inputs(p)})
    out = emit.Fragment()
    helpers: set[str] = set()
    for k, part in enumerate(built.parts):
        body, wanted = _body(built, part, pointers, outs, tiles[k])
        helpers |= wanted
        own = ", ".join(_arguments(built, part, pointers, outs))
        head = f"def _part{marks[k]}(pid, {own}, " if many else f"def fused_kernel{suffix}({own}, "
        text = [
            "@triton.jit",
            head + "ROWS: tl.constexpr, BLOCK: tl.constexpr):",
            f'{INDENT}"""{_describe(part)}"""',
        ]
        if not many:
            text.append(f"{INDENT}pid = tl.program_id(0)")
        out.code.append("\n".join([*text, *(INDENT + line for line in body)]))
        _tunables(out, part, tiles[k], marks[k])
    warps = max(t[2] for t in tiles)
    out.constants.append((f"num_warps{suffix}", warps))
    out.space[f"num_warps{suffix}"] = sorted({1, 2, 4, 8, 16, warps})
    out.helpers = {name: text for name, text in HELPERS.items() if name in helpers}
    if many:
        out.code.append(_dispatch(built, pointers, outs, used, marks, suffix))
    out.function = _entry(built, names, used, marks, entry, suffix)
    return out


def _arguments(built: Plan, part: Part, pointers, outs) -> list[str]:
    return [pointers[i] for i in built.used_inputs(part)] + [
        outs[i] for i in sorted({s.output for s in part.stores})
    ]


def _tunables(out: emit.Fragment, part: Part, tile: tuple[int, int, int, bool], mark: str) -> None:
    rows, block, _, looped = tile
    out.constants += [(f"ROWS{mark}", rows), (f"BLOCK{mark}", block)]
    limit = max(1, min(next_power_of_2(part.rows), 16384 // block))
    out.space[f"ROWS{mark}"] = sorted({r for r in (1, 2, 4, 8, 16, 32) if r <= limit} | {rows})
    if looped:
        out.space[f"BLOCK{mark}"] = [2048, 4096, 8192]
    elif not part.reduces and block >= 128:
        choices = {b for b in (128, 256, 512, 1024, 2048) if b <= next_power_of_2(part.columns)} | {block}
        if part.columns % block == 0:  # the kernel has no column mask: keep it that way
            choices = {b for b in choices if part.columns % b == 0}
        out.space[f"BLOCK{mark}"] = sorted(choices)


def _describe(part: Part) -> str:
    kind = "folded and written" if part.reduces else "written"
    return f"{part.rows} rows of {part.columns} columns, {kind} in one pass over memory."


def _grid(part: Part, suffix: str) -> str:
    rows = f"triton.cdiv({part.rows}, ROWS{suffix})"
    return rows if part.reduces else f"{rows} * triton.cdiv({part.columns}, BLOCK{suffix})"


def _body(built: Plan, part: Part, pointers, outs, tile) -> tuple[list[str], set[str]]:
    _rows, block, _, looped = tile
    printer = Printer(built, part, pointers, exact_math(built), list(outs.values()))
    masked = part.columns % block != 0 or looped
    printer.masks = ("row_ok" if part.rows > 1 else "", "col_ok" if masked else "")
    position = "pid" if part.reduces else f"(pid // tl.cdiv({part.columns}, BLOCK))"
    cast = ".to(tl.int64)" if wide(built) else ""
    lines = [f"row = ({position} * ROWS + tl.arange(0, ROWS)[:, None]){cast}"]
    if part.rows > 1:
        lines.append(f"row_ok = row < {part.rows}")
    for atom, text in emit.outer_atoms(part.outer, "row", "//"):
        name = "row" if text == "row" else printer.taken.fresh(atom.name)
        printer.atoms[atom] = name
        if name != "row":
            lines.append(f"{name} = {text}")

    def columns(start: str) -> list[str]:
        text = [f"col_start = {start}", "col = col_start + tl.arange(0, BLOCK)[None, :]"]
        if masked:
            text.append(f"col_ok = col < {part.columns}")
        for atom, how in emit.outer_atoms(part.inner, "col", "//"):
            name = "col" if how == "col" else f"{atom.name}_col"
            printer.atoms[atom] = name
            if name != "col":
                text.append(f"{name} = {how}")
        return text

    def compute(values) -> list[str]:
        out = []
        for value in values:
            if value in printer.names:
                continue
            line = (
                printer.reduction(value, printer.ref(value.args[0]), masked)
                if value.op == "reduce"
                else printer.statement(value)
            )
            out += line if isinstance(line, list) else [line] if line else []
        return out

    if not looped:
        start = "0" if part.reduces else f"(pid % tl.cdiv({part.columns}, BLOCK)) * BLOCK"
        lines += columns(start) + compute(part.values()) + printer.stores(part.stores, outs)
        return lines, printer.used
    first, sweeps = emit.passes(part)
    lines += compute([v for v in first if v.op != "reduce"])
    for sweep in sweeps:
        accumulators = []
        for value in sweep.reductions:
            name = printer.taken.fresh(f"{value.name or 'folded'}_acc")
            accumulators.append(name)
            lines.append(f"{name} = tl.full([ROWS, BLOCK], {identity(value)}, dtype={DTYPES[value.dtype]})")
        body = columns("start")
        known = dict(printer.names)
        body += compute(sweep.inner)
        for value, name in zip(sweep.reductions, accumulators, strict=True):
            x = printer.ref(value.args[0])
            step = {
                "sum": f"{name} + {x}",
                "max": f"tl.maximum({name}, {x}, propagate_nan=tl.PropagateNan.ALL)",
            }
            step["min"] = step["max"].replace("maximum", "minimum")
            body.append(f"{name} = tl.where(col_ok, {step[value.const]}, {name})")
        body += printer.stores(
            [
                s
                for s in sweep.stores
                if emit.is_inner(s.value, printer.inner) or s.expr.atoms() & printer.inner
            ],
            outs,
        )
        if len(body) > len(columns("start")):
            lines.append(f"for start in range(0, {part.columns}, BLOCK):")
            lines += [INDENT + line for line in body]
        printer.names = known  # inner values do not outlive their sweep
        for value, name in zip(sweep.reductions, accumulators, strict=True):
            folded = printer.taken.fresh(value.name or "folded")
            printer.names[value] = folded
            lines.append(f"{folded} = tl.{value.const}({name}, axis=1)[:, None]")
            if value.const != "sum":
                bad = f"tl.max(({name} != {name}).to(tl.int32), axis=1)[:, None] > 0"
                lines.append(f'{folded} = tl.where({bad}, float("nan"), {folded})')
        lines += compute(sweep.row)
        rest = [
            s
            for s in sweep.stores
            if not (emit.is_inner(s.value, printer.inner) or s.expr.atoms() & printer.inner)
        ]
        lines += printer.stores(rest, outs)
    return lines, printer.used


def _dispatch(built: Plan, pointers, outs, used, marks: list[str], suffix: str) -> str:
    """One launch for several loop nests: the program id says which one a program works on."""
    args = [pointers[k] for k in used] + [outs[k] for k in sorted(outs)]
    tiling = [f"{n}{mark}: tl.constexpr" for mark in marks for n in ("ROWS", "BLOCK")]
    lines = [
        "@triton.jit",
        f"def fused_kernel{suffix}({', '.join([*args, *tiling])}):",
        f"{INDENT}pid = tl.program_id(0)",
    ]
    grids = [
        _grid(p, mark).replace("triton.cdiv", "tl.cdiv") for p, mark in zip(built.parts, marks, strict=True)
    ]
    for k, part in enumerate(built.parts):
        before = f" - ({' + '.join(grids[:k])})" if k else ""
        own = ", ".join(_arguments(built, part, pointers, outs))
        call = f"_part{marks[k]}(pid{before}, {own}, ROWS{marks[k]}, BLOCK{marks[k]})"
        last = k == len(built.parts) - 1
        head = "else:" if last else f"{'elif' if k else 'if'} pid < {' + '.join(grids[: k + 1])}:"
        lines += [f"{INDENT}{head}", f"{INDENT * 2}{call}"]
    return "\n".join(lines)


def _entry(built: Plan, names, used, marks: list[str], entry: str, suffix: str) -> list[str]:
    lines = [f"def {entry}({', '.join(names)}):"]
    lines += [INDENT + line for line in emit.prologue(built, names, used)]
    device = f"{names[0]}.device"
    lines += [f"{INDENT}{port.name} = {emit.allocation(port, device)}" for port in built.outputs]
    grid = " + ".join(_grid(p, mark) for p, mark in zip(built.parts, marks, strict=True))
    args = [emit.real_view(names[k], built.inputs[k]) for k in used]
    args += [emit.real_view(p.name, p) for p in built.outputs]
    if len(marks) == 1:
        tiling = [f"{n}={n}{marks[0]}" for n in ("ROWS", "BLOCK")]
    else:
        tiling = [f"{n}{mark}={n}{mark}" for mark in marks for n in ("ROWS", "BLOCK")]
    lines.append(f"{INDENT}grid = ({grid},)")
    lines.append(f"{INDENT}fused_kernel{suffix}[grid](")
    lines.append(f"{INDENT * 2}{', '.join([*args, *tiling, f'num_warps=num_warps{suffix}'])}")
    lines.append(f"{INDENT})")
    lines.append(f"{INDENT}return {emit.returned(built)}")
    return lines


def generate(gm: fx.GraphModule) -> str:
    """The Triton kernel file of a subgraph; raises `Unsupported`."""
    built = checked_plan(gm)
    return emit.file_text("A fused Triton kernel.", emit.graph_ops(built), "triton", [fragment(built)])
