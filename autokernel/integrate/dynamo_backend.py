"""The Dynamo backend: ``torch.compile(model, backend="autokernel", options={"run": "runs/gpt2"})``.

For each graph that Dynamo hands over, partition it, swap in the kernels of the artifact whose
fingerprints match, and let the artifact's executor carry the result.  Where nothing matches (another
shape, dtype, device, a mask with other values) the graph goes to the executor unchanged, and the
engagement report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends import registry

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import storages, written_storages
from autokernel.integrate.artifact import Artifact, open_artifact
from autokernel.integrate.executors import EXECUTORS, UNCAPTURED, fixed_sizes
from autokernel.integrate.guarded import Constant, Guarded
from autokernel.integrate.rewrite import Rewritten, rewrite


def autokernel(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph with the kernels of ``options["run"]`` (a run folder or an artifact)."""
    run = (options or {}).get("run")
    if run is None:
        raise ValueError('backend "autokernel" needs options={"run": "runs/<name>"}')
    return compile_graph(gm, example_inputs, open_artifact(run))


# Importing this module registers the backend for source trees that are not installed; for an installed
# package the entry point has the same effect.
if "autokernel" not in registry._COMPILER_FNS:
    registry.register_backend(autokernel, name="autokernel")


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], artifact: Artifact, *, executor: str | None = None
) -> Callable[..., Any]:
    graph = Graph(gm, list(example_inputs))
    name = _executor(graph, executor or artifact.executor)
    why_not = _why_not(graph)
    if why_not is not None:
        artifact.engagement.skipped(why_not)
        if graph.needs_autograd and name != "plain":
            name = "inductor"
        return EXECUTORS[name](gm, example_inputs, static_positions(graph))
    rewritten = rewrite(graph, artifact.kernels)
    artifact.engagement.add(graph, rewritten.engaged)
    held = fixed_sizes(rewritten.pack_tensors)
    inputs = [*example_inputs, *rewritten.pack_tensors]
    static = static_positions(graph) | set(range(len(example_inputs), len(inputs)))
    compiled = EXECUTORS[name](rewritten.gm, inputs, static)
    del held
    constants = _constants(graph, rewritten)
    if not rewritten.packs and not constants:
        return compiled
    return Guarded(compiled, rewritten.packs, constants, _original(gm, name), artifact.engagement.left)


def _constants(graph: Graph, rewritten: Rewritten) -> list[Constant]:
    """What the kernels that engaged rely on besides shapes: the content that their fingerprints hold."""
    names = {
        node: port.name
        for region, _ in rewritten.engaged
        for node, port in zip(region.inputs, region.ports()[0], strict=True)
        if port.role == "constant"
    }
    position = {node: i for i, node in enumerate(graph.placeholders)}
    return [Constant(name, position.get(node, -1), graph.value_of(node)) for node, name in names.items()]


def _original(gm: fx.GraphModule, executor: str) -> Callable[..., Any]:
    """The graph without kernels, for while they don't fit; compiled when that happens, and for all that may
    then change."""
    return gm.forward if executor.startswith("plain") else torch.compile(gm)


def _executor(graph: Graph, name: str) -> str:
    """``name``, or what runs the same without recording where a recording would give stale answers."""
    written = written_storages(graph.nodes)
    writes_inputs = any(storages(p) & written for p in graph.placeholders)
    return UNCAPTURED.get(name, name) if graph.dynamic or writes_inputs else name


def static_positions(graph: Graph) -> set[int]:
    return {i for i, n in enumerate(graph.placeholders) if graph.roles[n] != "activation"}


def _why_not(graph: Graph) -> str | None:
    if graph.needs_autograd:
        return "gradients are enabled (use torch.no_grad() or torch.inference_mode())"
    if graph.dynamic:
        return "the graph has symbolic shapes (a second input shape); kernels fit the shapes they were cut at"
    return None
