"""Microseconds per node of captured graphs, by torch.profiler.

Every node runs in a range that names it.  On a GPU its time is that of the kernels launched inside the range
(device time, without launch gaps); on a CPU it is the time inside torch's own operators (without Python).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.profiler_util import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, record_function

from . import hardware
from .capture.graph import Graph
from .capture.nodes import storages, written_storages

_RANGE = "autokernel::"
_STEP = "autokernel-step::"
BUDGET_S = 4.0
_STEPS = (3, 10)
UNKNOWN = "unattributed"


def node_times(
    graphs: Sequence[Graph], where: hardware.Device, wall_us: float
) -> tuple[dict[fx.Node, float], float, int]:
    """Microseconds per node and forward pass (the median of some steps, after a warm-up), those of device
    work that no node launched, and the number of steps.

    A graph that one forward pass runs several times is measured once and counts as often as it runs.
    """
    keys = {f"{g}.{n}": (graph, node) for g, graph in enumerate(graphs) for n, node in enumerate(graph.nodes)}
    label = {
        node: key for key, (_, node) in keys.items() if node.op not in ("placeholder", "get_attr", "output")
    }
    times, steps = _measure(graphs, label, where, wall_us)
    unknown = times.pop(UNKNOWN, 0.0)
    return {keys[k][1]: us * keys[k][0].calls for k, us in times.items()}, unknown, steps


class _Ranged(fx.Interpreter):
    """Runs a graph with every op in a profiler range that names it."""

    def __init__(self, gm: fx.GraphModule, label: dict[fx.Node, str]) -> None:
        super().__init__(gm)
        self._label = label

    def run_node(self, n: fx.Node) -> Any:
        key = self._label.get(n)
        if key is None:
            return super().run_node(n)
        with record_function(_RANGE + key):
            return super().run_node(n)


def _measure(
    graphs: Sequence[Graph], label: dict[fx.Node, str], where: hardware.Device, wall_us: float
) -> tuple[dict[str, float], int]:
    """Median microseconds per key over some steps, after a warm-up, and the number of steps."""
    runners = [(_Ranged(graph.gm, label), graph) for graph in graphs]

    def step() -> None:
        for runner, graph in runners:
            runner.run(*fresh_arguments(graph))
        synchronize(where)

    step()
    activities = [ProfilerActivity.CPU]
    if where.kind == "cuda":
        step()
        activities.append(ProfilerActivity.CUDA)
    steps = int(min(max(BUDGET_S * 1e6 / max(wall_us, 1.0), _STEPS[0]), _STEPS[1]))
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for number in range(steps):
            with record_function(f"{_STEP}{number}"):
                step()
    return attribute(profiler.events() or (), steps, where), steps


def attribute(events: Iterable[Any], steps: int, where: hardware.Device) -> dict[str, float]:
    """Median microseconds per key and step, from the profiler's events."""
    per_step: list[dict[str, float]] = [defaultdict(float) for _ in range(steps)]
    device_us = 0.0
    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation and not _is_range(event.name):
                device_us += event.time_range.elapsed_us()
            continue
        found = _place(event)
        if found is None:
            continue
        number, key = found
        if where.kind == "cuda":
            # The driver's own records may carry an operator's number by chance, and with it its kernels.
            if not event.name.startswith(_RUNTIME):
                per_step[number][key] += sum(k.duration for k in event.kernels if not _is_range(k.name))
        elif not _is_range(event.name):  # a range's own time is Python's
            per_step[number][key] += event.self_cpu_time_total
    keys = {key for one in per_step for key in one}
    times = {key: statistics.median(one.get(key, 0.0) for one in per_step) for key in keys}
    attributed = sum(sum(one.values()) for one in per_step)
    if where.kind == "cuda" and device_us > attributed:
        times[UNKNOWN] = (device_us - attributed) / steps
    return times


_RUNTIME = ("cuda", "cuLaunch", "cuMem", "hip")


def _is_range(name: str) -> bool:
    return name.startswith((_RANGE, _STEP))


def _place(event: Any) -> tuple[int, str] | None:
    """The step and the key whose range an event on the CPU lies in; None outside of ranges."""
    key: str | None = None
    node = event
    while node is not None:
        if key is None and node.name.startswith(_RANGE):
            key = node.name.removeprefix(_RANGE)
        elif key is not None and node.name.startswith(_STEP):
            return int(node.name.removeprefix(_STEP)), key
        node = node.cpu_parent
    return None


def fresh_arguments(graph: Graph) -> list[Any]:
    """The captured call's inputs; what the graph writes is copied, so that every run is the first."""
    written = written_storages(graph.nodes)
    return [
        value.clone() if isinstance(value, torch.Tensor) and storages(node) & written else value
        for node, value in zip(graph.placeholders, graph.example_inputs, strict=True)
    ]


def synchronize(where: hardware.Device) -> None:
    """Wait for the device's work."""
    if where.kind == "cuda":
        torch.cuda.synchronize(where.torch_name)
