"""Attention as one flash-style Triton kernel, whether it was written out by hand or through SDPA.

What is matched is ``softmax(f(q @ k^T)) @ v`` with any pointwise ``f``: scaling, additive, boolean or
computed masks, ALiBi.  ``f`` is generated into the kernel and applied to each tile of scores.  q, k and v
are read where they lie: transposes, splits and the expansion of grouped-query heads are index arithmetic.
When the values of every mask are known, a causal or an empty one is recognised, and tiles above the
diagonal are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from . import emit
from . import index as ix
from .attention_match import Match
from .build import Builder
from .index import Atom, Expr
from .ir import Pool, Unsupported, walk
from .lower import example, layout, lower, output_nodes
from .pyprint import VIEWS, op_name
from .schedule import Part, Plan, Port, Store
from .subgraph import cut, inputs_of
from .triton import HELPERS, Printer, exact_math, next_power_of_2

INDENT = "    "
_LAYOUT_ONLY = VIEWS | {"contiguous", "expand", "repeat_interleave"}


@dataclass
class Operand:
    """Where element ``index`` of q, k or v lies: an offset into the tensor of node ``base``."""

    base: fx.Node
    expr: Expr


def _operand(node: fx.Node, index: Sequence[Expr]) -> Operand:
    """Follow the views below ``node`` down to memory; they become part of the address."""
    chain: list[fx.Node] = []
    stack = [node]
    while stack:
        n = stack.pop()
        if n.op.startswith("call") and op_name(n) in _LAYOUT_ONLY and n not in chain:
            chain.append(n)
            stack += n.all_input_nodes
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    chain.sort(key=order.__getitem__)
    if not chain:
        return Operand(node, ix.address(index, layout(example(node).shape, example(node).stride())))
    bases = inputs_of(chain)
    if len(bases) != 1 or any(not isinstance(example(b), torch.Tensor) for b in bases):
        return Operand(node, ix.address(index, layout(example(node).shape, example(node).stride())))
    aten = lower(cut(chain, [node], bases))
    result = output_nodes(aten)[0][0]
    value = Builder(aten, Pool(), []).value(result, tuple(index))
    while value.op == "cast":
        (value,) = value.args
    if value.op != "load" or value.args or value.expr is None or value.expr.indirects():
        raise Unsupported("an attention operand that is not a view")
    return Operand(bases[0], value.expr)


def _known_mask(m: Match, constants: dict[str, torch.Tensor]) -> tuple[str, float] | None:
    """``(kind, scale)`` when the scores are ``scale * product`` plus a known mask: kind is none or causal."""
    if m.product is None or m.scores is None:
        return None
    if not m.modifier:
        return "none", 1.0
    needed: list[fx.Node] = []
    stack = list(m.modifier)
    while stack:
        n = stack.pop()
        if n not in needed and n is not m.product:
            needed.append(n)
            stack += n.all_input_nodes
    order = {n: i for i, n in enumerate(m.output.graph.nodes)}
    needed.sort(key=order.__getitem__)
    inputs = [n for n in needed if n.op == "placeholder"]
    if any(n.name not in constants for n in inputs) or prod(m.shape) > 1 << 28:
        return None
    rows, columns = m.shape[-2:]
    gm = cut([n for n in needed if n.op != "placeholder"], [m.scores], [m.product, *inputs])
    for node in gm.graph.nodes:  # masks made on the spot are made on the CPU here
        node.kwargs = {
            k: (torch.device("cpu") if k == "device" and v is not None else v) for k, v in node.kwargs.items()
        }
    gm.recompile()
    fixed = [constants[n.name].detach().cpu() for n in inputs]
    try:
        zero, one, three = (
            gm(torch.full(m.shape, x, dtype=example(m.product).dtype), *fixed)[0].double()
            for x in (0.0, 1.0, 3.0)
        )
    except (RuntimeError, TypeError, ValueError):
        return None
    open_ = torch.isfinite(zero)
    if not bool((zero[open_] == 0).all()) or not bool((zero[~open_] == -math.inf).all()):
        return None
    slopes = one[open_].unique()
    if slopes.numel() != 1 or not torch.allclose(three[open_], 3 * one[open_], rtol=1e-3):
        return None
    scale = _exact_scale(m, float(slopes[0]))
    if bool(open_.all()):
        return "none", scale
    if rows == columns and torch.equal(
        open_, torch.ones(rows, columns, dtype=torch.bool).tril().expand_as(open_)
    ):
        return "causal", scale
    return None


def _exact_scale(m: Match, measured: float) -> float:
    """The Python number in the graph that the measured (rounded) scale came from, if there is one."""
    numbers = [a for n in m.modifier for a in n.args if isinstance(a, float) and a]
    return next(
        (s for a in numbers for s in (a, 1 / a) if abs(s - measured) <= 1e-2 * abs(measured)), measured
    )


def fragment(
    m: Match, entry: str, suffix: str, constants: dict[str, torch.Tensor], allow_tf32: bool
) -> tuple[emit.Fragment, list[fx.Node]]:
    """The kernel of an attention, and the nodes that its function takes, in order; raises `Unsupported`."""
    dtype = example(m.v).dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise Unsupported(f"attention in {dtype}")
    rows, columns = m.shape[-2:]
    width, out_width = example(m.q).shape[-1], example(m.v).shape[-1]
    if max(width, out_width) > 256 or 0 in m.shape:
        raise Unsupported("attention heads wider than 256")
    batch, heads = (m.shape[0], m.shape[1]) if len(m.shape) == 4 else (1, m.shape[0])
    b, h = Atom("batch", batch), Atom("head", heads)
    i, j, d = Atom("row", rows), Atom("col", columns, True), Atom("lane", max(width, out_width))
    lead = [ix.of(b), ix.of(h)] if len(m.shape) == 4 else [ix.of(h)]
    q = _operand(m.q, [*_broadcast(lead, m.q, m), ix.of(i), ix.of(d)])
    tail = [ix.of(d), ix.of(j)] if m.k_transposed else [ix.of(j), ix.of(d)]
    k = _operand(m.k, [*_broadcast(lead, m.k, m), *tail])
    v = _operand(m.v, [*_broadcast(lead, m.v, m), ix.of(j), ix.of(d)])
    scale, causal = m.scale, m.causal
    modifier: tuple[Plan, Part, list[fx.Node]] | None = None
    known = _known_mask(m, constants)
    if known is not None:
        causal, scale = known[0] == "causal", known[1]
    elif m.modifier:
        modifier, scale = _modifier(m, lead, i, j), 1.0
    elif m.mask is not None:
        modifier = _sdpa_mask(m, lead, i, j)
    operands = {"q": q, "k": k, "v": v}
    inputs = list(dict.fromkeys(o.base for o in operands.values()))
    extra = []
    if modifier is not None:
        used = {value.port for value in modifier[1].values() if value.op == "load"}
        extra = [n for pos, n in enumerate(modifier[2]) if pos in used]
    inputs += [n for n in extra if n not in inputs]
    fake = Plan([Port(n.name, (), (), torch.float32) for n in inputs], [], True, [])
    names = dict(zip(inputs, emit.short_names(fake), strict=True))
    exact = dtype == torch.float32
    text, helpers = _kernel(
        m, suffix, operands, modifier, names, (b, h, i, j, d), scale, causal, dtype, exact, allow_tf32
    )
    out = emit.Fragment(code=[text])
    out.helpers = {name: HELPERS[name] for name in HELPERS if name in helpers}
    big = max(width, out_width) > 128 or exact
    tile = {
        "BLOCK_M": 32 if exact else 64 if big or rows < 128 else 128,
        "BLOCK_N": 32 if exact else 64,
        "num_warps": 4 if big or rows < 128 else 8,
        "num_stages": 2 if exact else 3,
    }
    out.constants = [(f"{name}{suffix}", value) for name, value in tile.items()]
    space = {"BLOCK_M": [32, 64, 128], "BLOCK_N": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]}
    out.space = {f"{name}{suffix}": values for name, values in space.items()}
    out.function = _entry(m, entry, suffix, inputs, names, (batch, heads, rows, out_width))
    return out, inputs


def _broadcast(lead: Sequence[Expr], node: fx.Node, m: Match) -> list[Expr]:
    """Batch and head of an operand: 0 where it has one only, divided where it has fewer heads."""
    shape = example(node).shape[: len(lead)]
    full = m.shape[: len(lead)]
    out = []
    for e, size, want in zip(lead, shape, full, strict=True):
        if size == want:
            out.append(e)
        elif size == 1:
            out.append(ix.ZERO)
        elif m.grouped and want % size == 0:
            out.append(e.floordiv(want // size))
        else:
            raise Unsupported("attention operands of different batch shapes")
    return out


def _modifier(m: Match, lead, i: Atom, j: Atom) -> tuple[Plan, Part, list[fx.Node]]:
    """The loop-free code between the product and the softmax, at (batch, head, row, column)."""
    assert m.product is not None and m.scores is not None
    inputs = [m.product, *[n for n in inputs_of(m.modifier) if n is not m.product]]
    return _evaluate(cut(m.modifier, [m.scores], inputs), inputs, [*lead, ix.of(i), ix.of(j)])


def _sdpa_mask(m: Match, lead, i: Atom, j: Atom) -> tuple[Plan, Part, list[fx.Node]]:
    """SDPA's own mask as code on the scaled scores."""
    assert m.mask is not None
    graph = fx.Graph()
    acc, mask = graph.placeholder("scores"), graph.placeholder(m.mask.name)
    value = example(m.mask)
    acc.meta["example_value"] = torch.empty(m.shape, device="meta", dtype=example(m.q).dtype)
    mask.meta["example_value"] = value
    if value.dtype == torch.bool:
        result = graph.call_function(torch.where, (mask, acc, -math.inf))
    else:
        result = graph.call_function(torch.add, (acc, mask))
    result.meta["example_value"] = acc.meta["example_value"]
    graph.output((result,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    return _evaluate(gm, [m.output, m.mask], [*lead, ix.of(i), ix.of(j)])


def _evaluate(
    gm: fx.GraphModule, inputs: list[fx.Node], index: Sequence[Expr]
) -> tuple[Plan, Part, list[fx.Node]]:
    aten = lower(gm)
    pool = Pool()
    value = pool.cast(
        Builder(aten, pool, [], accumulators=[0]).value(output_nodes(aten)[0][0], tuple(index)), torch.float32
    )
    shape = tuple(output_nodes(aten)[0][0].meta["val"].shape)
    whole = ix.flatten(index, shape)
    for v in walk([value]):
        if v.op == "reduce" or (v.op == "acc" and v.expr != whole):
            raise Unsupported("scores that are mixed before the softmax")
    ports = []
    for n in [x for x in gm.graph.nodes if x.op == "placeholder"]:
        e = example(n)
        ports.append(Port(n.name, tuple(e.shape), layout(e.shape, e.stride()), e.dtype))
    atoms = sorted({a for e in index for a in e.atoms()}, key=lambda a: a.inner)
    part = Part(
        [a for a in atoms if not a.inner], [a for a in atoms if a.inner], [Store(0, whole, value)], False
    )
    return Plan(ports, [], True, [part], (0,)), part, inputs


def _kernel(
    m, suffix, operands, modifier, names, atoms, scale, causal, dtype, exact, allow_tf32
) -> tuple[str, set[str]]:
    b, h, i, j, d = atoms
    rows, columns = m.shape[-2:]
    width, out_width = example(m.q).shape[-1], example(m.v).shape[-1]
    block_d, block_v = max(16, next_power_of_2(width)), max(16, next_power_of_2(out_width))
    args = list(dict.fromkeys(f"{names[o.base]}_ptr" for o in operands.values()))
    helpers: set[str] = set()
    precision = f', input_precision="{"tf32" if allow_tf32 else "ieee"}"' if exact else ""
    text_of = {b: "batch", h: "head", i: "row", j: "col", d: "lane"}

    def where(o: Operand, rename: dict[Atom, str]) -> str:
        return emit.index_text(o.expr, lambda a: rename.get(a, text_of[a]), str, "//")

    # q: [BLOCK_M, D], k: [D, BLOCK_N], v: [BLOCK_N, DV]
    q_at = where(operands["q"], {i: "q_row[:, None]", d: "lane[None, :]"})
    k_at = where(operands["k"], {j: "k_row[None, :]", d: "lane[:, None]"})
    v_at = where(operands["v"], {j: "k_row[:, None]", d: "v_lane[None, :]"})
    lane_ok = {
        "q": f" & (lane[None, :] < {width})",
        "k": f" & (lane[:, None] < {width})",
        "v": f" & (v_lane[None, :] < {out_width})",
    }
    if block_d == width:
        lane_ok["q"] = lane_ok["k"] = ""
    if block_v == out_width:
        lane_ok["v"] = ""
    body: list[str] = []
    mod_lines: list[str] = []
    if modifier is not None:
        built, part, nodes = modifier
        pointers = {p: f"{names[n]}_ptr" for p, n in enumerate(nodes) if n in names}
        used = {v.port for v in part.values() if v.op == "load"}
        args += [pointers[p] for p in sorted(used) if pointers[p] not in args]
        reserved = [
            "scores",
            "acc",
            "q",
            "k",
            "v",
            "batch",
            "head",
            "lane",
            "q_row",
            "k_row",
            "p",
            "top",
            "total",
            "new_top",
        ]
        printer = Printer(built, part, pointers, exact_math(built) or exact, reserved)
        printer.atoms = dict(text_of)
        for value in part.values():
            if value.op == "acc":
                printer.names[value] = "scores"
            elif (line := printer.statement(value)) is not None:
                mod_lines.append(line)
        mod_lines.append(f"scores = {printer.ref(part.stores[0].value)}")
        helpers |= printer.used
    ends = f"tl.minimum({columns}, (pid_m + 1) * BLOCK_M)" if causal and rows == columns else str(columns)
    masked_tail = columns
    body += [
        "pid_m, pid_h = tl.program_id(0), tl.program_id(1)",
        f"batch, head = {f'(pid_h // {h.extent}).to(tl.int64), (pid_h % {h.extent}).to(tl.int64)' if _wide(operands) else f'pid_h // {h.extent}, pid_h % {h.extent}'}",
        "q_row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)",
        f"lane, v_lane = tl.arange(0, {block_d}), tl.arange(0, {block_v})",
        f"q = tl.load({names[operands['q'].base]}_ptr + ({q_at}), mask=(q_row[:, None] < {rows}){lane_ok['q']}, other=0.0)",
        'top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)',
        "total = tl.zeros([BLOCK_M], dtype=tl.float32)",
        f"acc = tl.zeros([BLOCK_M, {block_v}], dtype=tl.float32)",
        "row = q_row[:, None]",
        f"row_ok = row < {rows}",
        f"for start in range(0, {ends}, BLOCK_N):",
    ]
    loop = [
        "k_row = start + tl.arange(0, BLOCK_N)",
        "col = k_row[None, :]",
        f"col_ok = col < {masked_tail}",
        f"k = tl.load({names[operands['k'].base]}_ptr + ({k_at}), mask=(k_row[None, :] < {columns}){lane_ok['k']}, other=0.0)",
        f"scores = tl.dot(q, k{precision})",
    ]
    if scale != 1.0:
        loop.append(f"scores = scores * {scale!r}")
    loop += mod_lines
    if causal:
        loop.append('scores = tl.where(col <= row, scores, float("-inf"))')
    loop += [
        'scores = tl.where(col_ok, scores, float("-inf"))',
        "new_top = tl.maximum(top, tl.max(scores, axis=1))",
        "# a row whose scores are all -inf so far must not produce (-inf) - (-inf)",
        'base = tl.where(new_top == float("-inf"), 0.0, new_top)',
        f"p = {'_exp' if exact else 'tl.exp'}(scores - base[:, None])",
        f"shrink = {'_exp' if exact else 'tl.exp'}(top - base)",
        "total = total * shrink + tl.sum(p, axis=1)",
        f"v = tl.load({names[operands['v'].base]}_ptr + ({v_at}), mask=(k_row[:, None] < {columns}){lane_ok['v']}, other=0.0)",
        f"acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v{precision})",
        "top = new_top",
    ]
    if exact:
        helpers.add("_exp")
    body += [INDENT + line for line in loop]
    if m.safe:
        body.append("total = tl.where(total == 0.0, 1.0, total)  # SDPA gives 0 for a row that sees nothing")
    body += [
        "out = acc / total[:, None]",
        f"where = (((batch * {h.extent} + head) * {rows} + row) * {out_width}) + v_lane[None, :]"
        if _keep_layout(m) else f"where = ((batch * {rows} + row) * {h.extent} + head) * {out_width} + v_lane[None, :]",
        f"tl.store(out_ptr + where, out, mask=row_ok{lane_ok['v']})",
    ]  # fmt: skip
    head = [
        "@triton.jit",
        f"def attention_kernel{suffix}({', '.join([*args, 'out_ptr'])}, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):",
        f'{INDENT}"""One tile of query rows of one head; keys and values stream past, softmax is kept online."""',
    ]
    return "\n".join([*head, *(INDENT + line for line in body)]), helpers


def _wide(operands: dict[str, Operand]) -> bool:
    return any(o.expr.range[1] >= 2**31 for o in operands.values())


def _keep_layout(m: Match) -> bool:
    """Contiguous (batch, head, row, lane); else rows outermost, as the transpose that usually follows wants it."""
    users = list(m.output.users)
    moved = len(m.shape) == 4 and len(users) == 1 and op_name(users[0]) in ("transpose", "permute")
    return not moved


def _entry(m: Match, entry, suffix, inputs, names, sizes) -> list[str]:
    batch, heads, rows, width = sizes
    lines = [f"def {entry}({', '.join(names[n] for n in inputs)}):"]
    args = []
    for node in inputs:
        e = example(node)
        stride = layout(e.shape, e.stride())
        lines.append(
            f"{INDENT}{names[node]} = _as_expected({names[node]}, {tuple(e.shape)}, {stride}, {e.dtype})"
        )
        args.append(names[node])
    device, dtype = f"{names[inputs[0]]}.device", example(m.output).dtype
    if _keep_layout(m):
        shape = tuple(example(m.output).shape)
        lines.append(f"{INDENT}out = torch.empty({shape}, dtype={dtype}, device={device})")
    else:
        lines.append(
            f"{INDENT}out = torch.empty(({batch}, {rows}, {heads}, {width}), dtype={dtype}, device={device})"
        )
    lines.append(f"{INDENT}grid = (triton.cdiv({rows}, BLOCK_M{suffix}), {batch * heads})")
    tiling = ", ".join(f"{n}={n}{suffix}" for n in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
    lines.append(f"{INDENT}attention_kernel{suffix}[grid]({', '.join([*args, 'out'])}, {tiling})")
    lines.append(f"{INDENT}return out{'' if _keep_layout(m) else '.transpose(1, 2)'}")
    return lines
