"""Sibling linears → one GEMM over weights that are merged once.

Three small products of one input become one that fills the device; a gated MLP's two projections become
one, with the gate applied to its halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import fx

from autokernel.capture.nodes import fake_value
from autokernel.playbook.context import StrategyContext, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.records import INPUT_ALIGNMENT
from autokernel.regions.code import statements

NAME = "merge_linears"
FAMILIES = ("sibling_linears", "gated_mlp")
BACKEND = "torch"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    linears = [n for n in find(ctx.nodes, "linear") if n not in ctx.static]
    if len(linears) < 2 or not _plain(ctx, linears):
        return
    for copies in (False, True):
        source = _source(ctx, linears, copies)
        if source is None:
            continue
        tail = ", results made contiguous" if copies else ""
        yield Proposal(
            source,
            strategy="merge-linears" + (",contiguous" if copies else ""),
            description=f"{len(linears)} projections of one input as one GEMM over merged weights{tail}",
            backend=BACKEND,
        )


def _plain(ctx: StrategyContext, linears: list[fx.Node]) -> bool:
    """One shared input, and weights and biases that are the region's own inputs."""
    source = linears[0].all_input_nodes[0]
    biased = len(linears[0].all_input_nodes) == 3
    return all(
        n.all_input_nodes[0] is source
        and (len(n.all_input_nodes) == 3) == biased
        and all(a.op == "placeholder" for a in n.all_input_nodes[1:])
        for n in linears
    )


def _source(ctx: StrategyContext, linears: list[fx.Node], copies: bool) -> str | None:
    names = ctx.names
    x = linears[0].all_input_nodes[0]
    weights = [n.all_input_nodes[1] for n in linears]
    biases = [n.all_input_nodes[2] for n in linears if len(n.all_input_nodes) == 3]
    sizes = [shape_of(w)[0] for w in weights]
    if len({fake_value(w).dtype for w in weights}) != 1:
        return None
    itemsize = fake_value(weights[0]).dtype.itemsize
    handed_out = any(n in set(ctx.results) for n in linears)
    if handed_out and not copies and any(end * itemsize % INPUT_ALIGNMENT for end in accumulate(sizes)):
        return None  # parts and rows that start anywhere are read slowly, and wrongly by some libraries
    used = {*weights, *biases}
    rest = [s for s in ctx.statics if s not in used]
    packs = [f"merge_rows({ctx.named(weights)})"]
    packed = ["weight"]
    if biases:
        packs.append(f"torch.cat([{ctx.named(biases)}])")
        packed.append("bias")
    packs += [names[r] for r in rest]
    packed += [names[r] for r in rest]
    body = [*statements(ctx.needed_for([x]), names)]
    call = f"F.linear({names[x]}, weight{', bias' if biases else ''})"
    body.append(f"merged = {call}")
    parts = [names[n] for n in linears]
    body.append(f"{', '.join(parts)} = merged.split({sizes}, dim=-1)")
    outputs = set(ctx.results)
    if copies:
        if not any(n in outputs for n in linears):
            return None
        body += [f"{names[n]} = {names[n]}.contiguous()" for n in linears if n in outputs]
    done = {*linears, *ctx.needed_for([x])}
    later = [n for n in ctx.nodes if n not in done and n not in ctx.static]
    static_needed = [n for n in ctx.needed_for(later) if n in ctx.static]
    body += statements([*static_needed, *later], names)
    return kernel_file(
        ctx,
        doc="Projections of one input as a single GEMM over merged weights.",
        backend=BACKEND,
        body=body,
        header=["", "from autokernel.backends.packing import merge_rows"],
        prepack=[f"return ({', '.join(packs)},)"],
        packed=packed,
        compiled=bool(later),
    )
