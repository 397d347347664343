"""Evaluate an aten-level graph at symbolic indices: from tensors to the values of one loop nest.

`Builder.value(node, index)` says what element ``index`` of ``node`` is, as a `Value`.  Views only rewrite the
index, so reshapes, transposes, slices, expands, splits, concatenations and embeddings cost nothing but
address arithmetic.  A complex tensor is a pair of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from . import index as ix
from .index import Atom, Expr
from .ir import FLOATS, Pool, Unsupported, Value, compute_dtype
from .lower import base_name
from .ops import POINTWISE, SPECIAL, pointwise, scalar

Index = tuple[Expr, ...]
Pair = tuple[Value, Value]

SAME = {
    "clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous", "copy", "view_of", "_conj_physical",
    "resolve_conj", "clone_preserve_strides",
}  # fmt: skip
REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "max", "min", "any", "all", "logsumexp"}


class InnerDependent(Unsupported):
    """A reduction would have to run once per inner element: the loop nest was chosen wrongly."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def reduced(node: fx.Node) -> tuple[tuple[int, ...], bool]:
    """``(dims, keepdim)`` of a reduction node, the dims sorted and not negative."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = len(shape_of(source))
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(rank)
    keep = node.kwargs.get("keepdim", False)
    if base_name(node) in ("sum", "mean", "amax", "amin", "max", "min", "any", "all") and len(node.args) > 2:
        keep = bool(node.args[2])
    return tuple(sorted(d % rank for d in dims)) if rank else (), bool(keep)


def reduction_extents(roots: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The reductions that ``roots`` depend on, each with the number of elements it folds (> 1 only)."""
    found: dict[fx.Node, int] = {}
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += node.all_input_nodes
        if node.op == "call_function" and base_name(node) in REDUCTIONS:
            dims, _ = reduced(node)
            count = prod(shape_of(node.all_input_nodes[0])[d] for d in dims)
            if count > 1:
                found[node] = count
    return found


