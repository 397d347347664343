"""Linear layers as Triton GEMMs, with whatever pointwise code follows them as the epilogue.

The accumulators of one or several linears that share their input (gate and up, say) are handed to the
epilogue in float32, before any rounding.  Several independent groups (q, k and v) run in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from . import emit
from . import index as ix
from .ir import Unsupported
from .lower import example
from .pyprint import op_name
from .schedule import Plan, plan
from .subgraph import cut, inputs_of, outputs_of
from .triton import HELPERS, Printer, check_dtypes, exact_math

INDENT = "    "


@dataclass(frozen=True)
class Linear:
    """``x @ w (+ bias)``; ``transposed`` when the weight is (N, K), as `torch.nn.functional.linear` has it."""

    node: fx.Node
    x: fx.Node
    w: fx.Node
    bias: fx.Node | None
    transposed: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(M, N, K)"""
        shape = example(self.x).shape
        n = example(self.node).shape[-1]
        return prod(shape[:-1]), n, shape[-1]


def as_linear(node: fx.Node) -> Linear | None:
    """The linear layer that a node is, or None."""
    if not node.op.startswith("call") or not isinstance(example(node), torch.Tensor):
        return None
    name, args = op_name(node), list(node.args)
    named: dict[str, Any] = dict(node.kwargs)
    if name == "linear":
        x = args[0] if args else named.get("input")
        w = args[1] if len(args) > 1 else named.get("weight")
        bias, transposed = (args[2] if len(args) > 2 else named.get("bias")), True
    elif name in ("matmul", "mm", "bmm") and len(args) == 2:
        x, w, bias, transposed = args[0], args[1], None, False
    elif name == "addmm" and len(args) == 3 and not named:
        bias, x, w, transposed = args[0], args[1], args[2], False
    else:
        return None
    if not isinstance(x, fx.Node) or not isinstance(w, fx.Node):
        return None
    values = [example(n) for n in (x, w)] + ([example(bias)] if isinstance(bias, fx.Node) else [])
    if values[1].dim() != 2 or values[0].dim() < 2 or len({v.dtype for v in values}) != 1:
        return None
    if values[0].dtype not in (torch.float16, torch.bfloat16, torch.float32) or 0 in values[0].shape:
        return None
    return Linear(node, x, w, bias if isinstance(bias, fx.Node) else None, transposed)


@dataclass
class Group:
    """Linears over one input whose results meet in one epilogue; ``nodes`` are all nodes it covers."""

    linears: list[Linear]
    nodes: list[fx.Node]
    outputs: list[fx.Node]
    inputs: list[fx.Node]
    plan: Plan

    @property
    def others(self) -> list[fx.Node]:
        return self.inputs[len(self.linears) :]


