"""What a proposer must know of the device: its measured peaks, its limits, and which backends run on it.

`facts_of` asks the machine; `DeviceFacts.describe` is pure, so that a prompt for any device can be tested on
every other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autokernel.hardware import Ceilings

_VECTORS = {"AVX512": 512, "AVX2": 256, "DEFAULT": 128}
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class DeviceFacts:
    """One device.  Sizes in bytes; None or empty is unknown and isn't mentioned.

    ``units`` are streaming multiprocessors or threads.  ``backends`` can be used and timed here; ``missing``
    says of others why not.
    """

    name: str
    kind: str = "cpu"
    arch: str = ""
    units: int | None = None
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    caches: tuple[str, ...] = ()
    registers: int | None = None
    shared_bytes: int | None = None
    block_shared_bytes: int | None = None
    threads: int | None = None
    compiler: str = ""
    versions: str = ""
    backends: tuple[str, ...] = ("torch",)
    missing: tuple[str, ...] = field(default=())
    ceilings: Ceilings | None = None

    def describe(self) -> str:
        lines = [self._what(), *self._inside(), *self._peaks()]
        usable = ", ".join(f'"{b}"' for b in self.backends)
        lines.append(f"BACKEND can be {usable} here: nothing else can be run and timed on this machine.")
        lines += self.missing
        if self.versions:
            lines.append(self.versions)
        return "\n".join(lines)

    def _what(self) -> str:
        unit = "SMs" if self.kind == "cuda" else "threads"
        parts = [self.name, self.arch, f"{self.units} {unit}" if self.units else ""]
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.0f} GiB of memory")
        return ", ".join(p for p in parts if p)

    def _inside(self) -> list[str]:
        if self.kind == "cpu":
            bits = _VECTORS.get(self.arch.upper())
            vectors = f"Vectors of {bits} bits ({bits // 32} float32). " if bits else ""
            caches = f"Caches: {', '.join(self.caches)}. " if self.caches else ""
            compiler = f"C++ compiler: {self.compiler}." if self.compiler else ""
            line = (vectors + caches + compiler).strip()
            return [line] if line else []
        parts = []
        if self.registers:
            parts.append(f"{self.registers} registers of 32 bits")
        if self.shared_bytes:
            at_most = f" (a block: {_kib(self.block_shared_bytes)})" if self.block_shared_bytes else ""
            parts.append(f"{_kib(self.shared_bytes)} of shared memory{at_most}")
        if self.threads:
            parts.append(f"{self.threads} threads")
        lines = [f"Per SM: {', '.join(parts)}."] if parts else []
        return [*lines, f"L2: {self.l2_bytes / 2**20:.0f} MiB."] if self.l2_bytes else lines

    def _peaks(self) -> list[str]:
        if self.ceilings is None:
            return []
        lines = []
        if self.ceilings.copy_bytes_per_s:
            lines.append(f"Copy bandwidth, measured here: {self.ceilings.copy_bytes_per_s / 1e9:.4g} GB/s.")
        unit, name = (1e9, "GFLOP/s") if self.kind == "cpu" else (1e12, "TFLOP/s")
        rates = [f"{n} {r / unit:.3g}" for n, r in sorted(self.ceilings.flops_per_s.items())]
        if rates:
            lines.append(f"Large matrix products, measured here, in {name}: {', '.join(rates)}.")
        if self.ceilings.launch_us:
            lines.append(f"A call that does nothing takes {self.ceilings.launch_us:.1f} µs.")
        return lines


def facts_of(device: str, ceilings: Ceilings | None = None) -> DeviceFacts:
    """Look at ``cpu``, ``cuda`` or ``cuda:N``.  Raises UsageError or DeviceMissing as `hardware.detect`."""
    import torch

    from autokernel import hardware
    from autokernel.backends import BACKENDS, backend, cpp_backend

    found = hardware.detect(device)
    versions = hardware.versions()
    usable, missing = [], []
    for name in BACKENDS:
        works, why = backend(name).available(found.torch_name)
        # Triton's interpreter on a CPU checks values, and its times mean nothing.
        works = works and not (name == "triton" and found.kind == "cpu")
        usable += [name] if works else []
        if name == "cpp" and found.kind == "cpu" and not works:
            missing.append(f"No C++ here ({why}), so neither BACKEND cpp nor torch.compile.")
    shown = ("torch", "triton") if found.kind == "cuda" else ("torch",)
    common = {
        "name": found.name, "kind": found.kind, "arch": found.arch, "units": found.units,
        "memory_bytes": found.memory_bytes, "l2_bytes": found.l2_bytes, "ceilings": ceilings,
        "versions": ", ".join(f"{n} {versions[n]}" for n in shown if versions[n]),
        "backends": tuple(usable), "missing": tuple(missing),
    }  # fmt: skip
    if found.kind == "cpu":
        compiler = versions["compiler"] if cpp_backend.compiler() else None
        return DeviceFacts(caches=_caches(), compiler=compiler or "", **common)
    properties = torch.cuda.get_device_properties(found.torch_name)
    return DeviceFacts(
        registers=getattr(properties, "regs_per_multiprocessor", None),
        shared_bytes=getattr(properties, "shared_memory_per_multiprocessor", None),
        block_shared_bytes=getattr(properties, "shared_memory_per_block_optin", None),
        threads=getattr(properties, "max_threads_per_multi_processor", None),
        **common,
    )


def _caches() -> tuple[str, ...]:
    """What CPU 0 sees, nearest first (Linux only)."""
    found = []
    for folder in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = (
                (folder / n).read_text(encoding="utf-8").strip() for n in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"L{level}{'d' if kind == 'Data' else ''} {size}iB")
    return tuple(found)


def _kib(size: int | None) -> str:
    return f"{(size or 0) / 1024:.0f} KiB"
