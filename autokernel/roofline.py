"""The least work that a region needs, counted from its FX graph, and the time that this takes at best.

Everything here is a pure function of node metadata (``meta["example_value"]``), so it runs without a
device.  Counting is deliberately low, since the result serves as a floor that an honest kernel can't beat:

- FLOPs are those of contractions (linear, matmul, convolution, attention), two per multiply-add.
  Pointwise and reduction work is left out: it hides behind the bytes and a rewrite may remove it.
- Bytes are inputs read once plus outputs written once.  Views cost nothing, of a sliced input only the
  used part counts, an embedding table counts the rows that are looked up, and a tensor whose content is
  a constant of the task (a causal mask) counts nothing, as a kernel may know it.
- ``kept`` scales attention: the share of scores that a mask leaves (about one half for a causal mask).

What a floor does not cover: data that is still in a cache from the op before.  On a CPU, where caches
are large and clocks vary, it is a guide and not a law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, fx

    from .hardware import Ceilings

_VIEWS = frozenset(
    {
        "view", "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze", "flatten", "unflatten",
        "getitem", "split", "chunk", "t", "view_as", "narrow", "select", "movedim", "moveaxis", "unbind",
        "detach", "swapaxes", "swapdims", "view_as_real", "view_as_complex", "reshape", "diagonal",
        "tensor_split",
    }
)  # fmt: skip
_PRODUCTS = frozenset(
    {"matmul", "bmm", "mm", "mv", "dot", "baddbmm", "addmm", "addbmm", "einsum", "__matmul__"}
)
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})


def flops_by_dtype(gm: fx.GraphModule, *, kept: float = 1.0) -> dict[str, float]:
    """Contraction FLOPs of a subgraph by the dtype that they multiply in."""
    totals: dict[str, float] = {}
    for node in gm.graph.nodes:
        count = _contraction(node, kept)
        if count:
            dtype = _dtype(_operands(node)[0])
            totals[dtype] = totals.get(dtype, 0.0) + count * _used_fraction(node)
    return totals


def flops_of(gm: fx.GraphModule, *, kept: float = 1.0) -> float:
    """Contraction FLOPs of a subgraph; ``kept`` is the share of attention scores that masks leave."""
    return sum(flops_by_dtype(gm, kept=kept).values())


def bytes_of(gm: fx.GraphModule, roles: Sequence[str] | None = None) -> float:
    """Least bytes moved: inputs once and outputs once.

    ``roles`` goes with the placeholders; those whose role is ``constant`` are not counted.
    """
    total = 0.0
    seen: set[int] = set()
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, role in zip(placeholders, roles or ["activation"] * len(placeholders), strict=True):
        for value in _tensors(node):
            seen.add(_storage(value))
            if role != "constant":
                total += min(_used_elements(node), _distinct(value)) * value.element_size()
    for node in gm.graph.nodes:
        if node.op != "output":
            continue
        for result in node.all_input_nodes:
            for value in _tensors(result):
                if _storage(value) not in seen:
                    seen.add(_storage(value))
                    total += _distinct(value) * value.element_size()
    return total


def roofline_us(
    flops: float | Mapping[str, float],
    bytes_moved: float,
    dtype: str,
    ceilings: Ceilings,
    *,
    allow_tf32: bool = False,
) -> float | None:
    """Least time in microseconds: the longer of moving ``bytes_moved`` and computing ``flops``.

    ``flops`` is a number, taken to be in ``dtype``, or a mapping from dtype to number.  ``None`` when the
    bandwidth was not measured; a dtype without a measured rate adds nothing.
    """
    if ceilings.copy_bytes_per_s is None:
        return None
    parts = flops if isinstance(flops, Mapping) else {dtype: flops}
    compute = 0.0
    for name, count in parts.items():
        name = {"complex64": "float32", "complex128": "float64"}.get(name, name)
        rate = ceilings.flops_per_s.get("tf32" if allow_tf32 and name == "float32" else name)
        if rate:
            compute += count / rate
    return max(compute, bytes_moved / ceilings.copy_bytes_per_s) * 1e6


def head_room(time_us: float | None, floor_us: float | None) -> float | None:
    """How many times faster something could get before it meets its floor; at least 1."""
    if not time_us or not floor_us:
        return None
    return max(1.0, time_us / floor_us)


def amdahl_bound(share: float | None, room: float | None) -> float | None:
    """Speed-up of the whole when a part with ``share`` of its time becomes ``room`` times faster."""
    if share is None or room is None:
        return None
    rest = 1.0 - share * (1.0 - 1.0 / room)
    return 1.0 / rest if rest > 0 else None


def intensity(flops: float, bytes_moved: float) -> float | None:
    """FLOPs per byte."""
    return flops / bytes_moved if bytes_moved else None


# --- one node ---------------------------------------------------------------------------------------------


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _contraction(node: fx.Node, kept: float) -> float:
    """FLOPs of one node, 0 when it is no contraction."""
    name = _name(node)
    if name == "linear":
        x, weight = (_shape(n) for n in _operands(node)[:2])
        return 2.0 * _product(x) * _product(weight[:-1])
    if name in _PRODUCTS:
        return kept * _product_flops(node, name)
    if name == "scaled_dot_product_attention":
        return _attention_flops(node, kept)
    if name in _CONVOLUTIONS:
        weight = _shape(_operands(node)[1])  # (out, in / groups, kernel...)
        return 2.0 * _product(_shape(node)) * _product(weight[1:])
    if name in _TRANSPOSED:
        x, weight = (_shape(n) for n in _operands(node)[:2])  # weight (in, out / groups, kernel...)
        return 2.0 * _product(x) * _product(weight[1:])
    return 0.0


def _product_flops(node: fx.Node, name: str) -> float:
    operands = _operands(node)
    if name == "einsum":
        return _einsum_flops(node, operands)
    if name in ("baddbmm", "addmm", "addbmm"):
        operands = operands[1:]
    left, right = (_shape(n) for n in operands[:2])
    if not left or not right:
        return 0.0
    output = _product(_shape(node)) * (left[0] if name == "addbmm" else 1)
    return 2.0 * output * left[-1]


def _einsum_flops(node: fx.Node, operands: list[fx.Node]) -> float:
    """Two operands: twice the product of all distinct index sizes.  Others are not counted."""
    equation = next((a for a in node.args if isinstance(a, str)), None)
    if equation is None or len(operands) != 2 or "..." in equation:
        return 0.0
    sizes: dict[str, int] = {}
    for letters, operand in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=True):
        sizes.update(zip(letters, _shape(operand), strict=True))
    return 2.0 * _product(tuple(sizes.values()))


def _attention_flops(node: fx.Node, kept: float) -> float:
    """QKᵀ and PV.  ``is_causal`` leaves the lower triangle of the scores."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    query, key, value = (_shape(arguments[n]) for n in ("query", "key", "value"))
    scores = _product(query[:-1]) * key[-2]
    if arguments.get("is_causal") is True:
        kept = min(kept, causal_share(query[-2], key[-2]))
    return 2.0 * scores * (query[-1] + value[-1]) * kept


