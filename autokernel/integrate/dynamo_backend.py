"""The Dynamo backend: ``torch.compile(model, backend="autokernel", options={"run": "runs/gpt2"})``.

For each graph that Dynamo hands over, partition it, swap in the kernels of the artifact whose
fingerprints match, and let the artifact's executor carry the result.  Where nothing matches (another
shape, dtype, device, a mask with other values) the graph goes to the executor unchanged, and the
engagement report says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._dynamo.backends import registry

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import storages, written_storages
from autokernel.integrate.artifact import Artifact, open_artifact
from autokernel.integrate.executors import EXECUTORS, UNCAPTURED, fixed_sizes
from autokernel.integrate.rewrite import Pack, rewrite


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
    why_not = _why_not(graph)
    if why_not is not None:
        artifact.engagement.skipped(why_not)
        name = _executor(graph, executor or artifact.executor)
        if graph.needs_autograd and name != "plain":
            name = "inductor"
        return EXECUTORS[name](gm, example_inputs, static_positions(graph))
    rewritten = rewrite(graph, artifact.kernels)
    artifact.engagement.add(graph, rewritten.engaged)
    held = fixed_sizes(rewritten.pack_tensors)
    inputs = [*example_inputs, *rewritten.pack_tensors]
    static = static_positions(graph) | set(range(len(example_inputs), len(inputs)))
    compiled = EXECUTORS[_executor(graph, executor or artifact.executor)](rewritten.gm, inputs, static)
    del held
    if not rewritten.packs:
        return compiled
    return _with_packs(compiled, rewritten.packs)


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


def _with_packs(compiled: Callable[..., Any], packs: list[Pack]) -> Callable[..., Any]:
    """Call ``compiled`` with the packs behind the graph's own inputs, packing again what went stale.

    A parameter counts as changed when its address or its version counter did.  Writes through ``.data``
    move neither; ``Artifact.refresh()`` is for those.
    """
    watched = sorted({i for p in packs for i in p.sources if i >= 0})
    tensors = [t for p in packs for t in p.tensors]

    state: list[Any] = []
    held: list[Tensor] = []  # so that nothing else gets the memory that was packed, and its address with it

    def signature(args: tuple[Any, ...]) -> list[Any]:
        return [(args[i].data_ptr(), _version(args[i])) for i in watched]

    def run(*args: Any) -> Any:
        now = signature(args)
        if now != state:
            if state:
                for pack in packs:
                    statics = [
                        args[i] if i >= 0 else old for i, old in zip(pack.sources, pack.statics, strict=True)
                    ]
                    pack.refresh(statics)
                tensors[:] = [t for p in packs for t in p.tensors]
            state[:] = now
            held[:] = [args[i].detach() for i in watched]
        return compiled(*args, *tensors)

    def refresh() -> None:
        """Pack everything again at the next call, whatever the version counters say."""
        if state:
            state[:] = [None]

    run.refresh = refresh  # type: ignore[attr-defined]
    _REFRESHERS.append(refresh)
    return run


_REFRESHERS: list[Callable[[], None]] = []


def refresh_packs() -> None:
    for refresh in _REFRESHERS:
        refresh()


def _version(tensor: Tensor) -> int:
    # Tensors made under inference mode keep no version: only their address can be watched.
    return -1 if tensor.is_inference() else tensor._version


def warn_once(text: str, seen: set[str] = set()) -> None:  # noqa: B006  a module-lifetime memory on purpose
    if text not in seen:
        seen.add(text)
        warnings.warn(text, stacklevel=3)