class Builder:
    """Evaluates nodes inside a loop nest whose inner loop runs over ``inner`` (for reductions)."""

    def __init__(
        self, gm: fx.GraphModule, pool: Pool, inner: Sequence[Atom], accumulators: Sequence[int] = ()
    ) -> None:
        self.pool = pool
        self.inner = tuple(inner)
        self.extent = prod(a.extent for a in inner)
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.ports = {node: k for k, node in enumerate(nodes)}
        self.accumulators = set(accumulators)
        self.guard: Value | None = None
        self.memo: dict[tuple, Any] = {}

    # ---- entry points ------------------------------------------------------------------------------

    def value(self, node: Any, index: Index) -> Value:
        result = self.any(node, index)
        if isinstance(result, tuple):
            raise Unsupported(f"a complex value where a real one is needed ({node})")
        return result

    def pair(self, node: Any, index: Index) -> Pair:
        result = self.any(node, index)
        if isinstance(result, tuple):
            return result
        return result, self.pool.const(0.0, result.dtype)

    def any(self, node: fx.Node, index: Index) -> Value | Pair:
        key = (node, index, id(self.guard))
        if key not in self.memo:
            self.memo[key] = self._evaluate(node, index)
        return self.memo[key]

    def argument(self, arg: Any, index: Index, shape: tuple[int, ...]) -> Any:
        """An op's argument under broadcasting: nodes are evaluated, numbers pass through."""
        if not isinstance(arg, fx.Node):
            return arg
        own = shape_of(arg)
        tail = index[len(shape) - len(own) :] if own else ()
        return self.any(arg, tuple(ix.ZERO if s == 1 else i for i, s in zip(tail, own, strict=True)))

    # ---- the ops -----------------------------------------------------------------------------------

    def _evaluate(self, node: fx.Node, index: Index) -> Value | Pair:
        if node.op == "placeholder":
            return self._load(node, index)
        if node.op != "call_function":
            raise Unsupported(f"a {node.op} node")
        name = base_name(node)
        if name in SAME:
            return self.any(node.all_input_nodes[0], index)
        view = getattr(self, f"_view_{name}", None)
        if view is not None:
            return view(node, index)
        if name in REDUCTIONS:
            return self._reduction(node, name, index)
        if dtype_of(node).is_complex or any(
            dtype_of(a).is_complex for a in node.all_input_nodes if isinstance(a.meta["val"], torch.Tensor)
        ):
            return self._complex(node, name, index)
        if name not in POINTWISE and name not in SPECIAL:
            raise Unsupported(f"the op {name}")
        shape = shape_of(node)
        args = [self.argument(a, index, shape) for a in node.args]
        kwargs = {k: self.argument(v, index, shape) for k, v in node.kwargs.items()}
        return pointwise(self.pool, name, args, kwargs, dtype_of(node), node.name)

    def _load(self, node: fx.Node, index: Index) -> Value | Pair:
        fake, port = node.meta["val"], self.ports[node]
        dtype = compute_dtype(fake.dtype.to_real() if fake.dtype.is_complex else fake.dtype)
        expr = ix.address(index, fake.stride())
        if port in self.accumulators:
            expr = ix.flatten(index, fake.shape)
            return self.pool.make("acc", dtype=dtype, expr=expr, port=port, name=node.name)
        guard = [self.guard] if self.guard is not None else []

        def load(address: Expr, suffix: str = "") -> Value:
            return self.pool.make(
                "load", guard, dtype=dtype, expr=address, port=port, name=node.name + suffix
            )

        if fake.dtype.is_complex:
            return load(expr * 2, "_re"), load(expr * 2 + 1, "_im")
        return load(expr)

    def _complex(self, node: fx.Node, name: str, index: Index) -> Value | Pair:
        pool, shape = self.pool, shape_of(node)
        real = dtype_of(node).to_real() if dtype_of(node).is_complex else dtype_of(node)

        def op(kind: str, *args: Value) -> Value:
            return pool.make(kind, args, dtype=compute_dtype(real), name=node.name)

        def parts(arg: Any) -> Pair:
            if not isinstance(arg, fx.Node):
                number = complex(arg)
                return pool.const(number.real, real), pool.const(number.imag, real)
            value = self.argument(arg, index, shape)
            re, im = value if isinstance(value, tuple) else (value, pool.const(0.0, real))
            return scalar(pool, re, real), scalar(pool, im, real)

        if name in ("view_as_real", "real", "imag"):
            raise AssertionError("handled as a view")
        a = parts(node.args[0])
        if name in ("_to_copy", "convert_element_type"):
            return a
        if name in ("conj", "_conj"):
            return a[0], op("neg", a[1])
        if name == "neg":
            return op("neg", a[0]), op("neg", a[1])
        if name == "polar":
            b = parts(node.args[1])
            return op("mul", a[0], op("cos", b[0])), op("mul", a[0], op("sin", b[0]))
        if name == "complex":
            return a[0], parts(node.args[1])[0]
        if name in ("add", "sub") and len(node.args) == 2 and not node.kwargs:
            b = parts(node.args[1])
            return op(name, a[0], b[0]), op(name, a[1], b[1])
        if name == "mul":
            b = parts(node.args[1])
            re = op("sub", op("mul", a[0], b[0]), op("mul", a[1], b[1]))
            im = op("add", op("mul", a[0], b[1]), op("mul", a[1], b[0]))
            return re, im
        raise Unsupported(f"{name} on complex numbers")

    def _reduction(self, node: fx.Node, name: str, index: Index) -> Value:
        source = node.all_input_nodes[0]
        shape, pool = shape_of(source), self.pool
        dims, keep = reduced(node)
        dtype = dtype_of(node)
        count = prod(shape[d] for d in dims)
        rest = iter(index) if not keep else None
        outer = [
            ix.ZERO if d in dims else (index[d] if rest is None else next(rest)) for d in range(len(shape))
        ]
        if count > 1:
            if count != self.extent:
                raise Unsupported(f"reductions over different extents ({count} and {self.extent})")
            depends = set(self.inner)
            if any(e.atoms() & depends for e in outer) or (
                self.guard is not None and self.guard.atoms() & depends
            ):
                raise InnerDependent(f"{name} inside another reduction")
            position = ix.flatten([ix.of(a) for a in self.inner], [a.extent for a in self.inner])
            for d, e in zip(dims, ix.unflatten(position, [shape[d] for d in dims]), strict=True):
                outer[d] = e
        x = self.value(source, tuple(outer))

        def fold(kind: str, value: Value) -> Value:
            if count == 1:
                return value
            return pool.make("reduce", [value], dtype=value.dtype, const=kind, name=node.name)

        if name in ("amax", "amin", "max", "min"):
            return fold("max" if "max" in name else "min", x)
        if name in ("any", "all"):
            flag = pool.cast(scalar(pool, x, torch.bool), torch.int32)
            folded = fold("max" if name == "any" else "min", flag)
            return pool.make("ne", [folded, pool.const(0, torch.int32)], dtype=torch.bool)
        x = scalar(pool, x, dtype)
        if name == "sum":
            return fold("sum", x)
        if dtype not in FLOATS:
            raise Unsupported(f"{name} on {dtype}")

        def over(total: Value, n: float) -> Value:
            return pool.make("div", [total, pool.const(n, dtype)], dtype=total.dtype, name=node.name)

        mean = over(fold("sum", x), count)
        if name == "mean":
            return mean
        if name == "var":
            correction = node.kwargs.get("correction", node.args[2] if len(node.args) > 2 else 1)
            away = pool.make("sub", [x, mean], dtype=x.dtype, name="centred")
            square = pool.make("mul", [away, away], dtype=x.dtype, name="squared")
            left = count - float(1 if correction is None else correction)  # type: ignore[arg-type]
            return over(fold("sum", square), max(left, 0.0))
        raise Unsupported(f"the reduction {name}")

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
        source, _, dims = node.args
        assert isinstance(source, fx.Node) and isinstance(dims, list | tuple)
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
