"""A region: a set of graph nodes that one kernel may replace, seen as a function.

Inputs come in contract order: activations in order of first use, then the model's own tensors
(parameters, buffers, constants) in order of first use.  Whatever depends on the model's own tensors and
literals alone (a sliced mask, ``freqs_cis[:T]``) is *static*: it is computed inside the region's subgraph
from the tensors it comes from, so that it never crosses the region's edge and can be prepacked.  A buffer
that the graph writes (a cache of keys) is an activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import fake_value, is_tensor, module_path, storages, written_storages
from autokernel.records import Family, Port, Role
from autokernel.regions.fingerprint import fingerprint


@dataclass(eq=False)
class Region:
    """``nodes`` are in topological order; ``constant_roots`` are buffers whose content was relied on."""

    graph: Graph
    family: Family
    nodes: tuple[fx.Node, ...]
    static: set[fx.Node]
    constant_roots: frozenset[fx.Node] = frozenset()
    inputs: list[fx.Node] = field(init=False)
    input_roles: list[Role] = field(init=False)
    outputs: list[fx.Node] = field(init=False)
    prologue: list[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        inside = set(self.nodes)
        activations: dict[fx.Node, None] = {}
        roots: dict[fx.Node, None] = {}
        prologue: dict[fx.Node, None] = {}

        def take(node: fx.Node) -> None:
            if node in inside or node in prologue:
                return
            if node not in self.static:  # a buffer that the graph writes is one: it can't be prepacked
                activations[node] = None
            elif node in self.graph.roles:
                roots[node] = None
            else:
                for arg in node.all_input_nodes:
                    take(arg)
                prologue[node] = None

        for node in self.nodes:
            for arg in node.all_input_nodes:
                take(arg)
        self.prologue = list(prologue)
        self.inputs = [*activations, *roots]
        moving: list[Role] = ["activation"] * len(activations)
        self.input_roles = moving + [self._root_role(n) for n in roots]
        self.outputs = [n for n in self.nodes if any(u not in inside for u in n.users)]

    def _root_role(self, node: fx.Node) -> Role:
        return "constant" if node in self.constant_roots else self.graph.roles[node]

    @property
    def activations(self) -> list[fx.Node]:
        return [n for n, r in zip(self.inputs, self.input_roles, strict=True) if r == "activation"]

    @property
    def statics(self) -> list[fx.Node]:
        return [n for n, r in zip(self.inputs, self.input_roles, strict=True) if r != "activation"]

    @cached_property
    def late_inputs(self) -> list[fx.Node]:
        """Inputs in memory that the graph writes: what the region reads is there after the last write, which
        comes before it, and not yet when the input itself was made."""
        written = written_storages(self.graph.nodes)
        return [n for n in self.activations if storages(n) & written]

    @cached_property
    def well_formed(self) -> bool:
        """Every edge carries one strided tensor of fixed shape, and there is something to compute."""
        edges = [*self.inputs, *self.outputs]
        return bool(self.outputs) and all(is_tensor(n) and _plain(fake_value(n)) for n in edges)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest that two regions share when one kernel can serve both."""
        contents = [
            self.graph.value_of(n) if role == "constant" else None
            for n, role in zip(self.inputs, self.input_roles, strict=True)
        ]
        return fingerprint(self.subgraph(), self.input_roles, contents)

    @cached_property
    def module_paths(self) -> list[str]:
        """Dotted paths of the modules that the region's nodes come from, outermost common ones only."""
        paths: dict[str, None] = {}
        for node in self.nodes:
            paths[module_path(node)] = None
        names = [p for p in paths if p]
        return [p for p in names if not any(p != q and p.startswith(q + ".") for q in names)]

    def static_values(self) -> list[Any]:
        """The live parameters, buffers and constants, in contract order."""
        return [self.graph.value_of(n) for n in self.statics]

    def ports(self) -> tuple[list[Port], list[Port]]:
        """Input and output ports, as they go into task.json."""
        names = _unique([_short_name(n) for n in self.inputs])
        highs = self._index_bounds()
        inputs = [
            _port(name, fake_value(node), role, highs.get(node))
            for name, node, role in zip(names, self.inputs, self.input_roles, strict=True)
        ]
        outputs = [_port(f"out{i}", fake_value(node)) for i, node in enumerate(self.outputs)]
        return inputs, outputs

    def _index_bounds(self) -> dict[fx.Node, int]:
        """Integer inputs that index an embedding or count classes -> exclusive upper bound."""
        bounds: dict[fx.Node, int] = {}
        for node in self.nodes:
            name = getattr(node.target, "__name__", "")
            tensors = node.all_input_nodes
            if name == "embedding" and len(tensors) == 2:
                bounds[tensors[0]] = int(fake_value(tensors[1]).shape[0])
            elif name == "cross_entropy" and len(tensors) >= 2:
                bounds[tensors[1]] = int(fake_value(tensors[0]).shape[1])
        return bounds

    def subgraph(self) -> fx.GraphModule:
        """The region as a GraphModule of its own: inputs in contract order, a tensor or tuple out.

        Placeholders are named as the ports are, and every node keeps its ``example_value``.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        root = torch.nn.Module()
        for name, node in zip(_unique([_short_name(n) for n in self.inputs]), self.inputs, strict=True):
            copies[node] = graph.placeholder(name)
            copies[node].meta["example_value"] = fake_value(node)
        for node in [*self.prologue, *self.nodes]:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {k: v for k, v in node.meta.items() if k in _KEPT_META}
        result = [copies[n] for n in self.outputs]
        graph.output(result[0] if len(result) == 1 else tuple(result))
        graph.lint()
        return fx.GraphModule(root, graph)


_KEPT_META = frozenset({"example_value", "nn_module_stack", "stack_trace"})


def _plain(value: Tensor) -> bool:
    fixed = all(isinstance(s, int) for s in value.shape)
    return fixed and value.layout == torch.strided and value.numel() > 0


def _port(name: str, value: Tensor, role: Role = "activation", high: int | None = None) -> Port:
    dtype = str(value.dtype).removeprefix("torch.")
    return Port(name, tuple(value.shape), dtype, tuple(value.stride()), role, high)


def _short_name(node: fx.Node) -> str:
    """A readable argument name: the last parts of a lifted parameter's path, without layer numbers."""
    name = node.name
    for marker in ("_parameters_", "_buffers_"):
        if marker in name:
            module, _, leaf = name.rpartition(marker)
            owner = module.rpartition("_modules_")[2].strip("_")
            owner = "" if owner.isdigit() or owner.startswith("l_self") else owner + "_"
            name = f"{owner}{leaf.strip('_')}"
            break
    name = name.strip("_")
    if name.startswith("l_"):
        name = name[2:].removeprefix("self_")
    return name if name.isidentifier() else "x_" + name


def _unique(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        candidate = f"{name}_{count}" if count else name
        while candidate in result:
            candidate += "_"
        result.append(candidate)
    return result
