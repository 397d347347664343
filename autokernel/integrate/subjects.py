"""Whole models as the judge's workers load them: every baseline, and the model with kernels in it.

`make_subject` runs in a worker process.  It builds the model from its source, lays the run's weights over
it, and returns a callable on the flat list of input tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autokernel.capture import nest

Call = Callable[..., Any]


def make_subject(args: dict[str, Any]) -> Call:
    """``args``: ``spec`` and ``weights`` of the model; ``baseline`` or ``artifact`` (with ``executor``)."""
    from autokernel.capture.source import SourceSpec, load

    loaded = load(SourceSpec.from_json(args["spec"]), weights=Path(args["weights"]))
    model = loaded.model
    fill = nest.filler((loaded.args, loaded.kwargs))

    def with_tensors(call: Call) -> Call:
        def run(*tensors: Tensor) -> Any:
            positional, keyword = fill(tensors)
            return call(*positional, **keyword)

        return run

    if "artifact" in args:
        return with_tensors(_with_kernels(model, Path(args["artifact"]), args.get("executor")))
    return BASELINES[args["baseline"]](model, with_tensors)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The input tensors in the order in which a subject takes them."""
    return nest.tensors_of((args, kwargs))


def _with_kernels(model: nn.Module, folder: Path, executor: str | None) -> Call:
    from dataclasses import replace

    from autokernel.integrate.artifact import open_artifact
    from autokernel.integrate.loaded import attach, loaded_call

    artifact = open_artifact(folder)
    if executor is not None:
        artifact = replace(artifact, executor=executor)
    attach(model, artifact)
    state = loaded_call(model)
    checked = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        result = model(*args, **kwargs)
        if not checked:
            missing = [k.name for k in artifact.kernels.values() if not state.engagement.sites[k.name]]
            if missing:
                raise RuntimeError(f"no call site engaged for {', '.join(missing)}")
            checked = True
        return result

    return call


Wrap = Callable[[Call], Call]


def _eager(model: nn.Module, wrap: Wrap) -> Call:
    return wrap(model)


def _eager_cudagraph(model: nn.Module, wrap: Wrap) -> Call:
    from autokernel.integrate.cuda_graph import CudaGraph

    graph = CudaGraph(wrap(model), set())

    def call(*tensors: Tensor) -> Any:
        result = graph(*tensors)
        if graph.failure is not None:
            raise RuntimeError(f"can't be captured in a CUDA graph: {graph.failure}")
        return result

    return call


def _compiled(**options: Any) -> Callable[[nn.Module, Wrap], Call]:
    def make(model: nn.Module, wrap: Wrap) -> Call:
        return wrap(torch.compile(model, **options))

    return make


def _max_autotune(model: nn.Module, wrap: Wrap) -> Call:
    """Hundreds of kernels are compiled only to be compared: here a pool of compilers pays."""
    import torch._inductor.config as config

    config.compile_threads = max(1, min(16, os.cpu_count() or 1))
    return wrap(torch.compile(model, mode="max-autotune"))


def _freezing(model: nn.Module, wrap: Wrap) -> Call:
    """Inductor's freezing merges sibling linears and folds batch-norm; with CUDA graphs on a GPU."""
    import torch._inductor.config as config

    config.freezing = True
    on_device = next((p.is_cuda for p in model.parameters()), False)
    if on_device:
        config.triton.cudagraphs = True  # type: ignore[attr-defined]
    return wrap(torch.compile(model))


BASELINES: dict[str, Callable[[nn.Module, Wrap], Call]] = {
    "eager": _eager,
    "eager-cudagraph": _eager_cudagraph,
    "compile-default": _compiled(),
    "compile-reduce-overhead": _compiled(mode="reduce-overhead"),
    "compile-max-autotune": _max_autotune,
    "compile-freezing": _freezing,
}
