"""Cut a few nodes out of a torch-level graph as a GraphModule of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from .lower import example


def outputs_of(nodes: Sequence[fx.Node], keep: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """The nodes whose value is needed outside ``nodes`` (or that are in ``keep``), in order."""
    inside = set(nodes)
    return [n for n in nodes if n in keep or any(u not in inside for u in n.users)]


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside that ``nodes`` read, in order of first use."""
    inside = set(nodes)
    found: list[fx.Node] = []
    for node in nodes:
        found += [a for a in node.all_input_nodes if a not in inside and a not in found]
    return found


def cut(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    inputs: Sequence[fx.Node] | None = None,
    replace: Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node | None] | None = None,
) -> fx.GraphModule:
    """A GraphModule that computes ``outputs`` (as a tuple) from ``inputs`` by copies of ``nodes``.

    ``replace(graph, node, env)`` may put something else in a node's place.
    """  # fmt: skip
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs if inputs is not None else inputs_of(nodes):
        env[node] = graph.placeholder(node.name)
        env[node].meta["example_value"] = example(node)
    for node in nodes:
        new = replace(graph, node, env) if replace is not None else None
        if new is None:
            new = graph.node_copy(node, lambda n: env[n])
        new.meta["example_value"] = example(node)
        env[node] = new
    graph.output(tuple(env[n] for n in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)
