"""Lower a torch-level FX graph to the few dozen aten and prims ops that `build` understands.

Tracing runs on fake CPU tensors whatever the device of the graph, so it works without a GPU, and goes
through PyTorch's own decompositions: layer norm, softmax, GELU and the like arrive as pointwise ops and
reductions with their casts written out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .ir import Unsupported

_ALSO_DECOMPOSE = (
    "native_layer_norm", "_softmax", "_log_softmax", "gelu", "silu", "native_group_norm", "elu", "leaky_relu",
    "hardtanh", "hardswish", "hardsigmoid", "softplus", "mish", "glu", "log_sigmoid_forward", "var_mean",
    "std_mean", "_fused_rms_norm", "nll_loss_forward", "masked_fill", "triu", "tril", "rsub", "addcmul",
    "addcdiv", "lerp", "relu6", "std", "t", "stack", "hstack", "vstack", "softshrink", "hardshrink",
    "native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit",
)  # fmt: skip


@cache
def _decompositions() -> dict[Any, Callable]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions().items())
    ops = [getattr(torch.ops.aten, name, None) for name in _ALSO_DECOMPOSE]
    table.update(get_decompositions([op for op in ops if op is not None]))
    table.pop(torch.ops.aten.embedding.default, None)
    return table


def example(node: fx.Node) -> Any:
    """The fake value of a torch-level node."""
    return node.meta.get("example_value", node.meta.get("val"))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of an aten-level node."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of an aten-level node."""
    return node.meta["val"].dtype


def _on_cpu(arg: Any) -> Any:
    if isinstance(arg, torch.device):
        return torch.device("cpu")
    return arg


def _copy_for_cpu(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            raise Unsupported(f"a tensor stored in the graph ({node.target})")
        new = graph.node_copy(node, lambda n: env[n])
        new.args = fx.node.map_aggregate(new.args, _on_cpu)  # type: ignore[assignment]
        new.kwargs = fx.node.map_aggregate(new.kwargs, _on_cpu)  # type: ignore[assignment]
        if new.op == "call_method" and new.target in ("cuda", "cpu"):
            raise Unsupported(f"a move between devices (.{new.target}())")
        env[node] = new
    return fx.GraphModule(gm, graph)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def output_nodes(gm: fx.GraphModule) -> tuple[list[Any], bool]:
    """What the graph returns, flat, and whether it was a bare tensor rather than a tuple."""
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    result = output.args[0]
    if isinstance(result, fx.Node):
        return [result], True
    return list(result), False


def fake_inputs(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Meta-like fake CPU tensors with the shape, stride and dtype of every placeholder."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out = []
        for node in placeholders(gm):
            value = example(node)
            if not isinstance(value, torch.Tensor):
                raise Unsupported(f"input {node.name} is not a tensor")
            if any(not isinstance(s, int) for s in (*value.shape, *value.stride())):
                raise Unsupported(f"input {node.name} has a symbolic shape")
            stride = layout(value.shape, value.stride())
            out.append(torch.empty_strided(tuple(value.shape), stride, dtype=value.dtype, device="cpu"))
        return out


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, out = 1, []
    for s in reversed(shape):
        out.append(stride)
        stride *= max(s, 1)
    return tuple(reversed(out))


def layout(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides a kernel expects of an input: its own, or contiguous ones if its elements overlap."""
    reach = 1
    for st, s in sorted((st, s) for s, st in zip(shape, stride, strict=True) if s > 1):
        if st < reach:
            return contiguous_stride(shape)
        reach += st * (s - 1)
    return tuple(stride)


def lower(gm: fx.GraphModule) -> fx.GraphModule:
    """The aten-level graph of ``gm``; every node carries a fake tensor in ``meta["val"]``.

    Raises `Unsupported` when the graph can't be traced, writes to its inputs or draws random numbers.
    """
    copy = _copy_for_cpu(gm)
    inputs = fake_inputs(gm)

    def run(*args: torch.Tensor) -> Any:
        return copy(*args)

    try:
        with torch.no_grad():
            traced = make_fx(
                torch.func.functionalize(run),
                decomposition_table=_decompositions(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*inputs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise Unsupported(f"can't be traced: {str(error).splitlines()[0][:200]}") from error
    _resolve_in_place(traced)
    traced.graph.eliminate_dead_code()
    return traced


def base_name(node: fx.Node) -> str:
    """``aten.add.Tensor`` and ``prims.add.default`` are both ``add``; ``getitem`` for tuple access."""
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def _resolve_in_place(gm: fx.GraphModule) -> None:
    """Decompositions may write to their own temporaries (``add_``); let later readers see the new value."""
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            raise Unsupported("a tensor constant inside the graph")
        if node.op != "call_function":
            continue
        name = base_name(node)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unsupported(f"{name} draws random numbers")
        if not name.endswith("_") or name.startswith("_"):
            continue
        written = node.args[0]
        if not isinstance(written, fx.Node) or written.op == "placeholder":
            raise Unsupported(f"{name} writes to an input")
        if base_name(written) in (
            "view",
            "permute",
            "slice",
            "select",
            "expand",
            "unsqueeze",
            "squeeze",
            "alias",
        ):
            raise Unsupported(f"{name} writes through a view")
        before = set()
        for other in gm.graph.nodes:
            before.add(other)
            if other is node:
                break
        written.replace_all_uses_with(node, delete_user_cb=lambda user, seen=before: user not in seen)
