"""Linear + activation → one GEMM whose epilogue applies bias and activation (cuBLASLt through the library).

The activation's own pass over the result disappears.  The library's GELU epilogue is the tanh form; for an
erf-GELU it is proposed all the same, and the judge says whether the model's dtype can tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.nodes import op_name
from autokernel.playbook.context import StrategyContext, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions.code import statements

NAME = "linear_epilogue"
FAMILIES = ("linear",)
BACKEND = "torch"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    linears = [n for n in find(ctx.nodes, "linear") if n not in ctx.static]
    if not ctx.device.startswith("cuda") or len(linears) != 1:
        return
    (linear,) = linears
    if len(linear.all_input_nodes) != 3 or len(ctx.results) != 1 or len(shape_of(linear)) < 2:
        return
    activation = _activation(ctx, linear)
    if activation is None:
        return
    x, weight, bias = (ctx.names[n] for n in linear.all_input_nodes)
    before = statements(ctx.needed_for(linear.all_input_nodes), ctx.names)
    width = shape_of(linear)[-1]
    rows = ", ".join(str(s) for s in shape_of(linear)[:-1])
    gelu = ", use_gelu=True" if activation == "gelu" else ""
    out = ctx.names[ctx.results[0]]
    body = [
        *before,
        f"rows = {x}.reshape(-1, {x}.shape[-1])",
        f"{out} = torch._addmm_activation({bias}, rows, {weight}.t(){gelu}).view({rows}, {width})",
    ]
    yield Proposal(
        kernel_file(ctx, doc=f"Linear and {activation} in one GEMM's epilogue.", backend=BACKEND, body=body),
        strategy=f"gemm-epilogue,{activation}",
        description=f"linear + {activation} in the GEMM's own epilogue",
        backend=BACKEND,
    )


def _activation(ctx: StrategyContext, linear: fx.Node) -> str | None:
    """``gelu`` or ``relu`` if that is all that follows, GELU by hand (tanh form) included."""
    later = [n for n in ctx.nodes if n is not linear and n not in ctx.static]
    later = [n for n in later if n not in set(ctx.needed_for(linear.all_input_nodes))]
    names = [op_name(n) for n in later]
    if names in (["gelu"], ["relu"]):
        return names[0]
    by_hand = {"mul", "add", "pow", "tanh"}
    if names.count("tanh") == 1 and set(names) <= by_hand and {"mul", "add"} <= set(names):
        return "gelu"
    return None
