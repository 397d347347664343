"""What machine this is, and how fast it can go at best.

`detect` says which device it is, `ceilings` *measures* what the device can move and compute (a second
or two, then cached for the user), `versions` is what a run writes down.  There is no table of
datasheet peaks: a number that was not measured here is not used as a peak anywhere, and a device or
number type that can't be measured gets a warning and no percentage.

The ceilings are what the vendor's own copy and matrix multiplication reach on this machine as it is
now, so a kernel that beats them by a few per cent is possible; see `roofline`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DeviceMissing, UsageError

if TYPE_CHECKING:
    import torch

# Raised when the way of measuring changes, so that older cached numbers are not used.
CEILINGS_VERSION = 2


@dataclass(frozen=True, slots=True)
class Device:
    """One device.  ``None`` means unknown on this system, never 0.

    ``arch`` is ``sm_90`` and the like, or the CPU's best vector extension; ``units`` the number of
    streaming multiprocessors, or of threads that torch uses; ``l2_bytes`` the last cache level that
    all units share (L2 on a GPU, L3 on a CPU).
    """

    name: str
    arch: str
    kind: str
    index: int | None = None
    units: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    driver: str | None = None

    @property
    def torch_name(self) -> str:
        """What torch calls it: ``cpu`` or ``cuda:N``."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index or 0}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates measured on a device.

    ``copy_bytes_per_s`` counts bytes read plus bytes written by a copy that is far larger than the
    caches.  ``flops_per_s`` maps a dtype name to the rate of a large matrix product (one multiply-add
    is two); ``tf32`` is float32 with TF32 allowed.  ``launch_us`` is the time of a call that
    has next to nothing to do, the least that a kernel takes: on a GPU of a one-element kernel in a CUDA
    graph, as short kernels are timed; on a CPU of an op from Python whose parallel loop has one element
    per thread.
    """

    copy_bytes_per_s: float | None
    flops_per_s: dict[str, float] = field(default_factory=dict)
    launch_us: float | None = None
    from_cache: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def torch_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:N`` -> the device, with its index.

    Raises `UsageError` for any other text and `DeviceMissing` when this machine has no such device.
    """
    import torch

    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or bool(colon) != index.isdecimal() or (kind == "cpu" and colon):
        raise UsageError(f"--device {name!r} is not a device that autokernel knows: use cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceMissing(f"--device {name}: no CUDA device is available here; use --device cpu")
    number = int(index) if index else torch.cuda.current_device()
    if number >= count:
        have = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DeviceMissing(f"--device {name}: this machine has {have}")
    return torch.device("cuda", number)


def detect(device: str = "cpu") -> Device:
    """Look at the device that ``device`` (``cpu``, ``cuda``, ``cuda:N``) names.

    Raises `UsageError` or `DeviceMissing` as `torch_device` does.
    """
    import torch

    where = torch_device(device)
    if where.type == "cpu":
        return Device(
            name=_cpu_name(),
            arch=torch.backends.cpu.get_cpu_capability(),
            kind="cpu",
            units=torch.get_num_threads(),
            l2_bytes=_cpu_last_level_cache(),
            memory_bytes=_cpu_memory(),
        )
    properties = torch.cuda.get_device_properties(where)
    return Device(
        name=properties.name,
        arch=getattr(properties, "gcnArchName", "")
        if torch.version.hip
        else f"sm_{properties.major}{properties.minor}",
        kind="cuda",
        index=where.index,
        units=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", None) or None,
        memory_bytes=properties.total_memory,
        driver=_cuda_driver(),
    )


def versions() -> dict[str, str | None]:
    """Versions that can change a result, for ``run.json``; ``None`` where a thing is absent."""
    import torch

    def of(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "autokernel": of("autokernel"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": of("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _cuda_driver() if torch.cuda.is_available() else None,
        "compiler": _compiler(),
        "system": platform.platform(),
    }


def ceilings(device: Device, *, cache: Path | None = None, fresh: bool = False) -> Ceilings:
    """The measured ceilings of ``device``, from the cache when they were measured before.

    ``cache`` is the file's folder (default: the user's cache folder).  The file is keyed by device,
    torch and, on a CPU, the number of threads.  A cache that can't be written costs only the time to
    measure again.
    """
    import torch

    key = {
        "version": CEILINGS_VERSION,
        "name": device.name,
        "arch": device.arch,
        "torch": torch.__version__,
        "threads": torch.get_num_threads() if device.kind == "cpu" else None,
    }
    folder = cache or _cache_dir()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"ceilings-{device.kind}-{digest}.json"
    if not fresh:
        found = _read_ceilings(path, key)
        if found is not None:
            return found
    busy = _is_busy(device)
    measured = _measure(device)
    if busy:
        return measured  # what others left of the machine is not its ceiling: measure again next time
    data = {"key": key, "ceilings": {**measured.to_json(), "from_cache": True}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # only a cache
    return measured


def _is_busy(device: Device) -> bool:
    """Whether other programs have had more than half of the processors in the last minute."""
    if device.kind != "cpu" or not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1) + 0.5


def _read_ceilings(path: Path, key: dict[str, Any]) -> Ceilings | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != key:
            return None
        return Ceilings(**data["ceilings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, torn or of an older form: measure again


# What is measured: dtype name -> size of the square product.  Large enough to be compute-bound.
_MATMUL_SIZES: dict[str, dict[str, int]] = {
    "cuda": {"float16": 8192, "bfloat16": 8192, "tf32": 8192, "float32": 4096, "float64": 2048},
    "cpu": {"float32": 1024, "bfloat16": 1024, "float16": 512, "float64": 512},
}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def _measure(device: Device) -> Ceilings:
    """Copy bandwidth and matrix-product rates; about a second on a GPU, two on a small CPU."""
    import torch

    where = torch.device(device.torch_name)
    copy: float | None = None
    rates: dict[str, float] = {}
    size = _COPY_BYTES[device.kind]
    free = device.memory_bytes and device.memory_bytes // 8
    size = min(size, free) if free else size
    with torch.no_grad():
        try:
            copy = _copy_rate(size, where)
        except RuntimeError as error:
            warnings.warn(f"{device.name}: copy bandwidth was not measured ({_line(error)})", stacklevel=3)
        for name, n in _MATMUL_SIZES[device.kind].items():
            rate = _matmul_rate(name, n, where)
            if isinstance(rate, str):
                warnings.warn(
                    f"{device.name}: no {name} ceiling, so no percentage for it ({rate})", stacklevel=3
                )
            else:
                rates[name] = rate
        launch = _launch_seconds(where) * 1e6
    return Ceilings(copy, rates, launch)


def _launch_seconds(where: torch.device) -> float:
    """Seconds per call of something that does next to nothing; see `Ceilings`."""
    import torch

    one, calls = torch.ones(1, device=where).add_(0), 200  # its kernel is loaded before a capture
    alone = _best_seconds(lambda: one.add_(0), where, inner=calls)
    if where.type == "cpu":
        row_per_thread = torch.ones(torch.get_num_threads(), 1)  # layer_norm's loop has no least size
        loop = min(
            _best_seconds(lambda: torch.layer_norm(row_per_thread, (1,)), where, budget_s=0.02)
            for _ in range(10)
        )
        # Where a thread waits milliseconds for a core, the machine is busy, and loops aren't that slow.
        return loop if loop < 50 * alone else alone
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(where), torch.cuda.graph(graph):
            for _ in range(calls):
                one.add_(0)
    except RuntimeError:
        return alone  # no graphs here: as launched one by one
    return _best_seconds(graph.replay, where) / calls


def _copy_rate(size: int, where: torch.device) -> float:
    """Bytes read plus written per second when ``size`` bytes are copied."""
    import torch

    source = torch.ones(size // 4, dtype=torch.float32, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), where)


def _matmul_rate(name: str, n: int, where: torch.device) -> float | str:
    """FLOP/s of an (n, n) by (n, n) product, or the reason why it can't be measured."""
    import torch

    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    try:
        flags.fp32_precision = "tf32" if name == "tf32" else "ieee"
        # Normal data: zeros draw less power and so run faster than real work does.
        a = torch.randn(n, n, device=where, dtype=torch.float32).to(dtype)
        b = torch.randn(n, n, device=where, dtype=torch.float32).to(dtype)
        out = torch.empty(n, n, device=where, dtype=dtype)
        seconds = _best_seconds(lambda: torch.mm(a, b, out=out), where)
        return 2.0 * n**3 / seconds
    except RuntimeError as error:
        return _line(error)
    finally:
        flags.fp32_precision = before


def _best_seconds(
    work: Callable[[], object], where: torch.device, *, inner: int = 1, budget_s: float = 0.25
) -> float:
    """The shortest of several timings of ``work``: a ceiling wants the undisturbed run, not the typical one.

    This is not the stopwatch that decides anything about kernels.
    """
    import torch

    def once(repeats: int) -> float:
        if where.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / repeats
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats

    first = once(inner)
    repeats = inner
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        repeats = max(inner, min(20, math.ceil(0.02 / max(first, 1e-6))))
    best = first
    deadline = time.perf_counter() + budget_s
    for _ in range(50):
        best = min(best, once(repeats))
        if time.perf_counter() > deadline:
            break
    return best


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cache_dir() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("autokernel"))


@functools.cache
def _cuda_driver() -> str | None:
    """Driver version as nvidia-smi reports it."""
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


@functools.cache
def _compiler() -> str | None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return _first_line([compiler, "--version"]) if compiler else None


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.strip().splitlines() or [None])[0]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    if sys.platform == "darwin":
        brand = _first_line(["sysctl", "-n", "machdep.cpu.brand_string"])
        if brand:
            return brand
    return platform.processor() or platform.machine()


def _cpu_last_level_cache() -> int | None:
    """Bytes of the largest cache that CPU 0 sees (Linux only)."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdecimal():
            sizes.append(int(digits) * unit)
    return max(sizes, default=None)


def _cpu_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
