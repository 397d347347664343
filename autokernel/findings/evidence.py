"""What findings are made from: graphs, measured times, the device, and where a node comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, fx

from autokernel.capture.graph import Graph
from autokernel.capture.graph_breaks import GraphBreak
from autokernel.capture.nodes import fake_value, module_path, op_name, storages, written_storages
from autokernel.hardware import Ceilings, Device
from autokernel.masks import static_value
from autokernel.profile_records import Finding
from autokernel.regions.partition import Partition
from autokernel.torch_flags import BY_DEFAULT, Tf32

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .+')
_TORCH = Path(torch.__file__).parent
# A mask is a few small ops away from the inputs; what is farther is not computed again to be looked at.
_VALUE_NODES = 100


@dataclass
class Evidence:
    """One profile's measurements.  ``times`` are microseconds per node and forward pass."""

    partitions: Sequence[Partition]
    times: Mapping[fx.Node, float]
    device: Device
    ceilings: Ceilings
    wall_us: float
    total_us: float
    tf32: Tf32 = BY_DEFAULT
    breaks: Sequence[GraphBreak] = ()
    outside_us: float | None = None

    def us(self, nodes: Iterable[fx.Node]) -> float:
        """Measured microseconds of ``nodes`` together."""
        return sum(self.times.get(node, 0.0) for node in nodes)

    def calls(self) -> Iterator[tuple[Graph, fx.Node]]:
        """Every op of every graph."""
        for part in self.partitions:
            for node in part.graph.nodes:
                if node.op in ("call_function", "call_method"):
                    yield part.graph, node

    @cached_property
    def static(self) -> dict[Graph, set[fx.Node]]:
        """Per graph the nodes that depend on no input of the call."""
        return {part.graph: part.graph.static_nodes() for part in self.partitions}

    def finding(
        self,
        kind: str,
        cause: str,
        nodes: Sequence[fx.Node],
        remedy: str,
        *,
        graph: Graph | None = None,
        at: fx.Node | None = None,
        time_us: float | None = None,
        up_to: bool = False,
    ) -> Finding:
        """A finding about ``nodes``, whose time is theirs unless ``time_us`` is given; ``at`` says where."""
        place = at or nodes[0]
        path = module_path(place)
        return Finding(
            kind=kind,
            cause=cause,
            remedy=remedy,
            time_us=self.us(nodes) if time_us is None else time_us,
            up_to=up_to,
            count=graph.calls if graph is not None else 1,
            modules=[path] if path else [],
            source=source_of(place),
        )


def source_of(node: fx.Node) -> str:
    """``file:line`` of the innermost line outside of torch that made ``node``; empty when it is not known."""
    found = list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    own = [m for m in found if not Path(m["file"]).is_relative_to(_TORCH)]
    return f"{own[-1]['file']}:{own[-1]['line']}" if own else ""


def tensor(node: object) -> Tensor | None:
    """The fake tensor of a node that has a strided one."""
    value = fake_value(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and value.layout == torch.strided else None


def nbytes(node: fx.Node) -> float:
    """Bytes of a node's tensors in memory: an expanded dimension lies there once."""
    value = fake_value(node)
    total = 0.0
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Tensor) and one.layout == torch.strided:
            sizes = [s for s, stride in zip(one.shape, one.stride(), strict=True) if stride != 0]
            total += torch.Size(sizes).numel() * one.element_size()
    return total


def is_view(node: fx.Node) -> bool:
    """Whether the node's value lies in the memory of what it was made from."""
    own = storages(node)
    return bool(own) and any(own & storages(arg) for arg in node.all_input_nodes)


def real_value(graph: Graph, node: fx.Node) -> Tensor | None:
    """The value that ``node`` has on the captured inputs, when a few cheap ops give it; else None."""
    written = written_storages(graph.nodes)
    seen: set[fx.Node] = set()
    work = [node]
    while work:
        one = work.pop()
        if one in seen:
            continue
        seen.add(one)
        if len(seen) > _VALUE_NODES or storages(one) & written or op_name(one) in _COSTLY:
            return None
        work += one.all_input_nodes
    try:
        value = static_value(graph, node)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it can't be had alone: nothing is claimed
        return None
    return value if isinstance(value, Tensor) else None


_COSTLY = frozenset({
    "linear", "matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention", "embedding", "conv1d",
    "conv2d", "conv3d", "dropout", "rand", "randn", "bernoulli",
})  # fmt: skip


def size(amount: float) -> str:
    """Bytes with a unit."""
    for limit, factor, unit in ((1e3, 1, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB")):
        if amount < limit:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount / 1e9:.3g} GB"
