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
from .lower import base_name, dtype_of, shape_of
from .ops import POINTWISE, SPECIAL, pointwise, scalar
from .views import Index, Pair, Views

SAME = {
    "clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous", "copy", "view_of", "_conj_physical",
    "resolve_conj", "clone_preserve_strides",
}  # fmt: skip
REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "max", "min", "any", "all", "logsumexp"}


class InnerDependent(Unsupported):
    """A reduction would have to run once per inner element: the loop nest was chosen wrongly."""


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


class Builder(Views):
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
