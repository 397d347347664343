"""Turn a subgraph into loop nests: which loops, which outputs share them, how far the loops collapse.

A *part* is one loop nest: outer loops (rows) and an inner loop (columns) over which the reductions, if
any, run.  Outputs with the same loops share a part, so that a residual sum and its norm are computed
together.  Where the inner loop meets a seam (the two halves of ``rotate_half``, the real and imaginary
lanes of a complex product) it is cut there and the pieces are unrolled side by side: every element is
then read once and no condition is left inside the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, prod

import torch
from torch import fx

from . import index as ix
from .build import Builder, InnerDependent, reduced, reduction_extents
from .index import Atom, Expr
from .ir import Pool, Unsupported, Value, walk
from .lower import contiguous_stride, example, layout, lower, output_nodes, placeholders, shape_of

_MAX_UNROLL = 8


@dataclass(frozen=True)
class Port:
    """A tensor that the kernel reads or writes; strides in elements, as the kernel addresses it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last that is addressed."""
        if 0 in self.shape:
            return 0
        return 1 + sum((s - 1) * st for s, st in zip(self.shape, self.stride, strict=True))

    @property
    def dense(self) -> bool:
        return tuple(self.stride) == contiguous_stride(self.shape)


@dataclass(frozen=True)
class Store:
    """``output[expr] = value``; complex outputs are addressed as their real pairs."""

    output: int
    expr: Expr
    value: Value


@dataclass
class Part:
    """One loop nest over ``outer`` x ``inner``; ``reduces`` when the inner loop is folded somewhere."""

    outer: list[Atom]
    inner: list[Atom]
    stores: list[Store]
    reduces: bool

    @property
    def rows(self) -> int:
        return prod(a.extent for a in self.outer)

    @property
    def columns(self) -> int:
        return prod(a.extent for a in self.inner)

    def values(self) -> list[Value]:
        """All values, operands first."""
        roots = [s.value for s in self.stores]
        roots += [term.value for s in self.stores for term in s.expr.indirects()]
        return walk(roots)


@dataclass
class Plan:
    """The loop nests of a subgraph and the tensors they work on."""

    inputs: list[Port]
    outputs: list[Port]
    single: bool
    parts: list[Part]
    accumulators: tuple[int, ...] = ()
    ops: list[str] = field(default_factory=list)

    def used_inputs(self, part: Part) -> list[int]:
        return sorted({v.port for v in part.values() if v.op == "load"})


def dense_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of ``stride`` (what a fresh output should look like)."""
    order = stride_order(shape, stride)
    out, step = [0] * len(shape), 1
    for d in reversed(order):
        out[d] = step
        step *= max(shape[d], 1)
    if all(
        s <= 1 or out[d] == c for d, (s, c) in enumerate(zip(shape, contiguous_stride(shape), strict=True))
    ):
        return contiguous_stride(shape)
    return tuple(out)


