"""Where the queries, keys and values of an attention region come from, and how to write them down."""

from __future__ import annotations

from torch import fx

from autokernel.capture.nodes import op_name
from autokernel.playbook.context import StrategyContext, shape_of
from autokernel.regions.code import statements


def untransposed(node: fx.Node) -> fx.Node | None:
    """The node that ``node`` is the transpose of, in its last two dimensions."""
    rank = len(shape_of(node))
    if op_name(node) == "transpose":
        dims = {int(d) % rank for d in node.args[1:3]}  # type: ignore[arg-type]
        if dims == {rank - 1, rank - 2}:
            return node.args[0]  # type: ignore[return-value]
    return None


def ungrouped(node: fx.Node) -> list[fx.Node] | None:
    """``[source, later...]`` if ``node`` is ``source`` with each head repeated, then only transposed."""
    later: list[fx.Node] = []
    while op_name(node) in ("transpose", "permute", "contiguous"):
        later.insert(0, node)
        node = node.all_input_nodes[0]
    head_axis = 1
    for step in reversed(later):
        if op_name(step) == "transpose":
            a, b = (int(d) % 4 for d in step.args[1:3])  # type: ignore[arg-type]
            head_axis = {a: b, b: a}.get(head_axis, head_axis)
        elif op_name(step) == "permute":
            dims = step.args[1] if isinstance(step.args[1], tuple | list) else step.args[1:]
            head_axis = int(dims[head_axis]) % 4  # type: ignore[arg-type, index]
    if op_name(node) not in ("reshape", "view", "flatten"):
        return None
    expand = node.all_input_nodes[0]
    if op_name(expand) != "expand":
        return None
    inserted = expand.all_input_nodes[0]
    source = inserted.all_input_nodes[0] if inserted.all_input_nodes else None
    if source is None or op_name(inserted) not in ("getitem", "unsqueeze") or len(shape_of(source)) != 4:
        return None
    wide = shape_of(expand)
    if len(wide) != 5 or shape_of(inserted)[head_axis + 1] != 1:
        return None
    repeated = list(shape_of(source))
    repeated[head_axis] *= wide[head_axis + 1]
    if tuple(repeated) != shape_of(node) or wide[head_axis] != shape_of(source)[head_axis]:
        return None
    return [source, *later]


class OperandWriter:
    """Collects the statements that operands are computed with, each once, in ``body``."""

    def __init__(self, ctx: StrategyContext) -> None:
        self.ctx = ctx
        self.body: list[str] = []
        self.done: set[fx.Node] = set()

    def emit(self, *goals: fx.Node) -> None:
        """Write whatever ``goals`` are computed from."""
        for node in self.ctx.needed_for(goals):
            if node not in self.done:
                self.done.add(node)
                self.body.append(statements([node], self.ctx.names)[0])

    def operand(self, node: fx.Node, grouped: bool = False) -> str:
        """The variable that holds ``node``; with ``grouped``, as it was before its heads were repeated."""
        names = self.ctx.names
        chain = ungrouped(node) if grouped else None
        if chain is None:
            self.emit(node)
            return names[node]
        current, *later = chain
        self.emit(current)
        name = names[current]
        for step in later:
            (step_input,) = step.all_input_nodes
            name, before = f"{names[step]}_grouped", name
            self.body.append(statements([step], {**names, step: name, step_input: before})[0])
        return name


def after(node: fx.Node, final: fx.Node) -> bool:
    """Whether ``node`` is ``final`` or is computed from it."""
    return node is final or any(after(a, final) for a in node.all_input_nodes)
