"""Op classes by canonical name, and small questions about nodes that several families ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, fx

from autokernel.capture.nodes import fake_value, op_name, storages

CASTS = frozenset({"float", "half", "bfloat16", "double", "to", "type_as"})
MOVEMENT = frozenset(
    {
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "expand",
        "expand_as",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "getitem",
        "split",
        "chunk",
        "t",
        "repeat_interleave",
        "view_as",
        "narrow",
        "select",
        "movedim",
        "unbind",
        "clone",
    }
)
ACTIVATIONS = frozenset(
    {
        "gelu",
        "relu",
        "silu",
        "sigmoid",
        "tanh",
        "mish",
        "softplus",
        "hardswish",
        "hardsigmoid",
        "relu6",
        "elu",
        "leaky_relu",
        "hardtanh",
        "selu",
        "celu",
        "swish",
        "logsigmoid",
        "erf",
    }
)
POINTWISE = (
    frozenset(
        {
            "add",
            "sub",
            "mul",
            "div",
            "neg",
            "abs",
            "exp",
            "exp2",
            "log",
            "log2",
            "log1p",
            "expm1",
            "sqrt",
            "rsqrt",
            "pow",
            "square",
            "reciprocal",
            "sin",
            "cos",
            "tan",
            "maximum",
            "minimum",
            "clamp",
            "clamp_min",
            "clamp_max",
            "where",
            "masked_fill",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "and_",
            "or_",
            "xor",
            "invert",
            "logical_and",
            "logical_or",
            "sign",
            "floor",
            "ceil",
            "round",
            "trunc",
            "addcmul",
            "addcdiv",
            "lerp",
            "rsub",
            "floordiv",
            "remainder",
            "fmod",
            "erfc",
            "atan2",
            "isnan",
            "isfinite",
            "isinf",
            "ones_like",
            "zeros_like",
            "full_like",
            "view_as_complex",
            "view_as_real",
            "cat",
            "stack",
            "rotate_half",
        }
    )
    | ACTIVATIONS
    | CASTS
)
REDUCTIONS = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "var",
        "std",
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "norm",
        "prod",
        "argmax",
        "argmin",
        "max",
        "min",
        "any",
        "all",
        "cumsum",
        "logsumexp",
        "normalize",
    }
)
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


def is_parameter_linear(node: fx.Node, static: set[fx.Node]) -> bool:
    """``linear(x, weight, bias)`` whose weight and bias are the model's own and whose input is not."""
    if node.op != "call_function" or op_name(node) != "linear":
        return False
    x, *rest = node.all_input_nodes
    return x not in static and bool(rest) and all(r in static for r in rest)


def topological(graph_nodes: Iterable[fx.Node], chosen: set[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(n for n in graph_nodes if n in chosen)
