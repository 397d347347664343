"""What is known of why a kernel takes the time it takes, in numbers first.

Hardware counters where a stage of the judge has read some; what Triton's compiler says of registers, spills,
shared memory and occupancy otherwise; and always how near the measured time comes to what the device moved
and computed at best.  Pure functions of rows, verdicts and ceilings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autokernel.bound import least_times_us
from autokernel.proposers.base import TaskState
from autokernel.proposers.clip import quantity
from autokernel.proposers.facts import DeviceFacts
from autokernel.records import TIMED, Experiment, Task, Verdict
from autokernel.results import source_id

STAGES = ("counters", "resources")
"""The judge's stages whose text is evidence, best first."""


def describe_roofline(task: Task, facts: DeviceFacts) -> str:
    """The least work of one call, the least time for it, and what that leaves to gain."""
    lines = []
    if task.flops is not None and task.bytes is not None:
        line = f"Least work of one call: {quantity(task.flops, 'FLOP')}, {quantity(task.bytes, 'B')}"
        if task.bytes:
            line += f", {task.flops / task.bytes:.3g} FLOP per byte"
        ridge = _ridge(task, facts)
        lines.append(
            line + (f" (this device turns from memory to compute at {ridge:.3g})." if ridge else ".")
        )
    if task.roofline_us is not None:
        line = f"Roofline: {task.roofline_us:.2f} µs for one call"
        lines.append(line + (f" ({floors})." if (floors := _floors(task, facts)) else "."))
    if task.head_room is not None:
        line = f"Head-room: eager PyTorch takes {task.head_room:.2f} times as long as that"
        if task.amdahl_bound is not None:
            line += f"; at the roofline the whole model would be {task.amdahl_bound:.3f} times as fast"
        lines.append(line + ".")
    lines.append("TF32 is allowed in this region." if task.in_tf32 and facts.kind == "cuda" else "")
    return "\n".join(line for line in lines if line)


def describe_evidence(state: TaskState, facts: DeviceFacts) -> str:
    """How far the current kernel and the best baseline are from the device's best, and what holds them."""
    lines = []
    row = row_of(state.history, source_id(state.current))
    if row is not None and row.latency_us:
        lines.append(f"current kernel.py: {_attained(state.task, row, facts)}")
    best = min((r for r in state.history if r.status == "baseline" and r.latency_us),
               key=lambda r: r.latency_us or 0.0, default=None)  # fmt: skip
    if best is not None:
        lines.append(f"{best.backend}: {_attained(state.task, best, facts)}")
    launch = facts.ceilings.launch_us if facts.ceilings else None
    if launch and row is not None and row.latency_us and row.latency_us < 5 * launch:
        lines.append(f"An empty call alone takes {launch:.1f} µs: launches weigh in a kernel this short.")
    if row is not None:
        lines += stage_texts(state.verdicts, row.candidate)
        if row.provenance == "library":
            lines.append("Its time goes to library kernels, none of its own.")
    return "\n".join(lines)


def stage_texts(verdicts: Mapping[str, Verdict], candidate: str) -> list[str]:
    verdict = verdicts.get(candidate)
    if verdict is None:
        return []
    found = ((name, *verdict.stages[name]) for name in STAGES if name in verdict.stages)
    return [f"{name}: {text}" for name, passed, text in found if passed and text]


def bound_of(state: TaskState, facts: DeviceFacts) -> str:
    """What bounds the region as it comes: the best baseline's bound, else the longer of the two floors."""
    rows = [r for r in state.history if r.status == "baseline" and r.bound and r.latency_us]
    if rows:
        return min(rows, key=lambda r: r.latency_us or 0.0).bound
    memory, compute = least_times_us(state.task, facts.ceilings) if facts.ceilings else (None, None)
    if memory is None or compute is None:
        return "mixed"
    return "dram" if memory >= compute else "compute"


def row_of(history: Sequence[Experiment], candidate: str) -> Experiment | None:
    """The last row of a candidate that has a time."""
    rows = [r for r in history if r.candidate == candidate and r.status in TIMED]
    return rows[-1] if rows else None


def _attained(task: Task, row: Experiment, facts: DeviceFacts) -> str:
    """One line: bandwidth and throughput reached, each against its ceiling, and the bound that follows."""
    us = row.latency_us or 0.0
    parts = []
    if row.pct_peak is not None:
        parts.append(f"{row.pct_peak:.0f} % of the roofline's speed")
    ceilings = facts.ceilings
    if task.bytes:
        parts.append(_of(task.bytes / us * 1e6, ceilings.copy_bytes_per_s if ceilings else None, "B/s"))
    if task.flops:
        parts.append(_of(task.flops / us * 1e6, _peak_flops(task, facts), "FLOP/s"))
    if row.bound:
        parts.append(f"bound: {row.bound}")
    return "; ".join(parts) or f"{us:.2f} µs"


def _of(rate: float, peak: float | None, unit: str) -> str:
    return quantity(rate, unit) + (f" of {quantity(peak, unit)}" if peak else "")


def _floors(task: Task, facts: DeviceFacts) -> str:
    if facts.ceilings is None:
        return ""
    memory, compute = least_times_us(task, facts.ceilings)
    known = (("moving the bytes", memory), ("computing", compute))
    return ", ".join(f"{name} {us:.2f} µs" for name, us in known if us)


def _peak_flops(task: Task, facts: DeviceFacts) -> float | None:
    """FLOP/s of large products in the task's dtype."""
    if facts.ceilings is None or not task.flops:
        return None
    _, compute = least_times_us(task, facts.ceilings)
    return task.flops / compute * 1e6 if compute else None


def _ridge(task: Task, facts: DeviceFacts) -> float | None:
    peak = _peak_flops(task, facts)
    copy = facts.ceilings.copy_bytes_per_s if facts.ceilings else None
    return peak / copy if peak and copy else None
