"""Swap kernels into a copy of a captured graph.

Dynamo's own graph can't take new placeholders, and a fresh module without its metadata has no static
inputs, so that CUDA graphs would copy every weight on every replay.  What this returns is a copy that
carries the metadata; prepacked tensors are further placeholders, marked static like parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import op_name, writes
from autokernel.integrate.kernels import Kernel
from autokernel.regions.partition import BARRIERS, grouped_order, partition
from autokernel.regions.region import Region


@dataclass(eq=False)
class Pack:
    """Prepacked tensors of one call site and where their parameters sit among the graph's inputs.

    A pack that is a view of the parameters themselves is never written: the user may still hold that memory.
    """

    kernel: Kernel
    sources: list[int]
    statics: list[Tensor]
    tensors: list[Tensor]
    views: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        owned = {_storage(t) for t in self.statics}
        self.views |= {i for i, t in enumerate(self.tensors) if _storage(t) in owned}

    def refresh(self, statics: list[Tensor]) -> None:
        """Pack again; into the same memory where it is our own, so that recorded CUDA graphs read it."""
        owned = {_storage(t) for t in self.statics}
        fresh = self.kernel.pack(statics)
        with torch.no_grad():
            for i, (old, new) in enumerate(zip(self.tensors, fresh, strict=True)):
                if old.data_ptr() == new.data_ptr():
                    continue
                if (
                    i in self.views
                    or _storage(old) in owned
                    or _storage(new) in {_storage(t) for t in statics}
                ):
                    self.views.add(i)
                    self.tensors[i] = new  # a new address: graphs are recorded anew
                else:
                    old.copy_(new)
        self.statics = statics


@dataclass(eq=False)
class Rewritten:
    gm: fx.GraphModule
    packs: list[Pack] = field(default_factory=list)
    engaged: list[tuple[Region, Kernel]] = field(default_factory=list)

    @property
    def pack_tensors(self) -> list[Tensor]:
        return [t for p in self.packs for t in p.tensors]


def rewrite(graph: Graph, kernels: Mapping[str, Kernel]) -> Rewritten:
    """Copy ``graph`` with every region whose fingerprint is in ``kernels`` replaced by that kernel."""
    chosen = [(r, kernels[r.fingerprint]) for r in partition(graph).regions if r.fingerprint in kernels]
    owner = {node: i for i, (region, _) in enumerate(chosen) for node in region.nodes}
    order = grouped_order(graph.nodes, owner)
    assert order is not None, "accepted regions can't form a cycle"

    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.placeholders:
        env[node] = _carry(node, new.node_copy(node))
    result = Rewritten(graph.gm, engaged=chosen)
    packed: dict[int, list[fx.Node]] = {}
    placeholders = graph.placeholders
    shared: dict[tuple, list[fx.Node]] = {}
    for number, (region, kernel) in enumerate(chosen):
        if kernel.prepack is None or not region.statics:
            continue
        statics = region.static_values()
        key = (id(kernel), *(id(s) for s in statics))
        if key not in shared:
            sources = [placeholders.index(n) if n.op == "placeholder" else -1 for n in region.statics]
            pack = Pack(kernel, sources, statics, kernel.pack(statics))
            result.packs.append(pack)
            shared[key] = [
                _pack_placeholder(new, f"autokernel_pack_{len(result.packs)}_{i}", t)
                for i, t in enumerate(pack.tensors)
            ]
        packed[number] = shared[key]

    for unit in order:
        if isinstance(unit, int):
            region, kernel = chosen[unit]
            statics = packed.get(unit)
            if statics is None:
                statics = [_static_input(new, env, n) for n in region.statics]
            args = [*(env[n] for n in region.activations), *statics]
            call = new.call_function(kernel.function, tuple(args))
            if len(region.outputs) == 1:
                env[region.outputs[0]] = call
            else:
                for i, output in enumerate(region.outputs):
                    env[output] = new.call_function(_getitem, (call, i))
        elif unit.op != "placeholder":
            env[unit] = new.node_copy(unit, lambda n: env[n])
    new.eliminate_dead_code(_has_effect)
    new.lint()

    gm = fx.GraphModule(graph.gm, new)
    gm.meta = dict(graph.gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(graph.gm, name):
            setattr(gm, name, getattr(graph.gm, name))
    result.gm = gm
    return result


def _has_effect(node: fx.Node) -> bool:
    """Whether it is no dead code though nobody reads what it returns: a write, or the beginning of a vmap."""
    kept = node.op in ("output", "placeholder") or op_name(node) in BARRIERS
    return kept or node.is_impure() or bool(writes(node))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _getitem(values: Any, index: int) -> Any:
    return values[index]


def _static_input(graph: fx.Graph, env: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    if node not in env:  # a tensor baked into the graph that nothing before this region read
        env[node] = graph.node_copy(node)
    return env[node]


def _carry(old: fx.Node, new: fx.Node) -> fx.Node:
    new.meta = copy.copy(old.meta)
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    return new


def _pack_placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = None  # type: ignore[attr-defined]
    return node
