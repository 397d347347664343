"""Where a model's time goes, region by region, and what each region could give.

The captured graph runs node by node under torch.profiler (`node_times`); a region's time is that of its
nodes, which may lie anywhere in the graph.  These are the eager graph's times: what torch.compile already
fuses for free shows as head-room here, and only the judge, which measures against torch.compile, tells the
two apart.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from . import hardware, roofline, torch_flags
from .capture.graph import Capture, Graph
from .capture.nodes import op_name
from .findings import Evidence, find
from .masks import kept_scores
from .node_times import BUDGET_S, UNKNOWN, fresh_arguments, node_times, synchronize
from .profile_records import Leftover, Profile, RegionProfile
from .regions.partition import Partition, partition
from .regions.region import Region

if TYPE_CHECKING:
    from .capture.source import LoadedModel

__all__ = ["Leftover", "Profile", "RegionProfile", "fresh_arguments", "profile"]


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
        by_node, unknown, steps = node_times(graphs, where, wall_us)
        times = units.settle(by_node, unknown)
    total = sum(times.values())
    tf32 = torch_flags.tf32()
    regions = [
        _region_profile(sites, sum(times[units.of_region[r]] for r in sites), total, limits, tf32)
        for sites in _by_fingerprint(partitions).values()
    ]
    regions.sort(key=lambda r: (r.gain or 0.0, r.share), reverse=True)
    result = Profile(
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
        graph_breaks=graphs.breaks if isinstance(graphs, Capture) else [],
        outside_us=graphs.outside_us if isinstance(graphs, Capture) else None,
        partitions=partitions,
    )
    result.findings = find(
        Evidence(
            partitions, by_node, where, limits, wall_us, total, tf32, result.graph_breaks, result.outside_us
        )
    )
    return result


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
    calls = sum(site.graph.calls for site in sites)
    room = roofline.head_room(time_us / calls, floor)
    paths = list(dict.fromkeys(path for site in sites for path in site.module_paths))
    return RegionProfile(
        family=region.family,
        fingerprint=region.fingerprint,
        call_count=calls,
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


# --- attributing ------------------------------------------------------------------------------


class _Units:
    """What time is charged to: a region, a chain of left-over nodes, or a static node.

    Static nodes (a sliced mask, rotary angles) are computed once in the graph but lie inside every region
    that uses them; their time is shared out among those regions.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.of_region: dict[Region, str] = {}
        self.label: dict[fx.Node, str] = {}  # node -> key of its unit
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

    def settle(self, by_node: dict[fx.Node, float], unknown: float) -> dict[str, float]:
        """Microseconds per unit; the static nodes' time is shared out."""
        times: dict[str, float] = defaultdict(float)
        for node, us in by_node.items():
            times[self.label[node]] += us
        settled = {key: times.get(key, 0.0) for key in [*self.of_region.values(), *self.chains]}
        for key, owners in self.shared.items():
            for owner in owners:
                settled[owner] += times.get(key, 0.0) / len(owners)
        settled[UNKNOWN] = unknown  # device work that no range launched
        return settled


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


def _wall_us(loaded: LoadedModel, where: hardware.Device) -> float:
    """Median latency of the model as it is, on its example inputs, in eager mode."""
    times: list[float] = []
    began = time.perf_counter()
    loaded()
    synchronize(where)
    while len(times) < 2 or (len(times) < 20 and time.perf_counter() - began < BUDGET_S / 2):
        start = time.perf_counter()
        loaded()
        synchronize(where)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _leftover(units: _Units, times: dict[str, float], total: float) -> list[Leftover]:
    """Chains outside all regions; equal chains are one entry."""
    found: dict[tuple[str, ...], Leftover] = {}
    for key, (part, chain) in units.chains.items():
        ops = tuple(op_name(n) for n in chain)
        entry = found.setdefault(ops, Leftover(list(ops), 0, 0.0, 0.0))
        entry.call_count += part.graph.calls
        entry.time_us += times[key]
        entry.share = entry.time_us / total if total else 0.0
    if times[UNKNOWN]:
        found[(UNKNOWN,)] = Leftover([UNKNOWN], 1, times[UNKNOWN], times[UNKNOWN] / total)
    return sorted(found.values(), key=lambda entry: entry.time_us, reverse=True)
