"""What carries a rewritten graph: Inductor or the plain graph, each with or without CUDA graphs.

`EXECUTORS` is the literal registry; whole-model measurement chooses among them.  Everything that touches
private parts of Inductor is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

Compiled = Callable[..., Any]


def inductor(gm: fx.GraphModule, inputs: Sequence[Any], static: set[int]) -> Compiled:
    return _inductor(gm, inputs, {})


def inductor_cudagraphs(gm: fx.GraphModule, inputs: Sequence[Any], static: set[int]) -> Compiled:
    """Inductor with its CUDA-graph trees, as ``mode="reduce-overhead"`` has it."""
    return _inductor(gm, inputs, {"triton.cudagraphs": True})


def inductor_one_graph(gm: fx.GraphModule, inputs: Sequence[Any], static: set[int]) -> Compiled:
    """Inductor's kernels in one CUDA graph of our own, which costs the host less than trees do."""
    from autokernel.integrate.cuda_graph import CudaGraph

    return CudaGraph(_inductor(gm, inputs, {"triton.cudagraphs": False}), static)


def plain(gm: fx.GraphModule, inputs: Sequence[Any], static: set[int]) -> Compiled:
    return gm.forward


def plain_cudagraph(gm: fx.GraphModule, inputs: Sequence[Any], static: set[int]) -> Compiled:
    from autokernel.integrate.cuda_graph import CudaGraph

    return CudaGraph(gm.forward, static)


EXECUTORS: dict[str, Callable[[fx.GraphModule, Sequence[Any], set[int]], Compiled]] = {
    "inductor": inductor,
    "inductor-cudagraphs": inductor_cudagraphs,
    "inductor-one-graph": inductor_one_graph,
    "plain": plain,
    "plain-cudagraph": plain_cudagraph,
}


UNCAPTURED = {"inductor-one-graph": "inductor", "plain-cudagraph": "plain"}
"""What carries a graph that must not be recorded: one with symbolic sizes, or one that writes to its inputs.
(Inductor's own CUDA-graph trees look after themselves.)"""


HOPELESS = 1.3
"""By so much Inductor has to beat eager for the plain graph not to be tried on a CPU."""


def executors_for(device: str, compiler: bool, baselines: Mapping[str, float]) -> list[str]:
    """The executors worth measuring on ``device``, the one expected to win first; without a compiler Inductor
    is out on a CPU.  ``baselines``: what the whole model took, in us."""
    if device.startswith("cuda"):
        return ["inductor-one-graph", "inductor-cudagraphs", "plain-cudagraph"]
    if not compiler:
        return ["plain"]
    eager, compiled = baselines.get("eager", 0.0), baselines.get("compile-default")
    return ["inductor"] if compiled and eager > HOPELESS * compiled else ["inductor", "plain"]


def fixed_sizes(packs: Sequence[Tensor]) -> list[Tensor]:
    """Fake tensors for what is no input of Dynamo's own, of the sizes it has; keep them until it is compiled.

    Left to AOTAutograd the sizes would be symbols: the code would be compiled for any size, and a guard on
    such a symbol can't be written down.  Dynamo's fake mode remembers these for as long as they live.
    """
    from torch._guards import detect_fake_mode

    fake_mode = detect_fake_mode()
    return [] if fake_mode is None else [fake_mode.from_tensor(p, static_shapes=True) for p in packs]


def _inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Compiled:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]
