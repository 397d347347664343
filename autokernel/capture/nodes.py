"""What a node of a captured graph is: its op by one name, its value's form, and which memory it writes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def fake_value(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that Dynamo recorded for ``node``; None where there is none."""
    return node.meta.get("example_value")


def module_path(node: fx.Node) -> str:
    """``h.0.attn`` for a node that this module's forward made; empty at the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    raw = str(list(stack.values())[-1][0])
    text = re.sub(r"\[['\"]?|['\"]?\]", ".", raw.replace("L['self']", "").replace("._modules", ""))
    return ".".join(part for part in text.split(".") if part)


def is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(fake_value(node), Tensor)


def record_value(node: fx.Node) -> None:
    """Say anew what fake tensor ``node`` gives, from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), fake_value)  # type: ignore[misc]
    mode = getattr(args[0], "fake_mode", None) or contextlib.nullcontext()
    with mode, torch.no_grad():
        if node.op == "call_method":
            node.meta["example_value"] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.meta["example_value"] = node.target(*args, **kwargs)  # type: ignore[operator]


def symbolic(node: fx.Node) -> bool:
    """Whether a size of the node's value, or the value itself, is a symbol."""
    value = fake_value(node)
    if isinstance(value, Tensor):
        return any(isinstance(s, torch.SymInt) for s in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def op_name(node: fx.Node) -> str:
    """The op's name without its home: ``torch.mul``, ``operator.mul`` and ``Tensor.mul`` are all ``mul``.

    The spelling of some names differs between torch versions and between functions and operators; what
    means the same gets the same name here, so that a fingerprint outlives an upgrade.
    """
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", str(node.target))
    else:
        return node.op
    return _SAME_OP.get(name, name)


_SAME_OP = {
    "truediv": "div",
    "true_divide": "div",
    "__and__": "and_",
    "__or__": "or_",
    "__invert__": "invert",
    "bitwise_not": "invert",
    "logical_not": "invert_bool",
    "invert": "invert",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__add__": "add",
    "__mul__": "mul",
    "__sub__": "sub",
    "__matmul__": "matmul",
    "_softmax": "softmax",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "negative": "neg",
    "scaled_dot_product_attention": "scaled_dot_product_attention",
    "type": "to",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}


def target_name(node: fx.Node) -> str:
    """What the node calls, as it is spelled there; see `op_name` for the op that is meant."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def storages(node: fx.Node) -> set[int]:
    """Identities of the storages behind a node's value (fake tensors share storage exactly as real ones)."""
    found: set[int] = set()
    for value in _tensors(fake_value(node)):
        try:
            found.add(value.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse or wrapper tensors have none
            continue
    return found


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is no plain memory, so that no kernel can take it or give it.

    That is a value inside ``vmap`` and the like, and what `is_plain` says no to.
    """
    values = _tensors(fake_value(node))
    return any(is_functorch_wrapped_tensor(value) or not is_plain(value) for value in values)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is numbers at an address: no wrapper around others (quantized weights of torchao,
    nested and distributed tensors), not sparse, not of a quantized dtype."""
    wrapped = is_traceable_wrapper_subclass(tensor)
    return not (wrapped or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested)


def arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """The call's arguments by name; ``names`` are those of the positional ones, in order."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def writes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that ``node`` writes in place."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = target_name(node)
    inplace_name = (
        name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")
    )
    inplace_operator = name.startswith("i") and name in _INPLACE_OPERATORS
    if inplace_name or inplace_operator or name == "setitem" or node.kwargs.get("inplace") is True:
        return _nodes(node.args[0] if node.args else node.kwargs.get("input"))
    if name == "batch_norm":
        return _running_statistics(node)
    if _positional_inplace(node, name):
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    return _nodes(node.kwargs.get("out")) + _declared_writes(node)


def _nodes(value: Any) -> list[fx.Node]:
    """The node, or those of a list (what ``_foreach_add_`` writes)."""
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, fx.Node)]


def _declared_writes(node: fx.Node) -> list[fx.Node]:
    """What an op of ``torch.ops`` (a custom one) says that it mutates."""
    target = node.target
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    found: dict[fx.Node, None] = {}
    for overload in overloads:
        for i, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
                found.update(dict.fromkeys(_nodes(given)))
    return list(found)


_INPLACE_OPERATORS = frozenset(
    {
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "imatmul",
        "ilshift",
        "irshift",
    }
)
_INPLACE_POSITION = {
    "relu": 1,
    "silu": 1,
    "mish": 1,
    "hardswish": 1,
    "relu6": 1,
    "hardsigmoid": 1,
    "selu": 1,
    "celu": 2,
    "elu": 2,
    "leaky_relu": 2,
    "hardtanh": 3,
    "dropout": 3,
    "rrelu": 4,
    "threshold": 3,
    "alpha_dropout": 3,
}


def _positional_inplace(node: fx.Node, name: str) -> bool:
    position = _INPLACE_POSITION.get(name)
    if position is None or node.op != "call_function":
        return False
    return len(node.args) > position and node.args[position] is True


BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _running_statistics(node: fx.Node) -> list[fx.Node]:
    """What a batch norm in training updates."""
    given = arguments(node, BATCH_NORM)
    if given.get("training", False) is False:
        return []
    return [a for a in (given.get("running_mean"), given.get("running_var")) if isinstance(a, fx.Node)]


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        for target in writes(node):
            found |= storages(target)
    return found
