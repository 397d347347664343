"""A kernel file for any region: generated kernels where they exist, plain PyTorch calls for the rest.

The graph is cut into stages.  On a GPU, attention and linear layers (with their epilogues) become Triton
kernels of their own; every connected group of pointwise ops and reductions becomes one fused kernel;
what is left (and every view that costs nothing) is printed as the PyTorch call it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from . import attention, attention_match, cpp, emit, matmul, triton_file
from .ir import Unsupported
from .lower import example, output_nodes, placeholders
from .pyprint import VIEWS, expression, may_write_inputs, op_name, writes_in_place
from .subgraph import cut, inputs_of, outputs_of

INDENT = "    "
_OPAQUE = {
    "linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "scaled_dot_product_attention", "multi_head_attention_forward", "sort", "topk", "argmax",
    "argmin", "cumsum", "cumprod", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "interpolate", "one_hot",
    "nonzero", "unique", "scatter", "index_add", "lstm", "gru", "multinomial", "dot", "outer", "tensordot", "bilinear",
}  # fmt: skip


_REDUCING = {
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "softmax", "log_softmax", "logsumexp", "layer_norm",
    "rms_norm", "group_norm", "cross_entropy", "nll_loss",
}  # fmt: skip


@dataclass
class Stage:
    """Nodes that are computed by one generated function (``code``), or one by one as PyTorch calls."""

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    code: emit.Fragment | None = None
    entry: str = ""


def is_opaque(node: fx.Node) -> bool:
    name = op_name(node)
    if node.target in (torch.ops.aten,):
        return True
    return name in _OPAQUE or name.startswith("conv")


def is_free_view(node: fx.Node, free: Callable[[fx.Node], bool]) -> bool:
    """A view of something that already exists in memory: PyTorch makes it without touching data."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or op_name(node) not in VIEWS or not free(source):
        return False
    if op_name(node) in ("reshape", "flatten"):
        value = example(source)
        return isinstance(value, torch.Tensor) and value.is_contiguous()
    if op_name(node) == "getitem":
        return not any(isinstance(a, fx.Node) for a in node.all_input_nodes[1:])
    return True