def stride_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dims from the slowest to the fastest in memory; broadcast dims (stride 0) count as slowest."""
    if any(st == 0 and s > 1 for s, st in zip(shape, stride, strict=True)):
        return list(range(len(shape)))
    return sorted(range(len(shape)), key=lambda d: (-stride[d], d))


def port_of(node: fx.Node) -> Port:
    value = example(node)
    return Port(node.name, tuple(value.shape), tuple(value.stride()), value.dtype)


def plan(gm: fx.GraphModule, accumulators: Sequence[int] = ()) -> Plan:
    """The loop nests that compute ``gm``.

    ``accumulators`` are the placeholders that live in registers (a matmul's result): then there is one
    part, over the rows and columns of that matrix.  Raises `Unsupported`.
    """
    outputs, single = output_nodes(gm)
    for node in outputs:
        if not isinstance(node, fx.Node) or not isinstance(example(node), torch.Tensor):
            raise Unsupported("an output that is not a tensor")
        if node.op == "placeholder":
            raise Unsupported("an output that is an input")
        value = example(node)
        if 0 in value.shape:
            raise Unsupported("an empty output")
    aten = lower(gm)
    ports_in = [port_of(n) for n in placeholders(gm)]
    ports_in = [Port(p.name, p.shape, layout(p.shape, p.stride), p.dtype) for p in ports_in]
    ports_out = []
    for k, node in enumerate(outputs):
        port = port_of(node)
        ports_out.append(
            Port(
                f"out{k}" if len(outputs) > 1 else "out",
                port.shape,
                dense_like(port.shape, port.stride),
                port.dtype,
            )
        )
    results, _ = output_nodes(aten)
    if len(results) != len(outputs) or any(not isinstance(r, fx.Node) for r in results):
        raise Unsupported("outputs that are constants")
    pool = Pool()
    ops = [
        f"{n.target.__name__ if callable(n.target) else n.target}"
        for n in gm.graph.nodes
        if n.op.startswith("call")
    ]
    result = Plan(ports_in, ports_out, single, [], tuple(accumulators), ops)
    groups: dict[tuple, list[tuple[int, list[Expr], list[Atom], list[Atom]]]] = {}
    for k, node in enumerate(results):
        out_index, outer, inner = _loops(aten, pool, node, ports_out[k], bool(accumulators))
        key = (tuple(a.extent for a in outer), tuple(a.extent for a in inner))
        groups.setdefault(key, []).append((k, out_index, outer, inner))
    if accumulators and len(groups) > 1:
        raise Unsupported("an epilogue whose outputs have different shapes")
    for members in groups.values():
        result.parts.append(_part(aten, pool, members, results, ports_out, accumulators))
    return result


def _atoms(extents: Sequence[int], prefix: str, inner: bool) -> list[Atom]:
    return [Atom(f"{prefix}{k}", e, inner) for k, e in enumerate(extents)]


def _loops(
    aten: fx.GraphModule, pool: Pool, node: fx.Node, port: Port, epilogue: bool
) -> tuple[list[Expr], list[Atom], list[Atom]]:
    """Index of the output over loop variables, the outer ones, the inner ones."""
    shape = port.shape
    order = [d for d in stride_order(shape, port.stride) if shape[d] > 1]
    found = reduction_extents([node])

    def layout(
        inner_dims: Sequence[int], folded: int = 0, part: int = 0
    ) -> tuple[list[Expr], list[Atom], list[Atom]]:
        """``part``: only that many of the first inner dim's elements are inner (groups of channels)."""
        outer_dims = [d for d in order if d not in inner_dims]
        outer = _atoms([shape[d] for d in outer_dims], "r", False)
        inner = _atoms([shape[d] for d in inner_dims] or ([folded] if folded else []), "c", True)
        where = {
            d: ix.of(a)
            for d, a in [*zip(outer_dims, outer, strict=True), *zip(inner_dims, inner, strict=False)]
        }
        if part:
            d = inner_dims[0]
            group, inner[0] = Atom("rg", shape[d] // part), Atom("c0", part, True)
            outer.append(group)
            where[d] = ix.of(group) * part + ix.of(inner[0])
        return [where.get(d, ix.ZERO) for d in range(len(shape))], outer, inner

    if not found:
        if epilogue and port.dense and order != sorted(order):
            raise Unsupported("an epilogue that transposes")
        return layout(order[-1:])
    extents = set(found.values())
    if len(extents) > 1:
        raise Unsupported(f"reductions over different extents ({', '.join(map(str, sorted(extents)))})")
    (extent,) = extents
    candidates: list[tuple[list[int], int, int]] = []
    for k in range(1, len(order) + 1):
        whole, rest = prod(shape[d] for d in order[-k:]), prod(shape[d] for d in order[len(order) - k + 1 :])
        if whole == extent:
            candidates.append((order[-k:], 0, 0))
        elif whole % extent == 0 and extent % rest == 0 and rest < extent:
            candidates.append((order[-k:], 0, extent // rest))
    for reduction in found:
        dims = [d for d in reduced(reduction)[0] if shape_of(reduction.all_input_nodes[0])[d] > 1]
        if shape_of(reduction.all_input_nodes[0]) == shape and (dims, 0, 0) not in candidates:
            candidates.append((dims, 0, 0))
    candidates += [([d], 0, 0) for d in order if shape[d] == extent and ([d], 0, 0) not in candidates]
    if prod(shape) <= max(prod(shape_of(r)) for r in found):  # else rows would be folded again and again
        candidates.append(([], extent, 0))  # one value per row
    reason = Unsupported("no loop order suits its reductions")
    for dims, folded, part in candidates:
        index, outer, inner = layout(dims, folded, part)
        try:
            value = Builder(aten, pool, inner).any(node, tuple(index))
        except InnerDependent as error:
            reason = error
            continue
        values = value if isinstance(value, tuple) else (value,)
        if folded and any(v.atoms() & set(inner) for v in values):
            continue
        return index, outer, inner
    raise Unsupported(f"no loop order suits its reductions ({reason})")


def _part(aten, pool: Pool, members, results, ports: list[Port], accumulators: Sequence[int]) -> Part:
    _, _, outer, inner = members[0]
    indices = {k: list(index) for k, index, _, _ in members}
    combos: list[dict[Atom, Expr]] = [{}]
    outer, inner = list(outer), list(inner)
    reduces = False
    stores: list[Store] = []
    for _round in range(5):
        builder = Builder(aten, pool, inner, accumulators)
        stores = []
        for k, index in indices.items():
            for combo in combos:
                at = tuple(e.substitute(combo, lambda v: v) for e in index)
                value = builder.any(results[k], at)
                address = ix.address(at, ports[k].stride)
                if ports[k].dtype.is_complex:
                    re, im = value if isinstance(value, tuple) else (value, pool.const(0.0, torch.float32))
                    stores += [Store(k, address * 2, re), Store(k, address * 2 + 1, im)]
                elif isinstance(value, tuple):
                    raise Unsupported("a complex value in a real output")
                else:
                    stores.append(Store(k, address, _stored(pool, value, ports[k].dtype)))
        reduces = any(v.op == "reduce" for v in walk([s.value for s in stores]))
        cut = None if reduces or accumulators or not inner else _seam(stores, inner[-1])
        if cut is None:
            break
        split, how = cut
        atom = inner.pop()
        high = Atom(f"{atom.name}h{_round}", atom.extent // split, False)
        low = Atom(f"{atom.name}l{_round}", split, True)
        whole = ix.of(high) * split + ix.of(low)
        indices = {
            k: [e.substitute({atom: whole}, lambda v: v) for e in index] for k, index in indices.items()
        }
        if how == "nest":
            outer.append(high)
            inner.append(low)
            continue
        unrolled, kept = (low, high) if how == "lanes" else (high, low)
        combos = [{**c, unrolled: ix.constant(j)} for c in combos for j in range(unrolled.extent)]
        if len(combos) > _MAX_UNROLL:
            raise Unsupported("too many pieces in the inner loop")
        renamed = Atom(kept.name, kept.extent, True)
        indices = {
            k: [e.substitute({kept: ix.of(renamed)}, lambda v: v) for e in index]
            for k, index in indices.items()
        }
        inner.append(renamed)
    part = Part(outer, inner, stores, reduces)
    _collapse(pool, part, accumulators)
    return part


def _stored(pool: Pool, value: Value, dtype: torch.dtype) -> Value:
    if dtype == torch.bool and value.dtype != torch.bool:
        return pool.make("ne", [value, pool.const(0, value.dtype)], dtype=torch.bool)
    return pool.cast(value, dtype)


def _exprs(stores: Sequence[Store]) -> list[Expr]:
    values = walk([s.value for s in stores] + [t.value for s in stores for t in s.expr.indirects()])
    return [s.expr for s in stores] + [v.expr for v in values if v.expr is not None]


def _seam(stores: Sequence[Store], atom: Atom) -> tuple[int, str] | None:
    """Where to cut the inner loop, or None: the length of a piece, and what becomes of the pieces.

    ``lanes``: the elements within a piece are unrolled (complex pairs); ``pieces``: the pieces are (halves);
    ``nest``: the pieces become an outer loop (heads).
    """
    values = walk([s.value for s in stores])
    pieces, lanes = 0, 0
    for expr in _exprs(stores):
        for term in expr.nonlinear():
            if term.base == ix.of(atom) and atom.extent % term.by == 0:
                lanes = gcd(lanes, term.by)
    for value in values:
        if value.op == "in_range" and value.expr is not None and value.expr.atoms() == {atom}:
            c = value.expr.coefficient(atom)
            if c and not value.expr.nonlinear():
                for bound in value.const:
                    at, remainder = divmod(bound - value.expr.const, c)
                    if remainder == 0 and 0 < at < atom.extent:
                        pieces = gcd(pieces, at)
    if lanes and 1 < lanes <= 4:
        return lanes, "lanes"
    if lanes and 1 < lanes < atom.extent:
        return lanes, "pieces" if atom.extent // lanes <= 4 and pieces else "nest"
    if pieces:
        pieces = gcd(pieces, atom.extent)
        if 1 < atom.extent // pieces <= 4:
            return pieces, "pieces"
    return None


def _collapse(pool: Pool, part: Part, accumulators: Sequence[int]) -> None:
    """Merge neighbouring loops whose indices only ever occur together."""
    fused = 0
    while True:
        loops = [*part.outer, *part.inner]
        for a, b in itertools.pairwise(loops):
            if a.inner != b.inner and (part.reduces or accumulators):
                continue
            merged = Atom(f"{'c' if b.inner else 'r'}m{fused}", a.extent * b.extent, b.inner)
            swap = {b: ix.of(merged) - ix.of(a) * b.extent}
            values = [s.value for s in part.stores]
            changed = pool.rewrite(values, lambda e, on_value, swap=swap: e.substitute(swap, on_value))
            renamed = dict(zip(values, changed, strict=True))
            stores = [
                Store(s.output, s.expr.substitute(swap, lambda v, r=renamed: r.get(v, v)), renamed[s.value])
                for s in part.stores
            ]
            if any(a in e.atoms() for e in _exprs(stores)):
                continue
            part.stores = stores
            part.outer = [merged if x is b else x for x in part.outer if x is not a]
            part.inner = [merged if x is b else x for x in part.inner if x is not a]
            fused += 1
            break
        else:
            return
