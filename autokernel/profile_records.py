"""What `profiling.profile` returns: plain records, their JSON form and their rows for a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .capture.graph_breaks import GraphBreak, total
from .hardware import Ceilings, Device

if TYPE_CHECKING:
    from .regions.partition import Partition
    from .regions.region import Region

TABLE_COLUMNS = ("rank", "family", "calls", "time", "share", "bound", "head-room", "model at most", "modules")
_SITES_ONLY = ("sites", "partitions")


@dataclass(slots=True)
class RegionProfile:
    """One kind of region: all call sites with the same fingerprint.

    ``time_us`` and ``share`` are those of all ``call_count`` sites together in one forward pass; ``flops``,
    ``bytes`` and ``roofline_us`` (the least time) are of one call.  ``head_room`` says how many times faster
    one call could get, ``amdahl_bound`` how much faster the model gets if every site reaches its floor.
    """

    family: str
    fingerprint: str
    call_count: int
    module_paths: list[str]
    ops: list[str]
    time_us: float
    share: float
    flops: float | None
    bytes: float
    bound: str | None
    roofline_us: float | None
    head_room: float | None
    amdahl_bound: float | None
    sites: list[Region] = field(default_factory=list, repr=False, compare=False)

    @property
    def gain(self) -> float | None:
        """Share of the model's time that goes away if the region reaches its floor."""
        return self.share * (1.0 - 1.0 / self.head_room) if self.head_room else None

    def to_json(self) -> dict[str, Any]:
        return _plain(self)


@dataclass(slots=True)
class Leftover:
    """Connected ops that are in no region, with all their repetitions."""

    ops: list[str]
    call_count: int
    time_us: float
    share: float


@dataclass(slots=True)
class Finding:
    """One reason why the model is slow.

    ``time_us`` is what it concerns in one forward pass, as measured; with ``up_to`` only a part of that can
    go away.  ``count`` is how often it occurs in a pass, ``modules`` and ``source`` (``file:line``, or empty)
    say where, ``remedy`` what autokernel does about it or the user can do.
    """

    kind: str
    cause: str
    remedy: str
    time_us: float
    up_to: bool = False
    count: int = 1
    modules: list[str] = field(default_factory=list)
    source: str = ""

    def __str__(self) -> str:
        """One line: time, kind, cause, where, remedy."""
        bound = "up to " if self.up_to else ""
        times = f" over {self.count} calls" if self.count > 1 and self.kind != "graph break" else ""
        place = self.source if self.source and self.source not in self.cause else ""
        where = ", ".join(text for text in (_modules(self.modules), place) if text)
        return (
            f"{bound}{duration(self.time_us)}{times} [{self.kind}] {self.cause}"
            f"{f' ({where})' if where else ''}. Remedy: {self.remedy}."
        )


@dataclass(slots=True)
class Profile:
    """The time of one forward pass and how it divides.

    ``wall_us`` is the eager model's latency, ``total_us`` the sum of the attributed times (on a GPU the
    device's busy time, so that the difference is launch gaps).  ``regions`` come best gain first.
    ``outside_us`` is what a pass spends outside of Dynamo's graphs; None without ``graph_breaks``.
    ``findings`` come most time first.
    """

    model: str
    device: Device
    ceilings: Ceilings
    wall_us: float
    total_us: float
    steps: int
    graphs: int
    allow_tf32: bool
    regions: list[RegionProfile]
    leftover: list[Leftover]
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    outside_us: float | None = None
    findings: list[Finding] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list, repr=False, compare=False)

    @property
    def coverage(self) -> float:
        """Share of the attributed time that lies inside regions."""
        return sum(r.time_us for r in self.regions) / self.total_us if self.total_us else 0.0

    @property
    def busy_share(self) -> float:
        """Attributed time over the eager latency: low on a GPU means bound by launches."""
        return min(1.0, self.total_us / self.wall_us) if self.wall_us else 0.0

    def table(self, top: int | None = None) -> list[tuple[str, ...]]:
        """One row of texts per region, for `TABLE_COLUMNS`."""
        return [
            (
                str(rank),
                region.family,
                str(region.call_count),
                duration(region.time_us),
                f"{region.share:.1%}",
                region.bound or "",
                f"{region.head_room:.1f}×" if region.head_room else "",
                f"{region.amdahl_bound:.2f}×" if region.amdahl_bound else "",
                _modules(region.module_paths),
            )
            for rank, region in enumerate(self.regions[:top], start=1)
        ]

    def summary(self) -> list[str]:
        """A few lines of text to print above or below the table."""
        work = "device time" if self.device.kind == "cuda" else "time in operators"
        lines = [
            f"{self.model} on {self.device.name}: {duration(self.wall_us)} eager, "
            f"{duration(self.total_us)} {work} ({self.busy_share:.0%})",
            f"{self.coverage:.1%} of it lies in {sum(r.call_count for r in self.regions)} regions "
            f"of {len(self.regions)} kinds",
        ]
        if self.graphs > 1:
            lines.append(f"Dynamo cut the model into {self.graphs} graphs; regions don't cross them")
        lines += break_lines(self.graph_breaks)
        rest = [entry for entry in self.leftover if entry.share >= 0.001]
        lines += [
            f"  not in a region: {entry.share:.1%} {' → '.join(entry.ops[:6])}"
            f"{' …' if len(entry.ops) > 6 else ''} (×{entry.call_count})"
            for entry in rest
        ]
        if self.findings:
            lines.append("Why it is slow, by the time at stake in one pass:")
            lines += [f"  {number}. {one}" for number, one in enumerate(self.findings, start=1)]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {**_plain(self), "coverage": self.coverage, "busy_share": self.busy_share}

    def save(self, path: Path) -> None:
        """Write ``profile.json``; ``path`` may be the run folder."""
        path = path / "profile.json" if path.is_dir() else path
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read ``profile.json``; without the live regions, so it can be shown but not extracted from."""
        path = path / "profile.json" if path.is_dir() else path
        data = json.loads(path.read_text(encoding="utf-8"))
        for derived in ("coverage", "busy_share"):
            data.pop(derived, None)
        data["device"] = Device(**data["device"])
        data["ceilings"] = Ceilings(**data["ceilings"])
        data["regions"] = [RegionProfile(**r) for r in data["regions"]]
        data["findings"] = [Finding(**entry) for entry in data.get("findings", ())]
        data["graph_breaks"] = [GraphBreak(**entry) for entry in data.get("graph_breaks", ())]
        data["leftover"] = [Leftover(**entry) for entry in data["leftover"]]
        return cls(**data)


def break_lines(breaks: Sequence[GraphBreak]) -> list[str]:
    """What to say about graph breaks: how many, and one line for each place."""
    if not breaks:
        return []
    times, places = total(breaks), len(breaks)
    head = f"{times} graph break{'s' * (times != 1)}" + (f" at {places} places" if places > 1 else "")
    return [f"{head}:", *(f"  {one}" for one in breaks)]


def duration(us: float) -> str:
    """Microseconds with a unit that suits their size."""
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            value = us / factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{us / 1e6:.2f} s"


def _modules(paths: list[str]) -> str:
    """``h.0.attn … h.11.attn`` for many, the paths themselves for few."""
    if len(paths) <= 2:
        return ", ".join(paths)
    return f"{paths[0]} … {paths[-1]}"


def _plain(record: Any) -> Any:
    if isinstance(record, list | tuple):
        return [_plain(item) for item in record]
    if hasattr(record, "__dataclass_fields__"):
        return {f.name: _plain(getattr(record, f.name)) for f in fields(record) if f.name not in _SITES_ONLY}
    return record
