"""Op classes by canonical name, and small questions about nodes that several families ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, fx

from autokernel.capture.nodes import arguments, fake_value, op_name, storages

CASTS = frozenset({
    "float", "half", "bfloat16", "double", "to", "type_as", "int", "long", "bool", "short", "char",
    "byte",
})  # fmt: skip
MOVEMENT = frozenset({
    "view", "reshape", "transpose", "permute", "contiguous", "expand", "expand_as", "unsqueeze",
    "squeeze", "flatten", "unflatten", "getitem", "split", "chunk", "t", "repeat_interleave", "view_as",
    "narrow", "select", "movedim", "unbind", "clone", "repeat", "tile", "broadcast_to", "roll", "flip",
    "pad", "reshape_as", "tensor_split", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
})  # fmt: skip
ACTIVATIONS = frozenset({
    "gelu", "relu", "silu", "sigmoid", "tanh", "mish", "softplus", "hardswish", "hardsigmoid", "relu6",
    "elu", "leaky_relu", "hardtanh", "selu", "celu", "swish", "logsigmoid", "erf", "softsign",
    "tanhshrink", "hardshrink", "softshrink", "threshold",
})  # fmt: skip
POINTWISE = frozenset({
    "add", "sub", "mul", "div", "neg", "abs", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1",
    "sqrt", "rsqrt", "pow", "square", "reciprocal", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos",
    "atan", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "clip", "where", "masked_fill",
    "nan_to_num", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert", "invert_bool",
    "logical_and", "logical_or", "logical_xor", "sign", "floor", "ceil", "round", "trunc", "frac",
    "addcmul", "addcdiv", "lerp", "rsub", "floordiv", "floor_divide", "mod", "remainder", "fmod",
    "erfc", "atan2", "logaddexp", "isnan", "isfinite", "isinf", "ones_like", "zeros_like", "full_like",
    "view_as_complex", "view_as_real", "polar", "cat", "stack", "rotate_half", "prelu", "glu", "tril",
    "triu",
}) | ACTIVATIONS | CASTS  # fmt: skip
GATHERS = frozenset(
    {"gather", "index_select", "take_along_dim", "interpolate", "upsample", "unfold", "one_hot"}
)
"""What reads other elements of its input than its own, each as it stands: look-ups and resampling."""
POOLS = frozenset(
    f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg", "lp") for n in (1, 2, 3)
)
REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "var", "std", "softmax", "log_softmax", "layer_norm", "rms_norm",
    "norm", "vector_norm", "prod", "argmax", "argmin", "max", "min", "any", "all", "cumsum", "cumprod",
    "logsumexp", "normalize", "cosine_similarity", "topk", "sort", "argsort", "softmin",
    "local_response_norm",
}) | POOLS  # fmt: skip
MATMULS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
SCALING = frozenset({"mul", "div"})


def shape(node: fx.Node) -> tuple[int, ...]:
    value = fake_value(node)
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def tensor_args(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


def absorb_producers(nodes: set[fx.Node], allowed: Callable[[fx.Node], bool], static: set[fx.Node]) -> None:
    """Grow ``nodes`` backwards, in place, by producers that nothing else reads."""
    work = list(nodes)
    while work:
        for arg in work.pop().all_input_nodes:
            if arg in nodes or arg in static or arg.op not in ("call_function", "call_method"):
                continue
            if allowed(arg) and all(u in nodes for u in arg.users):
                nodes.add(arg)
                work.append(arg)


def absorb_users(nodes: set[fx.Node], allowed: Callable[[fx.Node], bool], static: set[fx.Node]) -> None:
    """Grow ``nodes`` forwards, in place, by users that need nothing but ``nodes`` and static values."""
    grew = True
    while grew:
        grew = False
        for node in list(nodes):
            for user in node.users:
                if user in nodes or user.op not in ("call_function", "call_method") or not allowed(user):
                    continue
                if all(a in nodes or a in static for a in user.all_input_nodes):
                    nodes.add(user)
                    grew = True


def is_movement(node: fx.Node) -> bool:
    return op_name(node) in MOVEMENT


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its input's memory in another way, and so costs nothing to compute."""
    made = storages(node)
    return is_movement(node) and bool(made) and made <= {s for a in node.all_input_nodes for s in storages(a)}


def is_scalar_scaling(node: fx.Node) -> bool:
    """``x * 0.125`` or ``x / 8``."""
    return op_name(node) in SCALING and len(node.all_input_nodes) == 1


_LINEAR_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
}
_FLAT_LINEARS = frozenset({"addmm", "mm"})  # take matrices only: models flatten in front and unflatten behind


def linear_input(node: fx.Node, static: set[fx.Node]) -> fx.Node | None:
    """The input x of a linear map whose weight (and bias) are the model's own; None if ``node`` is none.

    All spellings count: ``linear``, a matrix product, ``einsum`` or ``tensordot`` with one static operand,
    and ``addmm`` and ``baddbmm`` that add a static bias.
    """
    name = op_name(node)
    if node.op not in ("call_function", "call_method"):
        return None
    if name in _LINEAR_ARGUMENTS:
        given = arguments(node, _LINEAR_ARGUMENTS[name])
        x = given.get("input" if name == "linear" else _LINEAR_ARGUMENTS[name][1])
        own = [a for a in node.all_input_nodes if a is not x]
    elif name in MATMULS or name in ("mm", "tensordot"):
        moving = [a for a in node.all_input_nodes if a not in static]
        own = [a for a in node.all_input_nodes if a in static]
        x = moving[0] if len(moving) == 1 else None
        if len(own) != 1:
            return None
    else:
        return None
    known = isinstance(x, fx.Node) and x not in static and bool(own) and all(a in static for a in own)
    return x if known else None


def is_parameter_linear(node: fx.Node, static: set[fx.Node]) -> bool:
    """Whether ``node`` is a linear map by the model's own weight; see `linear_input`."""
    return linear_input(node, static) is not None


def whole_linear(linear: fx.Node, static: set[fx.Node], free: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """``linear`` with what its spelling puts around it.

    Where it takes matrices only that is ``x.view(-1, k)`` in front and ``view(..., n)`` behind it; where it
    has no bias of its own, the add of one.
    """
    nodes, last = {linear}, linear
    if op_name(linear) == "linear":
        return nodes

    def reshapes(node: fx.Node) -> bool:
        return (
            free(node) and node not in static and op_name(node) in ("view", "reshape", "flatten", "unflatten")
        )

    if op_name(linear) in _FLAT_LINEARS:
        nodes |= {a for a in linear.all_input_nodes if reshapes(a) and len(a.users) == 1}
        (user, *more) = [*linear.users, None]
        if user is not None and more == [None] and reshapes(user) and shape(user)[-1:] == shape(linear)[-1:]:
            nodes.add(user)
            last = user
    (user, *more) = [*last.users, None]
    if user is not None and more == [None] and op_name(user) == "add" and free(user):
        others = [a for a in user.all_input_nodes if a is not last]
        if len(others) == 1 and others[0] in static and shape(user) == shape(last):
            nodes.add(user)
    return nodes


def topological(graph_nodes: Iterable[fx.Node], chosen: set[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(n for n in graph_nodes if n in chosen)
