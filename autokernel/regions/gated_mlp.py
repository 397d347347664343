"""Gated MLP: two projections of one input, ``act(gate) * up``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    for node in graph.nodes:
        if not free(node) or op_name(node) != "mul" or len(node.all_input_nodes) != 2:
            continue
        for activation, up in (node.all_input_nodes, node.all_input_nodes[::-1]):
            if (
                op_name(activation) not in ops.ACTIVATIONS
                or len(activation.users) != 1
                or not free(activation)
            ):
                continue
            gate = activation.all_input_nodes[0]
            linears = {gate, up}
            if len(linears) != 2 or not all(
                free(n) and ops.is_parameter_linear(n, static) and len(n.users) == 1 for n in linears
            ):
                continue
            if ops.linear_input(gate, static) is not ops.linear_input(up, static):
                continue
            yield Match("gated_mlp", {gate, up, activation, node})
            break
