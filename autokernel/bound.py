"""What bounds a kernel, as far as its time alone can tell, and how near it comes to the device's best.

Pure functions of a measured latency, the task's least work and the device's measured ceilings.  Three times
compete to explain a latency: that of a call that does nothing (``launch``), that of moving the task's least
bytes at copy bandwidth (``dram``), and that of its FLOPs at the rate of a large matrix product (``compute``).
One *accounts* for the latency when the two are within a factor of `FACTOR` of each other: much less than the
latency and it isn't what the kernel waits for; much more and the kernel has got round it (bytes from a cache,
FLOPs that a mask leaves out).

    launch    the latency is at most twice that of an empty call
    dram      moving the bytes accounts for it, and computing doesn't
    compute   computing accounts for it, and moving the bytes doesn't
    mixed     both do, or neither does: a kernel far from its roofline waits for something else
    None      a ceiling that is needed for the answer is unknown

Which *other* thing a ``mixed`` kernel waits for (latency, occupancy, the L1 cache) takes hardware counters.
"""

from __future__ import annotations

from dataclasses import dataclass

from autokernel.hardware import Ceilings
from autokernel.records import Bound, Task
from autokernel.roofline import roofline_us

FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Performance:
    """``pct_peak`` is per cent of the speed that the roofline allows, whichever side of it applies."""

    bound: Bound | None = None
    pct_peak: float | None = None
    throughput_tflops: float | None = None


def performance(task: Task, latency_us: float | None, ceilings: Ceilings | None = None) -> Performance:
    """How one call of ``task`` that takes ``latency_us`` does; without a latency nothing is known.

    The floor is the one written into the task, else it is worked out from its bytes and FLOPs.
    """
    if not latency_us:
        return Performance()
    memory_us, compute_us = least_times_us(task, ceilings) if ceilings else (None, None)
    floor_us = task.roofline_us
    if not floor_us and memory_us is not None and compute_us is not None:
        floor_us = max(memory_us, compute_us)
    return Performance(
        bound_of(latency_us, memory_us, compute_us, ceilings.launch_us if ceilings else None),
        100.0 * floor_us / latency_us if floor_us else None,
        task.flops / latency_us / 1e6 if task.flops else None,
    )


def bound_of(
    latency_us: float, memory_us: float | None, compute_us: float | None, launch_us: float | None
) -> Bound | None:
    """The bound of a latency, given the three times that compete; see above."""
    if launch_us is not None and latency_us <= FACTOR * launch_us:
        return "launch"
    if memory_us is None or compute_us is None:
        return None
    dram, compute = (latency_us / FACTOR <= t <= latency_us * FACTOR for t in (memory_us, compute_us))
    if dram == compute:
        return "mixed"
    return "dram" if dram else "compute"


def least_times_us(task: Task, ceilings: Ceilings) -> tuple[float | None, float | None]:
    """Least time to move the task's bytes, and to do its FLOPs; None where it is unknown.

    All FLOPs are taken to be in the dtype of the first floating input.
    """
    if task.bytes is None:
        return None, None
    inexact = (p.dtype for p in task.inputs if p.dtype.startswith(("float", "bfloat", "complex")))
    dtype = next(inexact, "float32")
    memory_us = roofline_us(0.0, task.bytes, dtype, ceilings)
    compute_us = roofline_us(task.flops or 0.0, 0.0, dtype, ceilings, allow_tf32=task.in_tf32)
    unknown = bool(task.flops) and not compute_us  # no rate was measured for this dtype
    return memory_us, None if unknown else compute_us
