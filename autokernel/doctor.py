"""``autokernel doctor``: what this machine has, what is missing, and what that costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autokernel.errors import AutokernelError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """``text`` is what was found; for warn and fail it also says what that means or what to do."""

    name: str
    level: Level
    text: str


def examine(device: str | None = None) -> list[Check]:
    """All checks, in the order in which they depend on each other.  ``device`` None: the best one here."""
    checks = [_python(), _torch()]
    if checks[-1].level != "fail":
        checks += [_device(device), _driver()]
        if checks[-2].level != "fail":
            checks += _conditions(device)
        checks.append(_triton())
    checks += [_compiler(), _nvcc(), *_guards(), _writable(), _key()]
    return checks


def _python() -> Check:
    version = platform.python_version()
    return Check("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "fail", f"can't be imported: {_line(error)}")
    return Check("torch", "ok", torch.__version__)


def _device(name: str | None) -> Check:
    import torch

    from autokernel.hardware import detect

    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = detect(wanted)
    except AutokernelError as error:
        return Check("device", "fail", str(error))
    memory = f", {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else ""
    units = f", {device.units} {'SMs' if device.kind == 'cuda' else 'threads'}" if device.units else ""
    text = f"{device.name} ({device.arch}{units}{memory})"
    if device.kind == "cpu" and name is None:
        return Check("device", "warn", f"{text}; no CUDA device: torch and cpp kernels are timed on the CPU")
    return Check("device", "ok", text)


def _driver() -> Check:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return Check("driver", "warn", f"no usable GPU driver (torch is built for {built or 'the CPU'})")
    from autokernel.hardware import versions

    return Check("driver", "ok", f"{versions().get('driver') or 'unknown'}, CUDA {torch.version.cuda}")


def _conditions(name: str | None) -> list[Check]:
    """Whether a timing can say at which clocks it was taken; nothing to say without a GPU."""
    import torch

    from autokernel.hardware import torch_device
    from autokernel.judge import conditions

    if not torch.cuda.is_available():
        return []
    device = torch_device(name or "cuda")
    if device.type != "cuda":
        return []
    if reason := conditions.why_not(device):
        text = f"can't be read ({_line(reason)}): timings won't say at which clocks they were taken"
        return [Check("clocks and power", "warn", text)]
    now = conditions.describe([conditions.read(device)])
    return [Check("clocks and power", "ok", f"read through NVML; now: {now}")]


def _triton() -> Check:
    try:
        return Check("triton", "ok", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Check("triton", "warn", "not installed: no Triton kernels")


def _compiler() -> Check:
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None or shutil.which(compiler) is None:
        return Check("c++ compiler", "warn", "none found: no cpp kernels and no torch.compile; install g++")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text('#include <omp.h>\nextern "C" int f() { return omp_get_max_threads(); }\n')
        command = [compiler, "-O2", "-fopenmp", "-shared", "-fPIC", str(source), "-o", f"{folder}/probe.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        return Check(
            "c++ compiler", "warn", f"{compiler} can't build an OpenMP library: {_line(done.stderr)}"
        )
    first = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return Check("c++ compiler", "ok", first.split("\n")[0] or compiler)


def _nvcc() -> Check:
    path = shutil.which("nvcc")
    return Check("nvcc", "ok", path) if path else Check("nvcc", "warn", "not found: no CUDA C++ kernels")


def _guards() -> list[Check]:
    """What a candidate is locked into here; each active guard has its test in tests/test_sandbox.py."""
    from autokernel.judge import sandbox

    found = sandbox.probe()
    lacking = [guard for guard, why_not in found.items() if why_not]
    summary = Check("isolation", "ok", "every candidate runs in a process locked in by all guards below")
    if lacking:
        text = f"without {', '.join(lacking)}: run kernels of unknown origin on a machine of their own"
        summary = Check("isolation", "warn", text)
    return [summary] + [
        Check(f"guard: {guard}", "warn", f"not here: {_line(found[guard])}")
        if found[guard]
        else Check(f"guard: {guard}", "ok", text)
        for guard, text in sandbox.GUARDS.items()
    ]


def _writable() -> Check:
    place = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check("run folder", "warn", f"can't write in {place} ({error.strerror}): use --run elsewhere")
    free = shutil.disk_usage(place).free / 2**30
    level: Level = "ok" if free > 2 else "warn"
    return Check("run folder", level, f"{place} is writable, {free:.0f} GiB free")


def _key() -> Check:
    from autokernel.proposers.keys import where_keys_are

    try:
        found = where_keys_are()
    except AutokernelError as error:
        return Check("API keys", "warn", str(error))
    if not found:
        return Check("API keys", "ok", "none: the built-in playbook needs none")
    names = ", ".join(f"{provider} ({origin})" for provider, origin in found.items())
    return Check("API keys", "ok", f"{names}; used only with --llm PROVIDER:MODEL")


def _line(value: object) -> str:
    return " ".join(str(value).split())[:200]
