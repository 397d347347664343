"""A norm written out by hand → the library's rms_norm or layer_norm, residual add kept in front."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.nodes import op_name
from autokernel.playbook.context import StrategyContext, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions import ops
from autokernel.regions.code import statements

NAME = "norm_library"
FAMILIES = ("norm",)
BACKEND = "torch"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    roots = [n for n in find(ctx.nodes, "rsqrt", "sqrt") if n not in ctx.static]
    if len(roots) != 1 or find(ctx.nodes, "layer_norm", "rms_norm"):
        return
    eps = _epsilon(roots[0])
    source = _row_source(ctx, roots[0])
    if eps is None or source is None:
        return
    centred = bool(find(ctx.nodes, "sub", "var"))
    learned = [p for p in ctx.statics if shape_of(p) == shape_of(source)[-1:]]
    if len(learned) != len(ctx.statics) or len(learned) > (2 if centred else 1):
        return
    normed = [n for n in ctx.results if n is not source]
    if len(normed) != 1:
        return
    width = shape_of(source)[-1]
    arguments = [f"({width},)", *(ctx.names[p] for p in learned)]
    function = "layer_norm" if centred else "rms_norm"
    if not centred and not learned:
        arguments.append("None")
    body = [
        *statements(ctx.needed_for([source]), ctx.names),
        f"{ctx.names[normed[0]]} = F.{function}({ctx.names[source]}, {', '.join(arguments)}, eps={eps!r})",
    ]
    doc = f"{function} by the library instead of by hand."
    text = kernel_file(ctx, doc=doc, backend=BACKEND, body=body, compiled=True)
    yield Proposal(
        text,
        strategy=function.replace("_", "-"),
        description=f"norm by hand -> F.{function}",
        backend=BACKEND,
    )


def _epsilon(root: fx.Node) -> float | None:
    node = root.all_input_nodes[0]
    if op_name(node) != "add":
        return None
    scalars = [a for a in node.args if isinstance(a, int | float)]
    return float(scalars[0]) if len(scalars) == 1 else None


def _row_source(ctx: StrategyContext, root: fx.Node) -> fx.Node | None:
    """The tensor whose rows are normed, before any up-cast."""
    node = root
    seen: set[fx.Node] = set()
    while True:
        parents = [a for a in node.all_input_nodes if a not in ctx.static]
        if not parents:
            return None
        node = parents[0]
        if node in seen:
            return None
        seen.add(node)
        if op_name(node) in ("mean", "var"):
            break
    node = node.all_input_nodes[0]
    while (
        op_name(node) in ("pow", "square", "sub")
        or op_name(node) in ops.CASTS
        or (op_name(node) == "mul" and len(node.all_input_nodes) == 1)
    ):
        node = node.all_input_nodes[0]
    return node
