"""What a strategy is given, and the questions that several strategies ask of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autokernel.capture.nodes import fake_value, op_name
from autokernel.records import Task
from autokernel.regions.code import variable_names


@dataclass(eq=False)
class StrategyContext:
    """A task seen by a strategy.

    ``subgraph`` is the region as an FX graph whose placeholders are the task's inputs in order;
    ``constants`` holds real tensors for inputs whose role is ``constant``, by port name.
    """

    task: Task
    subgraph: fx.GraphModule
    constants: dict[str, Tensor] = field(default_factory=dict)
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.nodes = [n for n in self.subgraph.graph.nodes if n.op in ("call_function", "call_method")]
        self.placeholders = [n for n in self.subgraph.graph.nodes if n.op == "placeholder"]
        self.output = next(n for n in self.subgraph.graph.nodes if n.op == "output")
        roles = [p.role for p in self.task.inputs]
        self.static: set[fx.Node] = {
            p for p, r in zip(self.placeholders, roles, strict=True) if r != "activation"
        }
        for node in self.nodes:
            if all(a in self.static for a in node.all_input_nodes):
                self.static.add(node)
        self.names = variable_names(self.subgraph.graph.nodes)

    @property
    def results(self) -> list[fx.Node]:
        value = self.output.args[0]
        return list(value) if isinstance(value, tuple | list) else [value]  # type: ignore[list-item]

    @property
    def activations(self) -> list[fx.Node]:
        return [p for p in self.placeholders if p not in self.static]

    @property
    def statics(self) -> list[fx.Node]:
        return [p for p in self.placeholders if p in self.static]

    def named(self, nodes: Iterable[fx.Node]) -> str:
        return ", ".join(self.names[n] for n in nodes)

    def value(self, node: fx.Node) -> Any:
        """The real value of a static node whose inputs are constants and literals; None if it needs more."""
        if node.op == "placeholder":
            return self.constants.get(str(node.target))
        args = {a: self.value(a) for a in node.all_input_nodes}
        if any(v is None for v in args.values()) or node not in self.static:
            return None
        real_args = fx.map_arg(node.args, lambda n: args[n])
        real_kwargs = fx.map_arg(node.kwargs, lambda n: args[n])
        with torch.no_grad():
            if node.op == "call_method":
                receiver, *rest = real_args
                return getattr(receiver, str(node.target))(*rest, **real_kwargs)
            return node.target(*real_args, **real_kwargs)  # type: ignore[operator]

    def needed_for(self, goals: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> list[fx.Node]:
        """The call nodes that ``goals`` are computed from, in order, not looking behind ``stop``."""
        halt = set(stop)
        found: set[fx.Node] = set()
        work = [g for g in goals if g not in halt]
        while work:
            node = work.pop()
            if node in found or node.op == "placeholder":
                continue
            found.add(node)
            work.extend(a for a in node.all_input_nodes if a not in halt)
        return [n for n in self.nodes if n in found]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(fake_value(node).shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    return fake_value(node).dtype


def find(nodes: Iterable[fx.Node], *ops: str) -> list[fx.Node]:
    return [n for n in nodes if op_name(n) in ops]
