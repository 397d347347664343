"""A convolution and what follows it: batch norm by running statistics, a residual, activations."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import BATCH_NORM, arguments, op_name
from autokernel.regions import ops
from autokernel.regions.match import Free, Match

CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)


def find(graph: Graph, static: set[fx.Node], free: Free) -> Iterator[Match]:
    taken: set[fx.Node] = set()  # of two convolutions that are added, the first has the sum

    def left(node: fx.Node) -> bool:
        return free(node) and node not in taken

    for node in graph.nodes:
        if not left(node) or node in static or op_name(node) not in CONVOLUTIONS:
            continue
        x, *rest = node.all_input_nodes
        if x in static or not rest or not all(r in static for r in rest):
            continue
        nodes = {node, *_epilogue(node, static, left)}
        taken |= nodes
        yield Match("conv", nodes)


def _epilogue(conv: fx.Node, static: set[fx.Node], free: Free) -> list[fx.Node]:
    """The chain of only readers behind ``conv``: one batch norm, one residual, and pointwise ops."""
    found: list[fx.Node] = []
    last, residual = conv, False
    while len(last.users) == 1:
        (user,) = last.users
        if not free(user) or ops.shape(user) != ops.shape(conv):
            break
        others = [a for a in user.all_input_nodes if a is not last and a not in static]
        if is_batch_norm(user):
            if user.args[0] is not last or others:
                break
        elif op_name(user) == "add" and len(others) == 1 and not residual:
            if ops.shape(others[0]) != ops.shape(conv) or not user.all_input_nodes.count(last):
                break
            residual = True
        elif op_name(user) not in ops.POINTWISE or others:
            break
        found.append(user)
        last = user
    return found


def is_batch_norm(node: fx.Node) -> bool:
    """``batch_norm`` that uses its running statistics, and so is a scale and a shift."""
    if op_name(node) != "batch_norm" or node.op != "call_function":
        return False
    given = arguments(node, BATCH_NORM)
    return given.get("training", False) is False and given.get("running_mean") is not None
