"""Where a model's time goes, region by region, and what each region could give.

The captured graph runs node by node under torch.profiler, every node in a range that names its region, so
the nodes of one region may lie anywhere in the graph.  On a GPU a region's time is that of the kernels
launched inside its ranges (device time, without launch gaps); on a CPU it is the time inside torch's own
operators (without Python).  Both are the eager graph's times: what torch.compile already fuses for free
shows as head-room here, and only the judge, which measures against torch.compile, tells the two apart.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd.profiler_util import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, record_function

from . import hardware, roofline, torch_flags
from .capture.graph import Graph
from .capture.nodes import op_name, storages, written_storages
from .masks import kept_scores
from .profile_records import Leftover, Profile, RegionProfile
from .regions.partition import Partition, partition
from .regions.region import Region

if TYPE_CHECKING:
    from .capture.source import LoadedModel

__all__ = ["Leftover", "Profile", "RegionProfile", "profile"]

_RANGE = "autokernel::"
_STEP = "autokernel-step::"
_BUDGET_S = 4.0
_STEPS = (3, 10)


def profile(
    loaded: LoadedModel,
    graphs: Sequence[Graph],
    *,
    device: str | None = None,
    ceilings: hardware.Ceilings | None = None,
) -> Profile:
    """Profile the captured graphs of a loaded model and rank its regions by what they could give.

    ``device`` defaults to the model's own.  The model is run a few times as it is as well, for its
    whole latency.  Ceilings are measured (or read from the cache) unless they are given.
    """
    where = hardware.detect(device or loaded.spec.device)
    limits = ceilings or hardware.ceilings(where)
    partitions = [partition(graph) for graph in graphs]
    with torch.no_grad():
        wall_us = _wall_us(loaded, where)
        units = _Units(partitions)
        times, steps = _measure(graphs, units, where, wall_us)
    total = sum(times.values())
    tf32 = torch_flags.tf32()
    regions = [
        _region_profile(sites, sum(times[units.of_region[r]] for r in sites), total, limits, tf32)
        for sites in _by_fingerprint(partitions).values()
    ]
    regions.sort(key=lambda r: (r.gain or 0.0, r.share), reverse=True)
    return Profile(
        model=loaded.name,
        device=where,
        ceilings=limits,
        wall_us=wall_us,
        total_us=total,
        steps=steps,
        graphs=len(graphs),
        allow_tf32=tf32.products,
        regions=regions,
        leftover=_leftover(units, times, total),
        partitions=partitions,
    )


def _by_fingerprint(partitions: Iterable[Partition]) -> dict[str, list[Region]]:
    groups: dict[str, list[Region]] = defaultdict(list)
    for part in partitions:
        for region in part.regions:
            groups[region.fingerprint].append(region)
    return groups


def _region_profile(
    sites: list[Region], time_us: float, total_us: float, limits: hardware.Ceilings, tf32: torch_flags.Tf32
) -> RegionProfile:
    region = sites[0]
    gm = region.subgraph()
    kept = kept_scores(region)
    # A mask that depends on the data may leave nothing to compute: then attention has no FLOP floor.
    flops = roofline.flops_by_dtype(gm, kept=1.0 if kept is None else kept)
    least = roofline.flops_by_dtype(gm, kept=0.0 if kept is None else kept)
    moved = roofline.bytes_of(gm, region.input_roles)
    dtype = str(next(iter(region.ports()[1])).dtype)
    floor = roofline.roofline_us(least, moved, dtype, limits, allow_tf32=tf32.allows(region.family))
    memory = roofline.roofline_us(0.0, moved, dtype, limits)
    share = time_us / total_us if total_us else 0.0
    room = roofline.head_room(time_us / len(sites), floor)
    paths = list(dict.fromkeys(path for site in sites for path in site.module_paths))
    return RegionProfile(
        family=region.family,
        fingerprint=region.fingerprint,
        call_count=len(sites),
        module_paths=paths,
        ops=[op_name(n) for n in region.nodes],
        time_us=time_us,
        share=share,
        flops=sum(flops.values()) or None,
        bytes=moved,
        bound=None if floor is None else "dram" if floor == memory else "compute",
        roofline_us=floor,
        head_room=room,
        amdahl_bound=roofline.amdahl_bound(share, room),
        sites=sites,
    )


# --- running and attributing ------------------------------------------------------------------------------


class _Units:
    """What time is charged to: a region, a chain of left-over nodes, or a static node.

    Static nodes (a sliced mask, rotary angles) are computed once in the graph but lie inside every region
    that uses them; their time is shared out among those regions.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.of_region: dict[Region, str] = {}
        self.label: dict[fx.Node, str] = {}
        self.chains: dict[str, tuple[Partition, list[fx.Node]]] = {}
        self.shared: dict[str, list[str]] = {}
        for index, part in enumerate(partitions):
            owners: dict[fx.Node, list[str]] = defaultdict(list)
            for number, region in enumerate(part.regions):
                key = self.of_region[region] = f"{index}.r{number}"
                self.label.update(dict.fromkeys(region.nodes, key))
                for node in region.prologue:
                    owners[node].append(key)
            for number, chain in enumerate(_chains(part.leftover)):
                key = f"{index}.c{number}"
                self.chains[key] = (part, chain)
                self.label.update(dict.fromkeys(chain, key))
            for number, node in enumerate(part.graph.nodes):
                if node not in self.label and node.op not in ("placeholder", "get_attr", "output"):
                    key = self.label[node] = f"{index}.s{number}"
                    if owners[node]:
                        self.shared[key] = owners[node]
                    else:
                        self.chains[key] = (part, [node])

    def settle(self, times: dict[str, float]) -> dict[str, float]:
        """Share out the static nodes' time."""
        settled = {key: times.get(key, 0.0) for key in [*self.of_region.values(), *self.chains]}
        for key, owners in self.shared.items():
            for owner in owners:
                settled[owner] += times.get(key, 0.0) / len(owners)
        settled[_UNKNOWN] = times.get(_UNKNOWN, 0.0)  # device work that no range launched
        return settled


