"""What a Triton kernel takes of a multiprocessor, as its compiler says: registers, spills, shared memory.

`collect` runs in the worker, after the kernel has been launched; `parse` and `describe` run in the judge.  It
costs no profiler, and it is a label and no defence: the account comes from the candidate's own process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_KERNELS, MAX_NAME, MAX_VALUE = 16, 80, 2**31
WARP, MAX_BLOCKS, REGISTER_UNIT, SHARED_UNIT, RESERVED_SHARED = 32, 32, 256, 128, 1024
"""Threads of a warp; thread blocks that a multiprocessor holds at most; registers are given to a warp, and
shared memory to a block, in units of so many (bytes); and the driver keeps 1 KiB of the latter per block.
From the CUDA programming guide's table of compute capabilities, 8.0 to 9.0."""


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Of one compiled Triton kernel: registers and spilled registers per thread, shared memory in bytes."""

    name: str
    registers: int
    spills: int
    shared_bytes: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one has: 32-bit registers, bytes of shared memory, threads."""

    registers: int
    shared_bytes: int
    threads: int


def collect(names: Mapping[str, Any]) -> str:
    """JSON of every Triton kernel among ``names`` (a module's) that has been compiled and loaded."""
    found: dict[str, dict[str, Any]] = {}
    for value in list(names.values()):
        while hasattr(value, "fn") and not hasattr(value, "device_caches"):
            value = value.fn  # Autotuner and Heuristics wrap what is jitted
        for cache in getattr(value, "device_caches", {}).values():
            for key, kernel in cache[0].items():
                if isinstance(getattr(kernel, "n_regs", None), int):
                    resources = KernelResources(
                        str(kernel.name), kernel.n_regs, kernel.n_spills,
                        kernel.metadata.shared, kernel.metadata.num_warps,
                    )  # fmt: skip
                    found[f"{kernel.hash} {key}"] = asdict(resources)
    return json.dumps(list(found.values())[:MAX_KERNELS])


def parse(told: str) -> list[KernelResources]:
    """A worker's account; nothing where it makes no sense."""
    try:
        items = [KernelResources(**item) for item in json.loads(told)][:MAX_KERNELS]
        for item in items:
            numbers = (item.registers, item.spills, item.shared_bytes, item.num_warps)
            if not all(type(n) is int and 0 <= n < MAX_VALUE for n in numbers) or not item.num_warps:
                return []
            if not isinstance(item.name, str) or not item.name.isidentifier() or len(item.name) > MAX_NAME:
                return []
    except (ValueError, TypeError, RecursionError):
        return []
    return items


def occupancy(kernel: KernelResources, unit: Multiprocessor) -> tuple[float, str]:
    """Most warps that can be active over those that a multiprocessor holds, and what keeps it from more."""
    warps = unit.threads // WARP
    per_warp = -(-kernel.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    shared = -(-(kernel.shared_bytes + RESERVED_SHARED) // SHARED_UNIT) * SHARED_UNIT
    blocks = {
        "registers": unit.registers // per_warp // kernel.num_warps if per_warp else MAX_BLOCKS,
        "shared memory": unit.shared_bytes // shared,
        "warps": warps // kernel.num_warps,
        "blocks": MAX_BLOCKS,
    }
    limit = min(blocks, key=lambda name: blocks[name])
    return min(1.0, blocks[limit] * kernel.num_warps / warps), limit


def describe(kernels: Sequence[KernelResources], unit: Multiprocessor) -> str:
    """In words, kernel by kernel."""
    parts = []
    for kernel in kernels:
        share, limit = occupancy(kernel, unit)
        spills = f"{kernel.spills} of them spilled" if kernel.spills else "none spilled"
        parts.append(
            f"{kernel.name}: {kernel.registers} registers, {spills}, {kernel.shared_bytes} bytes shared, "
            f"{kernel.num_warps} warps, occupancy {share:.0%} at most"
            + ("" if share == 1.0 else f" ({limit})")
        )
    return "; ".join(parts)


def spilling(kernels: Sequence[KernelResources]) -> str:
    """Which kernels spill, for a row's reason; ``""`` if none does."""
    return ", ".join(f"{k.name} spills {k.spills} registers" for k in kernels if k.spills)
