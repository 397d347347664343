"""Capture a model as torch-level FX graphs with Dynamo.

Dynamo hands a backend one graph per piece of the model between graph breaks.  Nodes still read
``linear``, ``layer_norm`` or ``softmax``, parameters and buffers are placeholders, and every node carries
a fake tensor in ``meta["example_value"]``.  Extraction (`capture`) and reinsertion
(`autokernel.integrate.dynamo_backend`) wrap what they get in the same `Graph`, so both see the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autokernel.records import Role


def fake_value(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that Dynamo recorded for ``node``; None where there is none."""
    return node.meta.get("example_value")


def is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(fake_value(node), Tensor)


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


@dataclass(eq=False)
class Graph:
    """One Dynamo graph with what the rest of autokernel asks about it.

    ``example_inputs`` are the real values that Dynamo called the backend with, one per placeholder: live
    parameters and buffers, and the activations of the captured call.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    index: int = 0
    roles: dict[fx.Node, Role] = field(default_factory=dict)
    dynamic: bool = False

    def __post_init__(self) -> None:
        for node, value in zip(self.placeholders, self.example_inputs, strict=True):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
                isinstance(value, Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape)
            ):
                self.dynamic = True
            self.roles[node] = _role(node, value)
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":  # a tensor that Dynamo baked into the graph
                self.roles[node] = "constant"

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.gm.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.gm.graph.nodes if n.op == "placeholder"]

    def value_of(self, node: fx.Node) -> Any:
        """The real value of a placeholder or of a tensor that was baked into the graph."""
        if node.op == "get_attr":
            return _attribute(self.gm, str(node.target))
        return self.example_inputs[self.placeholders.index(node)]

    def static_nodes(self) -> set[fx.Node]:
        """Nodes whose value depends on parameters, buffers and literals only, never on an activation.

        Random ops, in-place writes and anything with side effects are left out.
        """
        written = written_storages(self.gm.graph.nodes)
        static: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            if node in self.roles:
                if self.roles[node] != "activation" and not storages(node) & written:
                    static.add(node)
            elif (
                node.op in ("call_function", "call_method")
                and op_name(node) not in _IMPURE
                and all(arg in static for arg in node.all_input_nodes)
                and not storages(node) & written
            ):
                static.add(node)
        return static


_IMPURE = frozenset(
    {
        "dropout",
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "bernoulli",
        "multinomial",
        "normal",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "_assert",
        "_assert_async",
        "_enter_autocast",
        "_exit_autocast",
        "_set_grad_enabled",
        "manual_seed",
        "item",
    }
)


def _role(node: fx.Node, value: Any) -> Role:
    if isinstance(value, nn.Parameter):
        return "parameter"
    kind = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return "buffer" if kind else "activation"


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


# --- aliasing -------------------------------------------------------------------------------------------


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


def writes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that ``node`` writes in place."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inplace_name = (
        name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")
    )
    inplace_operator = name.startswith("i") and name in _INPLACE_OPERATORS
    if inplace_name or inplace_operator or name == "setitem" or node.kwargs.get("inplace") is True:
        target = node.args[0] if node.args else node.kwargs.get("input")
        return [target] if isinstance(target, fx.Node) else []
    if _positional_inplace(node, name):
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    out = node.kwargs.get("out")
    return [out] if isinstance(out, fx.Node) else []


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


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        for target in writes(node):
            found |= storages(target)
    return found


# --- capture --------------------------------------------------------------------------------------------


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Graph]:
    """Run ``model(*args, **kwargs)`` once under Dynamo and return its graphs in the order they ran.

    Shapes are captured static.  The model is left as it was; Dynamo's caches are reset before and after.
    """
    graphs: list[Graph] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(Graph(gm, list(example_inputs), index=len(graphs)))
        return gm.forward

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=backend, dynamic=False)(*args, **(kwargs or {}))
    finally:
        torch._dynamo.reset()
    return graphs