_UNKNOWN = "unattributed"


def _chains(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Connected components, in graph order."""
    leader = {node: node for node in nodes}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for node in nodes:
        for arg in node.all_input_nodes:
            if arg in leader:
                leader[find(node)] = find(arg)
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        groups[find(node)].append(node)
    return list(groups.values())


class _Ranged(fx.Interpreter):
    """Runs a graph with every op in a profiler range named after its unit."""

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
    graphs: Sequence[Graph], units: _Units, where: hardware.Device, wall_us: float
) -> tuple[dict[str, float], int]:
    """Median microseconds per unit over some steps, after a warm-up, and the number of steps."""
    runners = [(_Ranged(graph.gm, units.label), graph) for graph in graphs]

    def step() -> None:
        for runner, graph in runners:
            runner.run(*fresh_arguments(graph))
        _synchronize(where)

    step()
    activities = [ProfilerActivity.CPU]
    if where.kind == "cuda":
        step()
        activities.append(ProfilerActivity.CUDA)
    steps = int(min(max(_BUDGET_S * 1e6 / max(wall_us, 1.0), _STEPS[0]), _STEPS[1]))
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for number in range(steps):
            with record_function(f"{_STEP}{number}"):
                step()
    times = _attribute(profiler.events() or (), steps, where)
    return units.settle(times), steps


def _attribute(events: Iterable[Any], steps: int, where: hardware.Device) -> dict[str, float]:
    """Median microseconds per unit and step, from the profiler's events."""
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
        times[_UNKNOWN] = (device_us - attributed) / steps
    return times


_RUNTIME = ("cuda", "cuLaunch", "cuMem", "hip")


def _is_range(name: str) -> bool:
    return name.startswith((_RANGE, _STEP))


def _place(event: Any) -> tuple[int, str] | None:
    """The step and the unit whose range an event on the CPU lies in; None outside of ranges."""
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


def _wall_us(loaded: LoadedModel, where: hardware.Device) -> float:
    """Median latency of the model as it is, on its example inputs, in eager mode."""
    times: list[float] = []
    began = time.perf_counter()
    loaded()
    _synchronize(where)
    while len(times) < 2 or (len(times) < 20 and time.perf_counter() - began < _BUDGET_S / 2):
        start = time.perf_counter()
        loaded()
        _synchronize(where)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _synchronize(where: hardware.Device) -> None:
    if where.kind == "cuda":
        torch.cuda.synchronize(where.torch_name)


def _leftover(units: _Units, times: dict[str, float], total: float) -> list[Leftover]:
    """Chains outside all regions; equal chains are one entry."""
    found: dict[tuple[str, ...], Leftover] = {}
    for key, (_, chain) in units.chains.items():
        ops = tuple(op_name(n) for n in chain)
        entry = found.setdefault(ops, Leftover(list(ops), 0, 0.0, 0.0))
        entry.call_count += 1
        entry.time_us += times[key]
        entry.share = entry.time_us / total if total else 0.0
    if times[_UNKNOWN]:
        found[(_UNKNOWN,)] = Leftover([_UNKNOWN], 1, times[_UNKNOWN], times[_UNKNOWN] / total)
    return sorted(found.values(), key=lambda entry: entry.time_us, reverse=True)
