"""Convolution + batch norm → one convolution whose weight and bias hold the norm.

By its running statistics a batch norm is a scale and a shift per channel.  Both go into weight and bias once,
in ``prepack``, and the pass over the result is gone.  Further proposals let the library apply what
follows as it writes: oneDNN on a CPU (ReLU, and a residual before it), cuDNN on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from autokernel.capture.nodes import BATCH_NORM, arguments, op_name
from autokernel.playbook.context import StrategyContext, dtype_of, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions.code import statements
from autokernel.regions.conv import CONVOLUTIONS, is_batch_norm

NAME = "fold_batch_norm"
FAMILIES = ("conv",)
BACKEND = "torch"
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    convolutions = find(ctx.nodes, *CONVOLUTIONS)
    if len(convolutions) != 1 or len(ctx.results) != 1:
        return
    (conv,) = convolutions
    given = arguments(conv, TRANSPOSED if "transpose" in op_name(conv) else ARGUMENTS)
    norms = [n for n in ctx.nodes if is_batch_norm(n)]
    if len(norms) > 1 or not isinstance(given.get("weight"), fx.Node):
        return
    norm = norms[0] if norms else None
    if norm is not None and "transpose" in op_name(conv) and given.get("groups", 1) != 1:
        return
    pack = pack_lines(ctx, conv, given, norm)
    after = [n for n in ctx.nodes if n not in ctx.static and n is not conv and n is not norm]
    if norm is not None:
        yield _proposal(
            ctx, pack, plain_lines(ctx, conv, given, norm, after), "fold-batch-norm", "a batch norm"
        )
    fused = fused_lines(ctx, conv, given, norm, after)
    if fused is not None:
        what = "what follows" if norm is None else "a batch norm, and what follows"
        library = "cudnn" if ctx.device.startswith("cuda") else "onednn"
        yield _proposal(ctx, pack, fused, f"conv-epilogue,{library}", what)


def _proposal(ctx: StrategyContext, pack: list[str], body: list[str], strategy: str, what: str) -> Proposal:
    source = kernel_file(
        ctx, doc=f"A convolution that holds {what}.", backend=BACKEND, body=body, prepack=pack,
        packed=["weight_", "bias_", *other_statics(ctx)],
    )  # fmt: skip
    return Proposal(source, strategy=strategy, description=f"one convolution for {what}", backend=BACKEND)


def other_statics(ctx: StrategyContext) -> list[str]:
    """Static inputs that something behind the norm reads (a learned scale): passed on as they are."""
    conv = find(ctx.nodes, *CONVOLUTIONS)[0]
    held = {conv, *(n for n in ctx.nodes if is_batch_norm(n))}
    readers = [n for n in ctx.nodes if n not in held and n not in ctx.static]
    wanted = [a for n in readers for a in n.all_input_nodes if a in ctx.static]
    return [ctx.names[a] for a in dict.fromkeys(wanted)]


def pack_lines(ctx: StrategyContext, conv: fx.Node, given: dict[str, Any], norm: fx.Node | None) -> list[str]:
    """Body of ``prepack``: weight and bias with the norm in them, and what else is read."""
    weight, bias = given["weight"], given.get("bias")
    before = statements([n for n in ctx.nodes if n in ctx.static], ctx.names)
    name, shift = ctx.names[weight], ctx.names[bias] if isinstance(bias, fx.Node) else None
    rest = "".join(f", {other}" for other in other_statics(ctx))
    channels = shape_of(conv)[1]
    if norm is None:
        zeros = f"{name}.new_zeros({channels})"
        return [*before, f"return {name}, {shift or zeros}{rest}"]
    facts = arguments(norm, BATCH_NORM)
    mean, var = (ctx.names[facts[key]] for key in ("running_mean", "running_var"))
    wide = "double" if "float64" in str(dtype_of(weight)) else "float"
    view = [1] * len(shape_of(weight))
    view[1 if "transpose" in op_name(conv) else 0] = -1
    lines = [*before, f"scale = torch.rsqrt({var}.{wide}() + {facts.get('eps', 1e-5)!r})"]
    if isinstance(facts.get("weight"), fx.Node):
        lines.append(f"scale = scale * {ctx.names[facts['weight']]}.{wide}()")
    centre = f"({shift}.{wide}() - {mean}.{wide}())" if shift else f"-{mean}.{wide}()"
    lines.append(f"shift = {centre} * scale")
    if isinstance(facts.get("bias"), fx.Node):
        lines.append(f"shift = shift + {ctx.names[facts['bias']]}.{wide}()")
    shape = ", ".join(map(str, view))
    return [
        *lines,
        f"weight_ = ({name}.{wide}() * scale.view({shape})).to({name}.dtype)",
        f"return weight_, shift.to({name}.dtype){rest}",
    ]


def plain_lines(
    ctx: StrategyContext, conv: fx.Node, given: dict[str, Any], norm: fx.Node | None, after: list[fx.Node]
) -> list[str]:
    """The convolution with what was packed, and what follows it as it was."""
    names = {**ctx.names, (conv if norm is None else norm): "y"}
    x = ctx.names[given["input"]]
    rest = ", ".join(f"{k}={v!r}" for k, v in given.items() if k not in ("input", "weight", "bias"))
    call = f"y = F.{op_name(conv)}({x}, weight_, bias_{', ' + rest if rest else ''})"
    return [call, *statements(after, names)]


def fused_lines(
    ctx: StrategyContext, conv: fx.Node, given: dict[str, Any], norm: fx.Node | None, after: list[fx.Node]
) -> list[str] | None:
    """The library's convolution with ReLU or with a residual and ReLU; None if that is not what follows."""
    ops = [op_name(n) for n in after]
    residual = None
    if ops in (["add", "relu"], ["add"]):
        before = norm if norm is not None else conv
        others = [a for a in after[0].all_input_nodes if a is not before]
        if len(others) != 1 or after[0].kwargs.get("alpha", 1) != 1:
            return None
        residual = ctx.names[others[0]]
        if shape_of(others[0]) != shape_of(conv) or dtype_of(others[0]) != dtype_of(conv):
            return None
    elif ops != ["relu"]:
        return None
    if op_name(conv) != "conv2d" or isinstance(given.get("padding"), str):
        return None
    x, relu, out = ctx.names[given["input"]], ops[-1] == "relu", ctx.names[ctx.results[0]]
    pair = {k: _pair(given.get(k, d)) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))}
    groups = given.get("groups", 1)
    sizes = f"{pair['stride']}, {pair['padding']}, {pair['dilation']}, {groups}"
    if ctx.device.startswith("cuda"):
        if not relu:
            return None
        if residual is None:
            return [f"{out} = torch.cudnn_convolution_relu({x}, weight_, bias_, {sizes})"]
        return [f"{out} = torch.cudnn_convolution_add_relu({x}, weight_, {residual}, 1.0, bias_, {sizes})"]
    sizes = f"{pair['padding']}, {pair['stride']}, {pair['dilation']}, {groups}"
    last = '"relu"' if relu else '"none"' if residual is None else "None"
    call = "torch.ops.mkldnn._convolution_pointwise"
    if residual is None:
        return [f'{out} = {call}({x}, weight_, bias_, {sizes}, {last}, [], "")']
    return [f'{out} = {call}.binary({x}, {residual}, weight_, bias_, {sizes}, "add", 1.0, {last}, [], "")']


def _pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value, value]
