"""Print FX nodes as plain PyTorch code: what a kernel file does with the ops it has no kernel for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .ir import Unsupported

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.matmul: "@",
    operator.floordiv: "//", operator.mod: "%", operator.pow: "**", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    operator.eq: "==", operator.ne: "!=",
}  # fmt: skip
_PREFIX = {operator.neg: "-", operator.invert: "~"}
_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior, operator.ifloordiv,
}  # fmt: skip
VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten", "split", "chunk",
    "getitem", "select", "narrow", "t", "unbind", "view_as", "movedim", "swapaxes", "split_with_sizes", "mT", "detach",
    "view_as_real", "view_as_complex", "swapdims", "tensor_split", "diagonal",
}  # fmt: skip


def op_name(node: fx.Node) -> str:
    """The bare name of what a torch-level node calls."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def function_text(fn: Callable) -> str:
    """How generated code spells a function; raises `Unsupported` when it has no importable name."""
    name = getattr(fn, "__name__", "")
    spaces: list[tuple[Any, str]] = [
        (torch, "torch"), (torch.nn.functional, "torch.nn.functional"), (vars(torch._C)["_nn"], "torch._C._nn"),
        (torch.special, "torch.special"), (torch.linalg, "torch.linalg"), (torch.fft, "torch.fft"),
        (operator, "operator"), (torch.Tensor, "torch.Tensor"),
    ]  # fmt: skip
    if isinstance(fn, torch._ops.OpOverload):
        return f"torch.ops.{fn}"
    for space, text in spaces:
        if getattr(space, name, None) is fn:
            return f"{text}.{name}"
    raise Unsupported(f"a call of {fn}")


def literal(value: Any, name: Callable[[fx.Node], str], device: str) -> str:
    """An argument as source text; devices become ``device``, the expression of the first input's device."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, slice):
        return f"slice({', '.join(literal(v, name, device) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, torch.Size | tuple):
        inner = ", ".join(literal(v, name, device) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(literal(v, name, device) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {literal(v, name, device)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.memory_format | torch.layout
    ):
        return repr(value)
    if value is Ellipsis:
        return "..."
    raise Unsupported(f"an argument of type {type(value).__name__}")


def _subscript(value: Any, name: Callable[[fx.Node], str], device: str) -> str:
    if isinstance(value, slice):
        parts = ["" if v is None else literal(v, name, device) for v in (value.start, value.stop, value.step)]
        return ":".join(parts if parts[2] else parts[:2])
    if isinstance(value, tuple):
        inner = ", ".join(_subscript(v, name, device) for v in value)
        return f"{inner}," if len(value) == 1 else inner
    return literal(value, name, device)


def expression(node: fx.Node, name: Callable[[fx.Node], str], device: str) -> str:
    """The right-hand side for ``node``; raises `Unsupported`."""
    args = [literal(a, name, device) for a in node.args]
    kwargs = [f"{k}={literal(v, name, device)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join([*args[1:], *kwargs])})"
    if node.op != "call_function":
        raise Unsupported(f"a {node.op} node")
    target: Any = node.target
    if target is operator.getitem:
        return f"{args[0]}[{_subscript(node.args[1], name, device)}]"
    if target in _INFIX and not kwargs:
        return f"{args[0]} {_INFIX[target]} {args[1]}"
    if target in _PREFIX:
        return f"{_PREFIX[target]}{args[0]}"
    if target is getattr and len(node.args) == 2:
        return f"{args[0]}.{node.args[1]}"
    return f"{function_text(target)}({', '.join([*args, *kwargs])})"


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node modifies one of its arguments (``add_``, ``relu(inplace=True)``, ``x[i] = y``)."""
    name = op_name(node)
    if node.target in _IN_PLACE or node.target is operator.setitem or node.kwargs.get("out") is not None:
        return True
    return bool(node.kwargs.get("inplace")) or (
        name.endswith("_") and not name.startswith("_") and not name.endswith("__")
    )


def may_write_inputs(nodes: Sequence[fx.Node]) -> bool:
    """Whether running the nodes as they are could change a tensor that they did not make themselves."""
    for node in nodes:
        if node.op.startswith("call") and writes_in_place(node):
            base = node.args[0]
            while (
                isinstance(base, fx.Node)
                and base.op.startswith("call")
                and (
                    op_name(base) in VIEWS
                    or writes_in_place(base)
                    or op_name(base) in ("contiguous", "to", "float", "type_as")
                )
            ):
                base = base.args[0]
            if not isinstance(base, fx.Node) or not base.op.startswith("call"):
                return True
    return False
