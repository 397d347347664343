"""Ops that only move elements: views, joins, gathers, and tensors made from nothing.

Each ``_view_<op>`` answers "what is element ``index`` of this node" by asking for an element of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from . import index as ix
from .index import Expr
from .ir import Pool, Unsupported, Value
from .lower import base_name, dtype_of, shape_of
from .ops import scalar

Index = tuple[Expr, ...]
Pair = tuple[Value, Value]


def _is_truth_value(value: Value) -> bool:
    """Whether it is a boolean as a whole number, or one of two literals that a boolean chooses."""
    while value.op == "cast":
        value = value.args[0]
    return value.dtype == torch.bool or (value.op == "where" and all(a.op == "const" for a in value.args[1:]))


class Views:
    """The half of `build.Builder` that rewrites indices."""

    pool: Pool
    guard: Value | None
    any: Callable[[fx.Node, Index], Any]
    value: Callable[[fx.Node, Index], Value]
    pair: Callable[[fx.Node, Index], Pair]
    argument: Callable[..., Any]

    # ---- views: they only rewrite the index ---------------------------------------------------------

    def _view_view(self, node: fx.Node, index: Index) -> Any:
        source = node.all_input_nodes[0]
        return self.any(source, ix.unflatten(ix.flatten(index, shape_of(node)), shape_of(source)))

    _view__unsafe_view = _view_reshape = _view__reshape_alias = _view_flatten = _view_view

    def _view_as_strided(self, node: fx.Node, index: Index) -> Any:
        source = node.all_input_nodes[0]
        fake, own = node.meta["val"], source.meta["val"]
        offset = node.args[3] if len(node.args) > 3 else 0
        if not (fake.is_contiguous() and own.is_contiguous() and fake.numel() == own.numel() and not offset):
            raise Unsupported("as_strided that is not a reshape")
        return self._view_view(node, index)

    def _view_permute(self, node: fx.Node, index: Index) -> Any:
        order: Any = node.args[1]
        source = [ix.ZERO] * len(order)
        for i, d in zip(index, order, strict=True):
            source[d % len(order)] = i
        return self.any(node.all_input_nodes[0], tuple(source))

    def _view_transpose(self, node: fx.Node, index: Index) -> Any:
        a, b = (node.args[1:] if len(node.args) > 1 else (0, 1)) if len(index) > 1 else (0, 0)
        source = list(index)
        source[a], source[b] = source[b], source[a]  # type: ignore[index]
        return self.any(node.all_input_nodes[0], tuple(source))

    _view_t = _view_transpose

    def _view_expand(self, node: fx.Node, index: Index) -> Any:
        return self.argument(node.args[0], index, shape_of(node))

    def _view_broadcast_in_dim(self, node: fx.Node, index: Index) -> Any:
        source = node.all_input_nodes[0]
        dims: Any = node.args[2]
        own = shape_of(source)
        return self.any(
            source, tuple(ix.ZERO if s == 1 else index[d] for s, d in zip(own, dims, strict=True))
        )

    def _view_unsqueeze(self, node: fx.Node, index: Index) -> Any:
        d = int(node.args[1]) % len(index)  # type: ignore[arg-type]
        return self.any(node.all_input_nodes[0], index[:d] + index[d + 1 :])

    def _view_squeeze(self, node: fx.Node, index: Index) -> Any:
        source = node.all_input_nodes[0]
        shape = shape_of(source)
        dims: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
        gone = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)}
        rest = iter(index)
        return self.any(
            source, tuple(ix.ZERO if d in gone and s == 1 else next(rest) for d, s in enumerate(shape))
        )

    def _view_slice(self, node: fx.Node, index: Index) -> Any:
        d, start, _, step = self._slice(node, 1)
        return self.any(node.all_input_nodes[0], (*index[:d], index[d] * step + start, *index[d + 1 :]))

    @staticmethod
    def _slice(node: fx.Node, first: int) -> tuple[int, int, int, int]:
        size_of = shape_of(node.all_input_nodes[0])
        given: list[Any] = [*node.args[first:], *[None] * 4][:4]
        d = (given[0] or 0) % len(size_of)
        start, stop, step = slice(given[1], given[2], given[3] or 1).indices(size_of[d])
        return d, start, stop, step

    def _view_select(self, node: fx.Node, index: Index) -> Any:
        source = node.all_input_nodes[0]
        shape = shape_of(source)
        d, at = int(node.args[1]) % len(shape), int(node.args[2])  # type: ignore[arg-type]
        return self.any(source, (*index[:d], ix.constant(at % shape[d]), *index[d:]))

    def _view_flip(self, node: fx.Node, index: Index) -> Any:
        shape, dims = shape_of(node), {d % len(index) for d in node.args[1]}  # type: ignore[union-attr]
        turned = tuple(i * -1 + (shape[d] - 1) if d in dims else i for d, i in enumerate(index))
        return self.any(node.all_input_nodes[0], turned)

    def _view_repeat(self, node: fx.Node, index: Index) -> Any:
        source = node.all_input_nodes[0]
        own = shape_of(source)
        tail = index[len(index) - len(own) :]
        return self.any(source, tuple(i.mod(s) for i, s in zip(tail, own, strict=True)))

    def _view_getitem(self, node: fx.Node, index: Index) -> Any:
        source, which = node.args
        assert isinstance(source, fx.Node) and isinstance(which, int)
        name, parts = base_name(source), source.meta["val"]
        if name in (
            "split",
            "split_with_sizes",
            "unsafe_split",
            "chunk",
            "split_with_sizes_copy",
            "tensor_split",
        ):
            d = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
            d = int(d) % len(index)  # type: ignore[arg-type]
            start = sum(p.shape[d] for p in parts[:which])
            return self.any(source.all_input_nodes[0], (*index[:d], index[d] + start, *index[d + 1 :]))
        if name == "unbind":
            d = source.args[1] if len(source.args) > 1 else 0
            d = int(d) % (len(index) + 1)  # type: ignore[arg-type]
            return self.any(source.all_input_nodes[0], (*index[:d], ix.constant(which), *index[d:]))
        raise Unsupported(f"output {which} of {name}")

    def _choose(self, cond: Value, yes: Any, no: Any) -> Any:
        """``where(cond, yes, no)`` for values or pairs, folding a constant condition."""
        if isinstance(yes, tuple) or isinstance(no, tuple):
            zero = self.pool.const(0.0, torch.float32)
            yes, no = (v if isinstance(v, tuple) else (v, zero) for v in (yes, no))
            return tuple(self._choose(cond, a, b) for a, b in zip(yes, no, strict=True))
        if cond.op == "const":
            return yes if cond.const else no
        return self.pool.make("where", [cond, yes, no], dtype=yes.dtype)

    def _under(self, cond: Value, node: fx.Node, index: Index) -> Any:
        """``node`` at ``index``, where loads only happen if ``cond`` holds (the index may be out of range)."""
        if cond.op == "const":
            return self.any(node, index)
        outer = self.guard
        self.guard = cond if outer is None else self.pool.make("and", [outer, cond], dtype=torch.bool)
        try:
            return self.any(node, index)
        finally:
            self.guard = outer

    def _view_cat(self, node: fx.Node, index: Index) -> Any:
        pieces: Any = node.args[0]
        d: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        d = int(d) % len(index)
        out = dtype_of(node)
        start, branches = 0, []
        for piece in pieces:
            if len(shape_of(piece)) != len(index):
                continue  # the legacy empty tensor
            size = shape_of(piece)[d]
            cond = self.pool.in_range(index[d], start, start + size)
            if size and not (cond.op == "const" and not cond.const):
                value = self._under(cond, piece, (*index[:d], index[d] + -start, *index[d + 1 :]))
                branches.append((cond, value if isinstance(value, tuple) else scalar(self.pool, value, out)))
            start += size
        result = branches[-1][1]
        for cond, value in reversed(branches[:-1]):
            result = self._choose(cond, value, result)
        return result

    def _view_constant_pad_nd(self, node: fx.Node, index: Index) -> Any:
        source, pads = node.all_input_nodes[0], list(node.args[1])  # type: ignore[arg-type]
        fill: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
        shape, moved, cond = shape_of(source), list(index), self.pool.const(True, torch.bool)
        for k in range(len(pads) // 2):
            d = len(shape) - 1 - k
            moved[d] = index[d] + -pads[2 * k]
            inside = self.pool.in_range(moved[d], 0, shape[d])
            if inside.op == "const" and inside.const:
                continue
            cond = inside if cond.op == "const" else self.pool.make("and", [cond, inside], dtype=torch.bool)
        value = self._under(cond, source, tuple(moved))
        return self._choose(cond, value, self.pool.const(fill, dtype_of(node)))

    def _view_slice_scatter(self, node: fx.Node, index: Index) -> Any:
        base, source = node.args[:2]
        assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
        d, start, stop, step = self._slice(node, 2)
        if step != 1:
            raise Unsupported("a strided slice that is written to")
        cond = self.pool.in_range(index[d], start, stop)
        value = self._under(cond, source, (*index[:d], index[d] + -start, *index[d + 1 :]))
        return self._choose(cond, value, self.any(base, index))

    def _view_select_scatter(self, node: fx.Node, index: Index) -> Any:
        base, source, d, at = node.args
        assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
        d = int(d) % len(index)  # type: ignore[arg-type]
        at = int(at) % shape_of(base)[d]  # type: ignore[arg-type]
        cond = self.pool.in_range(index[d], at, at + 1)
        return self._choose(cond, self.any(source, index[:d] + index[d + 1 :]), self.any(base, index))

    # ---- complex and real ---------------------------------------------------------------------------

    def _view_view_as_complex(self, node: fx.Node, index: Index) -> Pair:
        source = node.all_input_nodes[0]
        return self.value(source, (*index, ix.ZERO)), self.value(source, (*index, ix.constant(1)))

    def _view_view_as_real(self, node: fx.Node, index: Index) -> Value:
        re, im = self.pair(node.all_input_nodes[0], index[:-1])
        return self._choose(self.pool.in_range(index[-1], 0, 1), re, im)

    def _view_real(self, node: fx.Node, index: Index) -> Value:
        return self.pair(node.all_input_nodes[0], index)[0]

    def _view_imag(self, node: fx.Node, index: Index) -> Value:
        return self.pair(node.all_input_nodes[0], index)[1]

    # ---- gathers ------------------------------------------------------------------------------------

    def _indirect(self, indices: fx.Node, index: Index, extent: int, wrap: bool) -> Expr:
        pool = self.pool
        at = pool.cast(self.value(indices, index), torch.int64)
        if indices.meta["val"].dtype == torch.bool:
            raise Unsupported("indexing with a mask")
        if at.op == "index" and at.expr is not None and at.expr.range[0] >= 0 and at.expr.range[1] < extent:
            return at.expr  # an arange: no memory involved
        if _is_truth_value(at):  # g++ 12 vectorizes a look-up at 0 or 1 wrongly: it reads other elements
            raise Unsupported("a look-up at a position that is a truth value")
        if wrap:
            below = pool.make("lt", [at, pool.const(0, torch.int64)], dtype=torch.bool)
            shifted = pool.make("add", [at, pool.const(extent, torch.int64)], dtype=torch.int64)
            at = pool.make("where", [below, shifted, at], dtype=torch.int64)
        # never read outside the table, whatever the caller passes
        at = pool.make("clamp_index", [at], dtype=torch.int64, const=extent, name=indices.name)
        return ix.of(ix.Indirect(at, extent))

    def _view_embedding(self, node: fx.Node, index: Index) -> Any:
        table, indices = node.args[:2]
        assert isinstance(table, fx.Node) and isinstance(indices, fx.Node)
        return self.any(table, (self._indirect(indices, index[:-1], shape_of(table)[0], False), index[-1]))

    def _view_index_select(self, node: fx.Node, index: Index) -> Any:
        table, d, indices = node.args
        assert isinstance(table, fx.Node) and isinstance(indices, fx.Node)
        d = int(d) % len(index)  # type: ignore[arg-type]
        at = self._indirect(indices, (index[d],), shape_of(table)[d], False)
        return self.any(table, (*index[:d], at, *index[d + 1 :]))

    def _view_gather(self, node: fx.Node, index: Index) -> Any:
        table, d, indices = node.args[:3]
        assert isinstance(table, fx.Node) and isinstance(indices, fx.Node)
        d = int(d) % len(index)  # type: ignore[arg-type]
        at = self._indirect(indices, index, shape_of(table)[d], False)
        return self.any(table, (*index[:d], at, *index[d + 1 :]))

    def _view_index(self, node: fx.Node, index: Index) -> Any:
        table, given = node.args
        assert isinstance(table, fx.Node) and isinstance(given, list | tuple)
        shape = shape_of(table)
        where = [d for d, i in enumerate(given) if i is not None]
        tensors = [given[d] for d in where]
        if where != list(range(where[0], where[-1] + 1)):
            raise Unsupported("indexing with tensors that are not next to each other")
        rank = max(len(shape_of(t)) for t in tensors)  # type: ignore[arg-type]
        first = where[0]
        gathered = index[first : first + rank]
        wide = tuple(node.meta["val"].shape[first : first + rank])
        source = list(index[:first])
        for d, t in zip(where, tensors, strict=True):
            own = shape_of(t)  # type: ignore[arg-type]
            at = gathered[rank - len(own) :] if own else ()
            at = tuple(ix.ZERO if s == 1 else i for i, s in zip(at, own, strict=True))
            source.append(self._indirect(t, at, shape[d], True))  # type: ignore[arg-type]
        del wide
        return self.any(table, (*source, *index[first + rank :]))

    # ---- tensors made from nothing ------------------------------------------------------------------

    def _view_full(self, node: fx.Node, index: Index) -> Any:
        return self._fill(node, node.args[1])

    _view_full_like = _view_full

    def _view_scalar_tensor(self, node: fx.Node, index: Index) -> Any:
        return self._fill(node, node.args[0])

    def _view_zeros(self, node: fx.Node, index: Index) -> Any:
        return self._fill(node, 0)

    def _view_ones(self, node: fx.Node, index: Index) -> Any:
        return self._fill(node, 1)

    _view_zeros_like, _view_ones_like = _view_zeros, _view_ones

    def _fill(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, int | float) or dtype_of(node).is_complex:
            raise Unsupported("a tensor filled with another tensor's value")
        return self.pool.const(value, dtype_of(node))

    def _view_arange(self, node: fx.Node, index: Index) -> Any:
        numbers: list[Any] = [a for a in node.args if isinstance(a, int | float)]
        start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
        return self._ramp(node, index[0], start, step)

    def _view_iota(self, node: fx.Node, index: Index) -> Any:
        return self._ramp(node, index[0], node.kwargs.get("start", 0), node.kwargs.get("step", 1))

    def _ramp(self, node: fx.Node, at: Expr, start: Any, step: Any) -> Value:
        pool, dtype = self.pool, dtype_of(node)
        if isinstance(start, int) and isinstance(step, int):
            return pool.cast(pool.index(at * step + start), dtype)
        x = pool.cast(pool.index(at), dtype)
        scaled = pool.make("mul", [x, pool.const(step, dtype)], dtype=x.dtype)
        return pool.make("add", [scaled, pool.const(start, dtype)], dtype=x.dtype)
