"""Print FX nodes as readable PyTorch code: references and rewrites are written from graphs with this."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
_NN = torch._C._nn  # type: ignore[attr-defined]
_PREFIX = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}


class UnprintableNode(ValueError):
    """A node that has no source form (a wrapped function, a call of a submodule, ...)."""


def statement(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """``name = expression`` for one call node; ``names`` maps nodes to variable names."""
    return f"{names[node]} = {expression(node, names)}"


def statements(nodes: Iterable[fx.Node], names: Mapping[fx.Node, str]) -> list[str]:
    return [statement(n, names) for n in nodes]


def expression(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "call_method":
        receiver, *args = node.args
        return f"{_value(receiver, names)}.{node.target}({_arguments(args, node.kwargs, names)})"
    if node.op != "call_function":
        raise UnprintableNode(f"{node.op} {node.target}")
    target = node.target
    if target in _INFIX and len(node.args) == 2 and not node.kwargs:
        left, right = (_operand(a, names) for a in node.args)
        return f"{left} {_INFIX[target]} {right}"
    if target in _PREFIX and len(node.args) == 1:
        return f"{_PREFIX[target]}{_value(node.args[0], names)}"
    if target is operator.getitem:
        return f"{_value(node.args[0], names)}[{_index(node.args[1], names)}]"
    if target is getattr:
        return f"{_value(node.args[0], names)}.{node.args[1]}"
    return f"{function_name(target)}({_arguments(node.args, node.kwargs, names)})"


def function_name(target: Any) -> str:
    """The public spelling of a function: ``F.linear``, ``torch.rsqrt``; never ``torch._C._nn``."""
    name = getattr(target, "__name__", "")
    if getattr(torch.nn.functional, name, None) is target:
        return f"F.{name}"
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    public = getattr(torch.nn.functional, name, None)
    if public is not None and getattr(_NN, name, None) is target:
        return f"F.{name}"
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{target!s}"
    for module in ("special", "linalg", "fft"):
        if getattr(getattr(torch, module), name, None) is target:
            return f"torch.{module}.{name}"
    raise UnprintableNode(f"{getattr(target, '__module__', '?')}.{name or target}")


def _arguments(args: Iterable[Any], kwargs: Mapping[str, Any], names: Mapping[fx.Node, str]) -> str:
    positional = list(args)
    while positional and positional[-1] is None:
        positional.pop()
    parts = [_value(a, names) for a in positional]
    parts += [f"{k}={_value(v, names)}" for k, v in kwargs.items() if v is not None]
    return ", ".join(parts)


def _value(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, bool | int | str | type(None) | type(Ellipsis)):
        return "..." if value is Ellipsis else repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value.type}")'
    if isinstance(value, slice):
        return (
            f"slice({_value(value.start, names)}, {_value(value.stop, names)}, {_value(value.step, names)})"
        )
    if isinstance(value, torch.Size):
        value = tuple(value)
    if isinstance(value, tuple):
        inner = ", ".join(_value(v, names) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v, names) for v in value) + "]"
    raise UnprintableNode(f"a literal of type {type(value).__name__}")


def _operand(value: Any, names: Mapping[fx.Node, str]) -> str:
    """A value beside an operator: a negative literal needs parentheses (``(-2) ** x``)."""
    text = _value(value, names)
    return f"({text})" if isinstance(value, int | float) and text.startswith("-") else text


def _index(index: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(index, tuple) and index:
        inner = ", ".join(_index(i, names) for i in index)
        return inner + "," if len(index) == 1 else inner
    if isinstance(index, slice):
        parts = ["" if p is None else _value(p, names) for p in (index.start, index.stop)]
        text = ":".join(parts)
        return text if index.step is None else f"{text}:{_value(index.step, names)}"
    return _value(index, names)


def variable_names(nodes: Iterable[fx.Node], taken: Iterable[str] = ()) -> dict[fx.Node, str]:
    """Readable, unique Python names: what Dynamo took from the user's code, without number tails."""
    used = set(taken)
    result: dict[fx.Node, str] = {}
    for node in nodes:
        stem = node.name.strip("_") or "value"
        if not stem.isidentifier() or keyword.iskeyword(stem) or stem in ("torch", "F", "math", "operator"):
            stem = f"{stem}_value" if stem.isidentifier() else "value"
        name = stem
        count = 1
        while name in used:
            name = f"{stem}_{count}"
            count += 1
        used.add(name)
        result[node] = name
    return result