def causal_share(queries: int, keys: int) -> float:
    """Share of a (queries, keys) score matrix on or below its main diagonal."""
    rows = min(queries, keys)
    below = rows * (rows + 1) // 2 + (queries - rows) * keys
    return below / (queries * keys)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments in the order of the op's signature."""
    found = [n for n in node.all_input_nodes if any(True for _ in _tensors(n))]
    if node.kwargs and not node.args:
        order = (
            "input",
            "weight",
            "mat1",
            "mat2",
            "batch1",
            "batch2",
            "query",
            "key",
            "value",
            "other",
            "bias",
        )
        named = [node.kwargs[k] for k in order if k in node.kwargs]
        return [n for n in named if n in found] or found  # type: ignore[misc]
    if len(node.args) >= 2 and node.args[0] is node.args[1]:
        return [found[0], *found]  # x @ x: all_input_nodes lists it once
    return found


def _used_fraction(node: fx.Node) -> float:
    """Share of a contraction's result that anything reads (``linear(x)[:, -1]`` needs one row)."""
    size = _product(_shape(node))
    return min(1.0, _used_elements(node) / size) if size else 1.0


def _used_elements(node: fx.Node) -> float:
    """Upper bound on the elements of ``node`` that are read, looking through views and look-ups."""
    whole = float(sum(_distinct(v) for v in _tensors(node)))
    total = 0.0
    for user in node.users:
        name = _name(user)
        if name == "embedding" and len(user.all_input_nodes) == 2 and user.all_input_nodes[1] is node:
            total += _looked_up(user)
        elif name in _VIEWS and user.all_input_nodes[0] is node and user.op != "output":
            total += _used_elements(user)
        else:
            return whole
        if total >= whole:
            return whole
    return min(total, whole)


def _looked_up(node: fx.Node) -> float:
    """Table elements that an embedding reads: the expected number of distinct rows for random indices."""
    indices, table = (_shape(n) for n in node.all_input_nodes)
    rows = table[0]
    distinct = rows * (1.0 - (1.0 - 1.0 / rows) ** _product(indices))
    return distinct * _product(table[1:])


# --- values -----------------------------------------------------------------------------------------------


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    yield from _flat(node.meta.get("example_value"))


def _flat(value: Any) -> Iterator[Tensor]:
    from torch import Tensor

    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)


def _shape(node: Any) -> tuple[int, ...]:
    value = next(_tensors(node), None)
    return tuple(value.shape) if value is not None else ()


def _dtype(node: fx.Node) -> str:
    return str(next(_tensors(node)).dtype).removeprefix("torch.")


def _distinct(value: Tensor) -> int:
    """Elements that lie in memory: an expanded dimension counts once."""
    return _product(tuple(s for s, stride in zip(value.shape, value.stride(), strict=True) if stride != 0))


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= int(size)
    return result
