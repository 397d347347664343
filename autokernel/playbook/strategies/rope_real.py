"""Rotary embedding through complex numbers → the same turn in real arithmetic.

Complex tensors keep Inductor from generating code; with cosines and sines prepacked the whole embedding is
a pointwise chain that fuses with its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.nodes import fake_value, op_name
from autokernel.playbook.context import StrategyContext, find
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions.code import statements

NAME = "rope_real"
FAMILIES = ("rope",)
BACKEND = "torch"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    if not find(ctx.nodes, "view_as_complex"):
        return
    source = _source(ctx)
    if source is not None:
        yield Proposal(
            source,
            strategy="rope-real",
            description="complex rotary embedding in real arithmetic, cosines and sines prepacked",
            backend=BACKEND,
        )


def _is_complex(node: fx.Node) -> bool:
    return fake_value(node).is_complex()


def _source(ctx: StrategyContext) -> str | None:
    names = ctx.names
    readers = [n for n in ctx.nodes if n not in ctx.static]
    turns = list(
        dict.fromkeys(a for n in readers for a in n.all_input_nodes if a in ctx.static and _is_complex(a))
    )
    if len(turns) != 1:
        return None
    (turn,) = turns
    other_statics = [s for s in ctx.statics if any(u not in ctx.static for u in s.users) and s is not turn]
    if other_statics:
        return None
    body: list[str] = []
    for node in ctx.nodes:
        if node in ctx.static:
            continue
        name = names[node]
        if op_name(node) == "view_as_complex":
            x = names[node.all_input_nodes[0]]
            body.append(f"{name}_re, {name}_im = {x}.unbind(-1)")
        elif op_name(node) == "mul" and _is_complex(node):
            (x,) = [a for a in node.all_input_nodes if a is not turn] or [None]
            if x is None:
                return None
            a = names[x]
            body.append(f"{name}_re = {a}_re * cos - {a}_im * sin")
            body.append(f"{name}_im = {a}_re * sin + {a}_im * cos")
        elif op_name(node) == "view_as_real":
            x = names[node.all_input_nodes[0]]
            body.append(f"{name} = torch.stack(({x}_re, {x}_im), dim=-1)")
        elif _is_complex(node):
            return None
        else:
            body += statements([node], names)
    prepack = [
        *statements(ctx.needed_for([turn]), names),
        f"return {names[turn]}.real.contiguous(), {names[turn]}.imag.contiguous()",
    ]
    return kernel_file(
        ctx,
        doc="Rotary embedding in real arithmetic.",
        backend=BACKEND,
        body=body,
        prepack=prepack,
        packed=["cos", "sin"],
        compiled=True,
    )
