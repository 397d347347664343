"""Chains, norms, softmax, rotary embedding and gates generated as one kernel straight from the graph."""

from __future__ import annotations

from collections.abc import Iterator

from autokernel.playbook.context import StrategyContext
from autokernel.proposers.proposal import Proposal

NAME = "generated"
FAMILIES = ("pointwise", "reduction", "norm", "rope", "softmax", "embedding", "cross_entropy")


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    from autokernel.backends import cpp_backend
    from autokernel.playbook.codegen import generate

    if ctx.device.startswith("cuda"):
        backend = "triton"
    elif cpp_backend.available(ctx.device)[0]:
        backend = "cpp"
    else:
        return
    made = generate(ctx.subgraph, backend, mixed=False, constants=ctx.constants)
    if made.source is not None:
        yield Proposal(
            made.source,
            strategy=f"generated,{backend}",
            description=f"the whole chain as one generated {backend} kernel",
            backend=backend,
        )
