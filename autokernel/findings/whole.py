"""Findings about the model as a whole: what runs outside of graphs, and a device that waits."""

from __future__ import annotations

from collections.abc import Iterator

from autokernel.capture.graph_breaks import total
from autokernel.findings.evidence import Evidence
from autokernel.profile_records import Finding

# A device that is busy for less than this share of a pass waits for its launches.
BUSY = 0.8


def graph_breaks(evidence: Evidence) -> Iterator[Finding]:
    """One finding for all breaks: the time between the graphs was measured together."""
    breaks = evidence.breaks
    if not breaks or not evidence.outside_us:
        return
    times = total(breaks)
    shown = "; ".join(str(b) for b in breaks[:3]) + (
        f"; and {len(breaks) - 3} more" if len(breaks) > 3 else ""
    )
    yield Finding(
        kind="graph break",
        cause=f"Dynamo leaves its graphs {times} time{'s' * (times != 1)} in a pass, and this is spent "
        f"outside of them, in Python and in ops that nothing fuses: {shown}",
        remedy="rewrite these lines so that Dynamo can trace them; kernels never reach across a break",
        time_us=evidence.outside_us,
        up_to=True,
        count=times,
        source=breaks[0].place,
    )


def launch_bound(evidence: Evidence) -> Iterator[Finding]:
    """On a GPU: the difference between a pass and the device's work in it."""
    idle = evidence.wall_us - evidence.total_us
    if evidence.device.kind != "cuda" or evidence.total_us >= BUSY * evidence.wall_us:
        return
    yield Finding(
        kind="launch-bound",
        cause=f"the device works for only {evidence.total_us / evidence.wall_us:.0%} of an eager pass and "
        "waits for launches from Python in the rest of it",
        remedy="a CUDA graph: `autokernel optimize` measures the model in one and ships what is fastest",
        time_us=idle,
        up_to=True,
    )