def _depends(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    below: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        below[node] = set()
        for a in node.all_input_nodes:
            below[node] |= below.get(a, set()) | {a}
    return below


def compose(
    gm: fx.GraphModule,
    backend: str,
    *,
    allow_tf32: bool = False,
    constants: dict[str, torch.Tensor] | None = None,
) -> str:
    """The kernel file of a graph for ``backend`` (triton, cpp or torch).

    Raises `Unsupported` if nothing could be generated for ``triton`` and ``cpp``, or if the graph can't be
    written as Python at all.
    """
    if backend != "torch":
        gm = _averages_apart(gm)
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    if any(n.op == "get_attr" or n.op == "call_module" for n in nodes):
        raise Unsupported("a graph with modules or tensors of its own")
    if may_write_inputs(nodes):
        raise Unsupported("a graph that writes to its inputs")
    in_place = any(writes_in_place(n) for n in nodes)
    if in_place and backend != "torch":
        raise Unsupported("in-place ops between stages")
    results, single = output_nodes(gm)
    if any(not isinstance(r, fx.Node) for r in results):
        raise Unsupported("an output that is a constant")
    stages: list[Stage] = []
    if backend == "triton":
        stages += _attention_stages(nodes, results, constants or {}, allow_tf32)
        stages += _linear_stages(nodes, results, stages, allow_tf32)
    if backend != "torch":
        stages += _fused_stages(nodes, results, stages, backend)
    if not stages and backend != "torch":
        raise Unsupported("nothing in it can be generated")
    return _print(gm, nodes, results, single, stages, backend)


def _averages_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """Write an averaged cross-entropy as losses per row, their sum and the number of rows that count."""
    losses = [n for n in gm.graph.nodes if n.op == "call_function" and op_name(n) == "cross_entropy"]
    if not losses:
        return gm
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new = env[node] = graph.node_copy(node, lambda n: env[n])
        given = dict(zip(_CROSS_ENTROPY, node.args, strict=False)) | dict(node.kwargs)
        plain = given.get("reduction", "mean") == "mean" and not any(
            given.get(k) is not None for k in _LEGACY
        )
        target = given.get("target")
        if (
            node not in losses
            or not plain
            or not isinstance(target, fx.Node)
            or example(target).is_floating_point()
        ):
            continue
        x, t = env[given["input"]], env[target]
        ignore, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
        graph.erase_node(new)
        rows = graph.call_function(
            torch.nn.functional.cross_entropy,
            (x, t),
            {"ignore_index": ignore, "reduction": "none", "label_smoothing": smoothing},
        )
        made = [rows, graph.call_method("sum", (rows,)), graph.call_function(operator.ne, (t, ignore))]
        made.append(graph.call_method("sum", (made[2],)))
        made.append(graph.call_function(operator.truediv, (made[1], made[3])))
        loss, labels = example(node), example(target)
        count = labels.sum()
        shown = [loss.new_empty(labels.shape), loss, labels != 0, count, loss]
        for n, value in zip(made, shown, strict=True):
            n.meta["example_value"] = value
        env[node] = made[-1]
    return fx.GraphModule(torch.nn.Module(), graph)


_CROSS_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_LEGACY = ("weight", "size_average", "reduce")


def _attention_stages(nodes, results, constants, allow_tf32) -> list[Stage]:
    stages: list[Stage] = []
    for node in nodes:
        taken = {n for s in stages for n in s.nodes}
        for absorb in (True, False):
            match = attention_match.match(node, results, absorb)
            if match is None or taken & set(match.nodes):
                break
            entry = f"attention_{len(stages)}"
            try:
                code, inputs = attention.fragment(
                    match, entry, f"_{entry}" if stages else "", constants, allow_tf32
                )
            except Unsupported:
                continue
            stages.append(Stage(match.nodes, inputs, [match.output], code, entry))
            break
    return stages


def _linear_stages(nodes, results, stages: Sequence[Stage], allow_tf32) -> list[Stage]:
    """Linears that share an input run together, each group with the pointwise code that follows it."""
    taken = {n for s in stages for n in s.nodes}
    linears = [li for n in nodes if n not in taken and (li := matmul.as_linear(n)) is not None]
    below = _depends(nodes)
    found: list[Stage] = []
    groups: dict[fx.Node, list[matmul.Group]] = {}
    used: set[fx.Node] = set(taken)
    for k, first in enumerate(linears):
        if first.node in used:
            continue
        mates = [
            o for o in linears[k + 1 :] if o.x is first.x and o.sizes == first.sizes and o.node not in used
        ]
        group = None
        for pack in ([first, *mates[:1]] if mates else None, [first]):
            if pack is None:
                continue
            anchors = [li.node for li in pack]
            ready = {*anchors}
            candidates = []
            for n in nodes:
                if n in used or n in ready or is_opaque(n) or op_name(n) in VIEWS or writes_in_place(n):
                    continue
                outside = [a for a in n.all_input_nodes if a not in ready]
                # everything else it reads must exist before the linears run
                late = any(set(anchors) & (below.get(a, set()) | {a}) for a in outside)
                if any(a in ready for a in n.all_input_nodes) and not late:
                    candidates.append(n)
                    ready.add(n)
            try:
                group = matmul.grow(pack, candidates, results)
            except Unsupported:
                continue
            if len(pack) > 1 and not any(len(set(anchors) & (below[n])) > 1 for n in group.nodes):
                continue  # they never meet: separate groups of one launch
            break
        if group is not None:
            groups.setdefault(first.x, []).append(group)
            used |= set(group.nodes)
    for members in groups.values():
        launches: list[list[matmul.Group]] = []
        for g in members:  # one launch if no group reads what another makes
            spot = next((la for la in launches if not _linked(la, g, below)), None)
            if spot is None:
                launches.append([g])
            else:
                spot.append(g)
        for launch in launches:
            entry = f"linear_{len(found)}"
            suffix = f"_{entry}" if len(launches) > 1 or len(groups) > 1 else ""
            try:
                code, inputs = matmul.fragment(launch, entry, suffix, allow_tf32)
            except Unsupported:
                continue
            covered = [n for g in launch for n in g.nodes]
            found.append(Stage(covered, inputs, [n for g in launch for n in g.outputs], code, entry))
    return found


def _linked(launch, group, below) -> bool:
    mine = set(group.nodes)
    for g in launch:
        theirs = set(g.nodes)
        if any(below[n] & theirs for n in mine) or any(below[n] & mine for n in theirs):
            return True
    return False


def _fused_stages(nodes, results, stages: Sequence[Stage], backend: str) -> list[Stage]:
    owner = {n: s for s in stages for n in s.nodes}
    free: set[fx.Node] = set()
    for node in nodes:
        if node in owner:
            continue
        if is_free_view(node, lambda n: n.op == "placeholder" or n in free or n in owner or is_opaque(n)):
            free.add(node)
        elif op_name(node) == "contiguous" and _from_attention(node.args[0], owner):
            free.add(node)  # the kernel already wrote the layout that is asked for
    level: dict[fx.Node, int] = {}
    open_nodes = []
    for node in nodes:
        walls = [level.get(a, 0) + (1 if a in owner or is_opaque(a) else 0) for a in node.all_input_nodes]
        level[node] = max(walls, default=0)
        if node in owner:
            level[node] = max(
                [level[node], *(level.get(a, 0) for n in owner[node].nodes for a in inputs_of([n]))]
            )
        elif node not in free and not is_opaque(node):
            open_nodes.append(node)
    found: list[Stage] = []
    pending = _components(open_nodes, level)
    while pending:
        group = pending.pop(0)
        outputs = outputs_of(group, results)
        if all(op_name(n) in VIEWS for n in group) or any(
            not isinstance(example(n), torch.Tensor) for n in outputs
        ):
            continue
        entry = f"fused_{len(found)}"
        try:
            built = cpp.checked_plan(cut(group, outputs))
            make = cpp.fragment if backend == "cpp" else triton_file.fragment
            code = make(built, entry, f"_{entry}")
        except Unsupported:
            pending = _apart(group) + pending  # several smaller kernels, perhaps
            continue
        found.append(Stage(group, inputs_of(group), outputs, code, entry))
    return found


def _apart(group: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The group cut behind every op that reduces; empty when there is nothing to cut."""
    depth: dict[fx.Node, int] = {}
    for node in group:
        depth[node] = max(
            (depth.get(a, 0) + (op_name(a) in _REDUCING) for a in node.all_input_nodes), default=0
        )
    pieces = _components(group, depth)
    return pieces if len(pieces) > 1 else []


def _from_attention(node, owner: dict[fx.Node, Stage]) -> bool:
    while isinstance(node, fx.Node) and node not in owner and op_name(node) in VIEWS:
        node = node.args[0]
    return node in owner and owner[node].entry.startswith("attention") and node is owner[node].outputs[0]


def _components(nodes: Sequence[fx.Node], level: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """Connected groups of nodes of one level (ops of one level never wait for a kernel between them)."""
    label = {n: k for k, n in enumerate(nodes)}
    inside = set(nodes)
    changed = True
    while changed:
        changed = False
        for node in nodes:
            for a in node.all_input_nodes:
                if a in inside and level[a] == level[node] and label[a] != label[node]:
                    label[a] = label[node] = min(label[a], label[node])
                    changed = True
    groups: dict[int, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(label[node], []).append(node)
    return list(groups.values())


def _print(gm, nodes, results, single: bool, stages: Sequence[Stage], backend: str) -> str:
    inputs = placeholders(gm)
    plan = emit.Plan([emit.Port(n.name, (), (), torch.float32) for n in inputs], [], True, [])
    taken = emit.Names(set())
    names: dict[fx.Node, str] = {}
    for node, name in zip(inputs, emit.short_names(plan), strict=True):
        names[node] = taken.fresh(name)
    for stage in stages:
        taken.used.add(stage.entry)
    device = f"{names[inputs[0]]}.device"
    owner = {n: s for s in stages for n in s.nodes}
    needed = set(nodes) if any(writes_in_place(n) for n in nodes) else _needed(results, owner)
    stages = [s for s in stages if needed & set(s.outputs)]
    lines = [f"def kernel_fn({', '.join(names[n] for n in inputs)}):"]
    done: set[int] = set()
    pending = list(nodes)
    while pending:
        later = []
        for node in pending:
            stage = owner.get(node)
            reads = stage.inputs if stage is not None else node.all_input_nodes
            if id(stage) in done or (
                node not in needed if stage is None else not needed & set(stage.outputs)
            ):
                continue
            if any(a not in names for a in reads):
                later.append(node)
                continue
            if stage is None:
                text = expression(node, lambda n: names[n], device)
                names[node] = taken.fresh(node.name)
                lines.append(f"{INDENT}{names[node]} = {text}")
                continue
            done.add(id(stage))
            for out in stage.outputs:
                names[out] = taken.fresh(out.name)
            left = ", ".join(names[o] for o in stage.outputs) + (
                "," if stage.code and _returns_tuple(stage) else ""
            )
            lines.append(f"{INDENT}{left} = {stage.entry}({', '.join(names[a] for a in stage.inputs)})")
        if len(later) == len(pending):
            raise Unsupported("stages that wait for each other")
        pending = later
    text = ", ".join(names[r] for r in results)
    lines.append(f"{INDENT}return {text if single else f'({text},)' if len(results) == 1 else text}")
    ops = ", ".join(op_name(n) for n in nodes)
    kinds = {"triton": "Triton kernels", "cpp": "C++ / OpenMP kernels", "torch": "PyTorch calls only"}
    rest = sum(1 for n in nodes if n not in owner and op_name(n) not in VIEWS | {"contiguous"})
    detail = f"Generated from the graph: {ops}."
    if stages and rest:
        detail += f" {rest} of its ops stay PyTorch calls."
    return emit.file_text(
        f"A region of the model as {kinds[backend]}.",
        detail,
        backend,
        [s.code for s in stages if s.code],
        lines,
    )


def _returns_tuple(stage: Stage) -> bool:
    """Fused functions return their outputs as a tuple even if there is only one."""
    return stage.entry.startswith("fused") and len(stage.outputs) == 1


def _needed(results, owner) -> set[fx.Node]:
    """Nodes that must be printed: what outputs, stages and other printed nodes read."""
    needed: set[fx.Node] = set()
    stack = [r for r in results if isinstance(r, fx.Node)]
    while stack:
        node = stack.pop()
        if node in needed or node.op == "placeholder":
            continue
        needed.add(node)
        stage = owner.get(node)
        stack += stage.inputs if stage is not None else node.all_input_nodes
    return needed
