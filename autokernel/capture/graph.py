"""Capture a model as torch-level FX graphs with Dynamo.

Dynamo hands a backend one graph per piece of the model between graph breaks.  Nodes still read
``linear``, ``layer_norm`` or ``softmax``, parameters and buffers are placeholders, and every node carries
a fake tensor in ``meta["example_value"]``.  Extraction (`capture`) and reinsertion
(`autokernel.integrate.dynamo_backend`) wrap what they get in the same `Graph`, so both see the same thing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autokernel.capture import graph_breaks
from autokernel.capture.graph_breaks import GraphBreak
from autokernel.capture.nest import of_its_own, tensors_of
from autokernel.capture.nodes import is_opaque, is_plain, op_name, storages, written_storages
from autokernel.capture.simplify import simplify
from autokernel.records import Role


@dataclass(eq=False)
class Graph:
    """One Dynamo graph with what the rest of autokernel asks about it.

    ``example_inputs`` are the real values that Dynamo called the backend with, one per placeholder: live
    parameters and buffers, and the activations of the captured call.  ``calls`` is how often one forward pass
    runs the graph: more than once where a graph break leaves it inside a layer or a loop.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    index: int = 0
    roles: dict[fx.Node, Role] = field(default_factory=dict)
    dynamic: bool = False
    calls: int = 1

    def __post_init__(self) -> None:
        if not self.needs_autograd:  # else the code that runs is the user's own
            simplify(self.gm)
        for node, value in zip(self.placeholders, self.example_inputs, strict=True):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
                isinstance(value, Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape)
            ):
                self.dynamic = True
            self.roles[node] = _role(node, value)
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":  # a tensor that Dynamo baked into the graph
                self.roles[node] = "constant"

    @property
    def needs_autograd(self) -> bool:
        """Whether somebody may ask for gradients through the graph."""
        return torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in self.example_inputs
        )

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.gm.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.gm.graph.nodes if n.op == "placeholder"]

    def value_of(self, node: fx.Node) -> Any:
        """The real value of a placeholder or of a tensor that was baked into the graph."""
        if node.op == "get_attr":
            return _attribute(self.gm, str(node.target))
        return self.example_inputs[self.placeholders.index(node)]

    def static_nodes(self) -> set[fx.Node]:
        """Nodes whose value depends on parameters, buffers and literals only, never on an activation.

        Random ops, in-place writes, anything with side effects and what is no plain tensor are left out.
        """
        written = written_storages(self.gm.graph.nodes)
        static: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            if node in self.roles:
                moving = self.roles[node] == "activation" or is_opaque(node)
                if not moving and not storages(node) & written:
                    static.add(node)
            elif (
                node.op in ("call_function", "call_method")
                and op_name(node) not in _IMPURE
                and all(arg in static for arg in node.all_input_nodes)
                and not storages(node) & written
            ):
                static.add(node)
        return static


_IMPURE = frozenset(
    {
        "dropout",
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "bernoulli",
        "multinomial",
        "normal",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "_assert",
        "_assert_async",
        "_enter_autocast",
        "_exit_autocast",
        "_set_grad_enabled",
        "manual_seed",
        "item",
    }
)


def _role(node: fx.Node, value: Any) -> Role:
    if isinstance(value, nn.Parameter):
        return "parameter"
    kind = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return "buffer" if kind else "activation"


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


# --- capture --------------------------------------------------------------------------------------------


class Capture(list[Graph]):
    """A model's graphs in the order they ran first, and the ``breaks`` between them.

    ``outside_us`` is the time that one forward pass spends outside the graphs once all are compiled: Python,
    and what it runs op by op; None where there is no break.
    """

    def __init__(self, graphs: Iterable[Graph] = ()) -> None:
        super().__init__(graphs)
        self.breaks: list[GraphBreak] = []
        self.outside_us: float | None = None


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Capture:
    """Run ``model(*args, **kwargs)`` once under Dynamo and return its graphs in the order they ran.

    Shapes are captured static.  The model is left as it was; Dynamo's caches are reset before and after.  A
    model with graph breaks runs a few times more, to time and to count them; that leaves no trace in its
    buffers and its inputs, but attributes in Python that it changes at each call go on changing.
    """
    found = Capture()
    inside = _Inside()

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = Graph(gm, list(example_inputs), index=len(found), calls=0)
        if inside.counting:  # what is compiled once more in a further run is the same code
            found.append(graph)
        return inside.timed(graph)

    torch._dynamo.reset()
    try:
        with torch.no_grad(), graph_breaks.watch() as heard:
            compiled = torch.compile(model, backend=backend, dynamic=False)

            def run(called: Callable[..., Any]) -> None:
                own: tuple[tuple[Any, ...], dict[str, Any]] = of_its_own((tuple(args), kwargs or {}))
                called(*own[0], **own[1])

            run(compiled)
            found.breaks = graph_breaks.explained(list(heard), len(found), model)
            if found.breaks:
                with _put_back([*model.buffers(), *tensors_of((args, kwargs))]):
                    found.outside_us = inside.outside_us(lambda: run(compiled))
                    found.breaks = graph_breaks.count(found.breaks, lambda: run(model))
    finally:
        torch._dynamo.reset()
    for graph in found:
        graph.calls = max(1, graph.calls)
    return found


def nothing_found(captured: Capture) -> str:
    """Why there is nothing to optimize in a model without graphs."""
    if torch._dynamo.config.disable:
        return "Dynamo is switched off: unset TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE and Dynamo's disable"
    known = [
        str(one).replace("an unknown place: ", "").replace("`L['fn']`", "the model itself")
        for one in captured.breaks
        if one.reason != graph_breaks.UNKNOWN
    ]
    if not known:
        return (
            "there is nothing to optimize: the model runs no operation on tensors that Dynamo could capture"
        )
    return f"there is nothing to optimize: Dynamo captures none of it: {'; '.join(known)}"


class _Inside:
    """Counts the runs of graphs, and times them once it is asked to."""

    def __init__(self) -> None:
        self._us = 0.0
        self.counting = True

    def timed(self, graph: Graph) -> Callable[..., Any]:
        _ = (
            graph.gm.code
        )  # written out now: a graph that does it when called prints a trace if that call fails

        def run(*args: Any) -> Any:
            if self.counting:
                graph.calls += 1
                return graph.gm.forward(*args)
            _synchronize(args)
            began = time.perf_counter()
            result = graph.gm.forward(*args)
            _synchronize(args)
            self._us += (time.perf_counter() - began) * 1e6
            return result

        return run

    def outside_us(self, run: Callable[[], object]) -> float:
        """Median time of ``run()`` outside of all graphs."""
        self.counting = False
        times = []
        for _ in range(3):
            self._us = 0.0
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e6 - self._us)
        return statistics.median(times)


def _synchronize(values: Iterable[Any]) -> None:
    for device in {v.device for v in values if isinstance(v, Tensor) and v.is_cuda}:
        torch.cuda.synchronize(device)


@contextmanager
def _put_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Whatever happens to ``tensors``, the plain ones are as before afterwards."""
    saved = [(tensor, tensor.clone()) for tensor in tensors if is_plain(tensor)]
    try:
        yield
    finally:
        for tensor, value in saved:
            if not torch.equal(tensor, value):
                tensor.copy_(value)
