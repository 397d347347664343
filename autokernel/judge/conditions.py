"""The state of a GPU while something was timed: clocks, power, temperature, and what held the clocks down.

Read through NVML in the judge's process, between samples.  Rounds are interleaved, so that a clock that
changes meets all arms alike and no ratio depends on it; a latency does, and whoever compares two runs wants
to know.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INTERVAL_S = 0.05
"""A reading may take a millisecond: not one per round, where rounds are short."""
LIMITS = {
    0x02: "a clock that was set",
    0x04: "the power cap",
    0x08: "a hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "the power supply",
    0x100: "the display's clock",
}
"""NVML's bits for what holds the clocks down; 0x01, an idle GPU, is no limit."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What NVML said at one moment; None for what this GPU does not tell. ``limits``: bits, see LIMITS."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    watts: float | None = None
    celsius: int | None = None
    limits: int | None = None


@functools.cache
def _handle(index: int) -> Any:
    """NVML's handle of torch's device ``index``. NVML counts devices in its own order, hence the UUID."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def why_not(device: torch.device) -> str:
    """Why the conditions on ``device`` can't be read, or ``""``."""
    if device.type != "cuda":
        return "not a CUDA device"
    try:
        _handle(device.index or 0)
    except Exception as error:  # noqa: BLE001 - no library, driver or permission: whichever, there are no readings
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def read(device: torch.device) -> Reading:
    """One reading.  Only where `why_not` has nothing to say."""
    import pynvml as nvml

    handle = _handle(device.index or 0)

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *args)
        except (nvml.NVMLError, AttributeError):
            return None

    limits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if limits is None:  # drivers before 535 have the old name only
        limits = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    milliwatts = ask("nvmlDeviceGetPowerUsage")
    return Reading(
        ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        None if milliwatts is None else milliwatts / 1e3,
        ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        limits,
    )


class Watch:
    """Takes readings while something is timed; none where there is no NVML, as on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.readings = device, list[Reading]()
        self._possible = not why_not(device)
        self._last = float("-inf")

    def look(self) -> None:
        """Take a reading, unless the last one is recent."""
        if self._possible and time.monotonic() - self._last >= INTERVAL_S:
            self.readings.append(read(self.device))
            self._last = time.monotonic()


def describe(readings: Sequence[Reading]) -> str:
    """In words: ranges, and in how many readings something held the clocks down. ``""`` without readings."""
    parts = [
        _range([r.sm_mhz for r in readings], "SM clock {} MHz"),
        _range([r.memory_mhz for r in readings], "memory {} MHz"),
        _range([None if r.watts is None else round(r.watts) for r in readings], "{} W"),
        _range([r.celsius for r in readings], "{} °C"),
    ]
    told = [r.limits for r in readings if r.limits is not None]
    counts = Counter(bit for limits in told for bit in LIMITS if limits & bit)
    if counts:
        held = ", ".join(f"{LIMITS[bit]} in {n} of {len(told)} readings" for bit, n in counts.items())
        parts.append(f"clocks held down by {held}")
    return ", ".join(part for part in parts if part)


def _range(values: Sequence[int | None], form: str) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return form.format(low if low == high else f"{low} to {high}")
