"""A linear whose output width keeps the GEMM off its fast path → weights padded once, result sliced.

Tensor cores want rows that are a multiple of 16 bytes.  A vocabulary of 50257 in float16 is not, and the
library then falls back to a kernel several times slower, or the compiler pads the weights on every call.
"""

from __future__ import annotations

from collections.abc import Iterator

from autokernel.playbook.context import StrategyContext, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions.code import statements

NAME = "pad_features"
FAMILIES = ("linear",)
BACKEND = "torch"
MULTIPLE = 64


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    linears = [n for n in find(ctx.nodes, "linear") if n not in ctx.static]
    half = any(p.dtype in ("float16", "bfloat16") for p in ctx.task.inputs)
    if not ctx.device.startswith("cuda") or not half or len(linears) != 1:
        return
    (linear,) = linears
    x, weight, *bias = linear.all_input_nodes
    width = shape_of(linear)[-1]
    if width % 8 == 0 or any(n.op != "placeholder" for n in (weight, *bias)):
        return
    others = [s for s in ctx.statics if s not in (weight, *bias)]
    if others:
        return
    padding = -width % MULTIPLE
    names = ctx.names
    packs = [f"pad_rows({names[weight]}, {padding})"]
    if bias:
        packs.append(f"F.pad({names[bias[0]]}, (0, {padding}))")
    before = ctx.needed_for([x])
    done = {linear, *before}
    body = [
        *statements(before, names),
        f"padded = F.linear({names[x]}, weight{', bias' if bias else ''})",
        f"{names[linear]} = padded[..., :{width}]",
        *statements([n for n in ctx.nodes if n not in done and n not in ctx.static], names),
    ]
    source = kernel_file(
        ctx,
        doc=f"Linear with its {width} output features padded to {width + padding}.",
        backend=BACKEND,
        body=body,
        header=["", "from autokernel.backends.packing import pad_rows"],
        prepack=[f"return ({', '.join(packs)},)"],
        packed=["weight", *(["bias"] if bias else [])],
    )
    yield Proposal(
        source,
        strategy="pad-features",
        description=f"output features padded once from {width} to {width + padding}, result sliced",
        backend=BACKEND,
    )
