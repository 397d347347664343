"""Chains, norms, softmax, rotary embedding and gates generated as one kernel straight from the graph."""

from __future__ import annotations

from collections.abc import Iterator

from autokernel.playbook.context import StrategyContext
from autokernel.proposers.proposal import Proposal

NAME = "generated"
FAMILIES = ("pointwise", "reduction", "norm", "rope", "softmax", "embedding", "cross_entropy")


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    if ctx.device.startswith("cuda"):
        from autokernel.playbook.codegen import triton as generator

        backend = "triton"
    else:
        from autokernel.backends import cpp_backend
        from autokernel.playbook.codegen import cpp as generator

        if not cpp_backend.available(ctx.device)[0]:
            return
        backend = "cpp"
    source, _ = generator.generate(ctx.subgraph, ctx.task)
    if source is not None:
        yield Proposal(
            source,
            strategy=f"generated,{backend}",
            description=f"the whole chain as one generated {backend} kernel",
            backend=backend,
        )