def _epilogue(linears: Sequence[Linear], rest: Sequence[fx.Node], keep: Sequence[fx.Node]) -> Group:
    anchors = [li.node for li in linears]
    nodes = [*anchors, *rest]
    outputs = outputs_of(nodes, keep)
    biases = [li.bias for li in linears if li.bias is not None]
    extra = [n for n in inputs_of(rest) if n not in anchors]
    extra += [b for b in dict.fromkeys(biases) if b not in extra]
    by_node = {li.node: li for li in linears}
    inputs = [*anchors, *extra]

    def replace(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node not in by_node:
            return None
        bias = by_node[node].bias
        acc = env[node]
        return (
            graph.call_function(torch.add, (acc, env[bias]))
            if bias is not None
            else graph.call_method("clone", (acc,))
        )

    gm = cut(nodes, outputs, inputs, replace)
    built = plan(gm, accumulators=range(len(anchors)))
    check_dtypes(built)
    m, n, _ = linears[0].sizes
    (part,) = built.parts
    if part.rows != m or part.columns != n or part.reduces:
        raise Unsupported("an epilogue over another shape")
    whole = ix.flatten(
        [ix.of(a) for a in (*part.outer, *part.inner)], [a.extent for a in (*part.outer, *part.inner)]
    )
    if any(v.op == "acc" and v.expr != whole for v in part.values()):
        raise Unsupported("an epilogue that reads its accumulator elsewhere")
    return Group(list(linears), nodes, outputs, inputs, built)


def grow(linears: Sequence[Linear], candidates: Sequence[fx.Node], keep: Sequence[fx.Node]) -> Group:
    """The group with the longest epilogue out of ``candidates`` that can be generated.

    ``candidates`` are in topological order; a prefix of those that depend on the linears is taken.
    """
    inside = {li.node for li in linears}
    taken: list[fx.Node] = []
    for node in candidates:
        if any(a in inside for a in node.all_input_nodes):
            taken.append(node)
            inside.add(node)
    while True:
        try:
            return _epilogue(linears, taken, keep)
        except Unsupported:
            if not taken:
                raise
            taken.pop()


def _tile(groups: Sequence[Group], dtype: torch.dtype) -> dict[str, int]:
    """Tile to begin with: the largest whose grid still fills an H100/H200's 132 processors."""
    accumulators = max(len(g.linears) for g in groups)
    if dtype == torch.float32:
        n = 64 if accumulators == 1 else 32
        return {
            "BLOCK_M": 64,
            "BLOCK_N": n,
            "BLOCK_K": 32,
            "GROUP_M": 8,
            "num_warps": 4 * accumulators,
            "num_stages": 3,
        }
    m, n = 64, 64
    for m, n in ((128, 256), (128, 128), (64, 128), (64, 64)):
        tiles = sum(-(-g.linears[0].sizes[0] // m) * -(-g.linears[0].sizes[1] // n) for g in groups)
        if accumulators * m * n <= 128 * 256 and tiles >= 120:
            break
    # an epilogue needs registers beside the accumulators: 64 of those per thread leave it room
    warps = 8 if accumulators * m * n >= 128 * 128 else 4
    stages = 3 if accumulators > 1 else 4
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": warps, "num_stages": stages}


SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on an H100 or H200, where no other device is at hand to ask."""
ACCUMULATOR_REGISTERS = 160
"""Per thread, of 255; with more for the accumulators alone they spill, and compile for many seconds."""


def _fits(accumulators: int, dtype: torch.dtype, suffix: str) -> list[str]:
    """Which points of the SPACE a device has the shared memory and the registers for."""
    limit = SHARED_MEMORY
    if torch.cuda.is_available():
        limit = getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", limit)
    m, n, k = (f"BLOCK_{axis}{suffix}" for axis in "MNK")
    weights = n if accumulators == 1 else f"{accumulators} * {n}"
    return [
        f"num_stages{suffix} * {k} * ({m} + {weights}) * {dtype.itemsize} <= {limit}",
        f"{m} * {weights} <= {32 * ACCUMULATOR_REGISTERS} * num_warps{suffix}",
    ]


def fragment(
    groups: Sequence[Group], entry: str, suffix: str, allow_tf32: bool
) -> tuple[emit.Fragment, list[fx.Node]]:
    """The GEMM of one or several groups in one launch; also the nodes that its function takes, in order."""
    out = emit.Fragment()
    dtype = example(groups[0].linears[0].x).dtype
    tile = _tile(groups, dtype)
    params = [f"{name}: tl.constexpr" for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")]
    inputs: list[fx.Node] = []
    for g in groups:
        for node in (g.linears[0].x, *(li.w for li in g.linears), *g.others):
            if node not in inputs:
                inputs.append(node)
    names = _names(inputs)
    outs: dict[fx.Node, str] = {}
    for g in groups:
        for node in g.outputs:
            outs[node] = f"out{len(outs)}"
    calls: list[tuple[str, str]] = []
    for k, g in enumerate(groups):
        mark = f"{suffix}_{k}" if len(groups) > 1 else suffix
        signature = _arguments(g, names, outs)
        body, helpers = _kernel(g, names, outs, dtype, allow_tf32, mark)
        out.helpers.update({h: HELPERS[h] for h in HELPERS if h in helpers})
        m, n, kk = g.linears[0].sizes
        head = [
            "@triton.jit",
            f"def _gemm{mark}(pid, {', '.join([*signature, *params])}):",
            f'{INDENT}"""({m}, {kk}) x ({kk}, {n}), float32 accumulators, epilogue on the tile in registers."""',
        ]
        out.code.append("\n".join([*head, *(INDENT + line for line in body)]))
        calls.append((f"_gemm{mark}", ", ".join(signature)))
    everything = list(dict.fromkeys(a for g in groups for a in _arguments(g, names, outs)))
    grids = [
        f"tl.cdiv({g.linears[0].sizes[0]}, BLOCK_M) * tl.cdiv({g.linears[0].sizes[1]}, BLOCK_N)"
        for g in groups
    ]
    lines = [
        "@triton.jit",
        f"def gemm_kernel{suffix}({', '.join([*everything, *params])}):",
        f"{INDENT}pid = tl.program_id(0)",
    ]
    tail = "BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M"
    for k, (fn, args) in enumerate(calls):
        before = f" - ({' + '.join(grids[:k])})" if k else ""
        call = f"{fn}(pid{before}, {args}, {tail})"
        if len(calls) == 1:
            lines.append(f"{INDENT}{call}")
            break
        head = (
            "else:" if k == len(calls) - 1 else f"{'elif' if k else 'if'} pid < {' + '.join(grids[: k + 1])}:"
        )
        lines += [f"{INDENT}{head}", f"{INDENT * 2}{call}"]
    out.code.append("\n".join(lines))
    out.constants = [(f"{name}{suffix}", value) for name, value in tile.items()]
    space = {
        "BLOCK_M": [64, 128], "BLOCK_N": [64, 128, 256], "BLOCK_K": [32, 64, 128], "GROUP_M": [8],
        "num_warps": [4, 8], "num_stages": [2, 3, 4],
    }  # fmt: skip
    out.space = {f"{name}{suffix}": values for name, values in space.items()}
    out.fits = _fits(max(len(g.linears) for g in groups), dtype, suffix)
    out.function = _entry(groups, entry, suffix, inputs, names, outs, everything, grids)
    return out, inputs


def _names(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    fake = Plan([emit.Port(n.name, (), (), torch.float32) for n in nodes], [], True, [])
    return dict(zip(nodes, emit.short_names(fake), strict=True))


def _arguments(g: Group, names: dict[fx.Node, str], outs: dict[fx.Node, str]) -> list[str]:
    x = names[g.linears[0].x]
    args = [f"{x}_ptr", f"{x}_stride_m", f"{x}_stride_k"]
    for li in g.linears:
        w = names[li.w]
        args += [f"{w}_ptr", f"{w}_stride_n", f"{w}_stride_k"]
    used = {v.port for p in g.plan.parts for v in p.values() if v.op == "load"}
    args += [f"{names[node]}_ptr" for k, node in enumerate(g.inputs) if k in used]
    args += [f"{outs[n]}_ptr" for n in g.outputs]
    return list(dict.fromkeys(args))


def _kernel(
    g: Group, names, outs, dtype: torch.dtype, allow_tf32: bool, mark: str
) -> tuple[list[str], set[str]]:
    m, n, k = g.linears[0].sizes
    x = names[g.linears[0].x]
    big = max(m * k, n * k, m * n) >= 2**31
    wide = ".to(tl.int64)" if big else ""
    precision = "" if dtype != torch.float32 else f', input_precision="{"tf32" if allow_tf32 else "ieee"}"'
    accs = [f"acc{j}" for j in range(len(g.linears))]
    lines = [
        f"tiles_m, tiles_n = tl.cdiv({m}, BLOCK_M), tl.cdiv({n}, BLOCK_N)",
        "# programs that run together share rows of tiles, which then stay in L2",
        "group = pid // (GROUP_M * tiles_n)",
        "size_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)",
        "pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % size_m",
        "pid_n = (pid % (GROUP_M * tiles_n)) // size_m",
        f"row_id = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)){wide}",
        f"col_id = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)){wide}",
        "k = tl.arange(0, BLOCK_K)",
        "# rows and columns past the end wrap around: their results are not stored",
        f"{x}_tile = {x}_ptr + (row_id % {m})[:, None] * {x}_stride_m + k[None, :] * {x}_stride_k",
    ]
    for li in g.linears:
        w = names[li.w]
        lines.append(
            f"{w}_tile = {w}_ptr + (col_id % {n})[None, :] * {w}_stride_n + k[:, None] * {w}_stride_k"
        )
    lines += [f"{acc} = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)" for acc in accs]
    lines.append(f"for start in range(0, {k}, BLOCK_K):")
    loads, masked = (
        [f"x_block = tl.load({x}_tile)"],
        [f"x_block = tl.load({x}_tile, mask=k[None, :] < {k} - start, other=0.0)"],
    )
    for j, li in enumerate(g.linears):
        loads.append(f"w{j}_block = tl.load({names[li.w]}_tile)")
        masked.append(f"w{j}_block = tl.load({names[li.w]}_tile, mask=k[:, None] < {k} - start, other=0.0)")
    lines += [
        f"{INDENT}if {k} % BLOCK_K == 0:",
        *(INDENT * 2 + s for s in loads),
        f"{INDENT}else:",
        *(INDENT * 2 + s for s in masked),
    ]
    for j, acc in enumerate(accs):
        lines.append(f"{INDENT}{acc} = tl.dot(x_block, w{j}_block, {acc}{precision})")
    lines.append(f"{INDENT}{x}_tile += BLOCK_K * {x}_stride_k")
    lines += [f"{INDENT}{names[li.w]}_tile += BLOCK_K * {names[li.w]}_stride_k" for li in g.linears]
    lines += ["row, col = row_id[:, None], col_id[None, :]", f"row_ok, col_ok = row < {m}, col < {n}"]
    (part,) = g.plan.parts
    pointers = {i: f"{names[node]}_ptr" for i, node in enumerate(g.inputs) if i >= len(accs)}
    reserved = [
        "group",
        "size_m",
        "pid_m",
        "pid_n",
        "row_id",
        "col_id",
        "k",
        "x_block",
        "tiles_m",
        "tiles_n",
        *accs,
    ]
    reserved += [f"{outs[node]}_ptr" for node in g.outputs]
    printer = Printer(g.plan, part, pointers, exact_math(g.plan), reserved)
    for atom, text in [
        *emit.outer_atoms(part.outer, "row", "//"),
        *emit.outer_atoms(part.inner, "col", "//"),
    ]:
        name = text if text in ("row", "col") else printer.taken.fresh(atom.name)
        printer.atoms[atom] = name
        if name != text:
            lines.append(f"{name} = {text}")
    for value in part.values():
        if value.op == "acc":
            printer.names[value] = accs[value.port]
        elif (line := printer.statement(value)) is not None:
            lines.append(line)
    lines += printer.stores(part.stores, {i: f"{outs[node]}_ptr" for i, node in enumerate(g.outputs)})
    return lines, printer.used


def _entry(groups, entry, suffix, inputs, names, outs, everything, grids) -> list[str]:
    lines = [f"def {entry}({', '.join(names[n] for n in inputs)}):"]
    plain = {node: names[node] for node in inputs}
    scalars: dict[str, str] = {}
    done: set[fx.Node] = set()
    for g in groups:
        k = g.linears[0].sizes[2]
        x = g.linears[0].x
        if x not in done:
            port = emit.Port("", tuple(example(x).shape), (), example(x).dtype)
            lines.append(f"{INDENT}if {plain[x]}.shape != {port.shape} or {plain[x]}.dtype != {port.dtype}:")
            text = f'f"generated for {port.shape} {port.dtype}, called with {{tuple({plain[x]}.shape)}} {{{plain[x]}.dtype}}"'
            lines.append(f"{INDENT * 2}raise ValueError({text})")
            lines.append(f"{INDENT}{plain[x]}_rows = {plain[x]}.reshape(-1, {k})")
            scalars |= {
                f"{plain[x]}_ptr": f"{plain[x]}_rows",
                f"{plain[x]}_stride_m": f"{plain[x]}_rows.stride(0)",
            }
            scalars[f"{plain[x]}_stride_k"] = f"{plain[x]}_rows.stride(1)"
            done.add(x)
        for li in g.linears:
            w = plain[li.w]
            port = example(li.w)
            if li.w not in done:
                lines.append(f"{INDENT}if {w}.shape != {tuple(port.shape)} or {w}.dtype != {port.dtype}:")
                lines.append(
                    f'{INDENT * 2}raise ValueError(f"generated for a weight {tuple(port.shape)} {port.dtype}")'
                )
                done.add(li.w)
            n_dim, k_dim = (0, 1) if li.transposed else (1, 0)
            scalars |= {
                f"{w}_ptr": w,
                f"{w}_stride_n": f"{w}.stride({n_dim})",
                f"{w}_stride_k": f"{w}.stride({k_dim})",
            }
        used = {v.port for p in g.plan.parts for v in p.values() if v.op == "load"}
        for i in sorted(used):
            node, port = g.inputs[i], g.plan.inputs[i]
            name = plain[node]
            if f"{name}_ptr" not in scalars:
                lines.append(
                    f"{INDENT}{name} = _as_expected({name}, {port.shape}, {port.stride}, {port.dtype})"
                )
                scalars[f"{name}_ptr"] = emit.real_view(name, port)
            elif not scalars[f"{name}_ptr"].startswith(name):
                raise Unsupported("an input used in two layouts")
        device = f"{plain[groups[0].linears[0].x]}.device"
        for node, port in zip(g.outputs, g.plan.outputs, strict=True):
            lines.append(f"{INDENT}{outs[node]} = {emit.allocation(port, device)}")
            scalars[f"{outs[node]}_ptr"] = outs[node]
    for g in groups:  # a tensor that is read both as a matrix and by an epilogue must be laid out for both
        for i in {v.port for p in g.plan.parts for v in p.values() if v.op == "load"}:
            node = g.inputs[i]
            if node in {gg.linears[0].x for gg in groups} and not example(node).is_contiguous():
                raise Unsupported("an input used in two layouts")
            if node in {gg.linears[0].x for gg in groups}:
                name = plain[node]
                lines.insert(1, f"{INDENT}{name} = {name}.contiguous()")
    grid = " + ".join(grids).replace("tl.cdiv", "triton.cdiv")
    lines += [
        f"{INDENT}def grid(meta):",
        f'{INDENT * 2}BLOCK_M, BLOCK_N = meta["BLOCK_M"], meta["BLOCK_N"]',
        f"{INDENT * 2}return ({grid},)",
    ]
    tiling = [
        f"{name}={name}{suffix}"
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
    ]
    lines.append(f"{INDENT}gemm_kernel{suffix}[grid](")
    lines.append(f"{INDENT * 2}{', '.join(scalars[a] for a in everything)},")
    lines.append(f"{INDENT * 2}{', '.join(tiling)},")
    lines.append(f"{INDENT})")
    lines.append(f"{INDENT}return {', '.join(outs[n] for g in groups for n in g.outputs)}")
    return lines
