"""What compilers need once and not in every worker: imports, bytecode, probes, precompiled headers.

Everything that touches private parts of Inductor from the judge's side is in this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ASSEMBLED_FOR = (80, 86, 89, 90, 100, 120)
"""Compute capabilities; Triton remembers the version by the one that it compiles for."""


def preload(device: str, *, compiler: bool) -> None:
    """Import, in the zygote, what workers will need, so that each of them starts with it."""
    if device.startswith("cuda"):
        preload_triton()
    if device.startswith("cuda") and compiler:
        preload_cudnn()
    if compiler:
        with contextlib.suppress(ImportError):
            import torch._dynamo
            import torch._inductor.compile_fx
            import torch._inductor.cudagraph_trees  # noqa: F401


def preload_triton() -> None:
    """What Triton does once in every process that compiles: two thirds of the time that a small kernel takes.

    It reads and hashes all of its own binaries, for its cache's keys; imports what it compiles with; and asks
    the assembler for its version.  All of that is alike in every process, and none of it touches the device.
    """
    with contextlib.suppress(ImportError):
        import triton.compiler.code_generator
        import triton.runtime.cache
        from triton.backends.nvidia import compiler as assembler

        with contextlib.suppress(AttributeError, OSError, subprocess.SubprocessError, RuntimeError):
            triton.runtime.cache.triton_key()
            for arch in ASSEMBLED_FOR:
                assembler.get_ptxas_version(arch)


def preload_cudnn() -> None:
    """Map the parts of cuDNN that it would load at its first use: hundreds of megabytes, in every process."""
    with contextlib.suppress(OSError):
        mapped = {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
        }
        for folder in {Path(name).parent for name in mapped if Path(name).name.startswith("libcudnn")}:
            for part in sorted(folder.glob("libcudnn_*.so.*")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(part), mode=os.RTLD_LAZY | os.RTLD_GLOBAL)


def find_vector_units() -> None:
    """Have Inductor find out, in the zygote, which vector instructions its C++ may use.

    It compiles a file for each kind, in every process whose cache is its own: longer than a verdict takes.
    """
    with contextlib.suppress(ImportError):
        from torch._inductor import cpu_vec_isa

        try:
            known = cpu_vec_isa.x86_isa_checker()
            isas = [i for i in cpu_vec_isa.supported_vec_isa_list if set(str(i).split()) <= set(known)]
            with ThreadPoolExecutor(2) as pool:  # side by side, before they are asked for one by one
                list(pool.map(bool, isas))
            cpu_vec_isa.valid_vec_isa_list()
        except Exception as error:  # noqa: BLE001 - a broken compiler is found out, and named, where it is used
            print(f"vector instructions are unknown: {error}", flush=True)


def keep_headers(cache: Path, *, trusted: bool) -> None:
    """Keep the C++ headers that Inductor compiles beforehand with its other results.

    It wants them in /tmp, where a locked-in worker finds none: making them takes longer than what they save
    on one kernel, and one compiled with headers of another time is not taken from the cache.
    """
    if config := sys.modules.get("torch._inductor.config"):
        setattr(config, "cpp_cache_precompile_headers", trusted)  # noqa: B010 - torch's own, known by name
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None and hasattr(codecache, "_HEADER_DIR"):
        setattr(codecache, "_HEADER_DIR", str(cache / "precompiled_headers"))  # noqa: B010 - not in every torch
        setattr(codecache, "_HEADER_LOCK_DIR", str(cache / "precompiled_headers" / "locks"))  # noqa: B010


def bytecode(cache: Path) -> dict[str, str]:
    """Environment that says where workers keep bytecode: beside the sources, or else in ``cache``.

    Compilers import hundreds of modules.  Where none of their bytecode lasts (uv installs without any, and
    some containers forbid writing it), every worker would compile them anew: longer than a verdict takes.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return {}
    source = Path(torch.origin).parent / "_inductor" / "compile_fx.py"
    there = Path(importlib.util.cache_from_source(str(source)))
    writable = os.access(source.parent, os.W_OK) and not sys.dont_write_bytecode
    if there.exists() or writable:
        return {} if sys.pycache_prefix is None else {"PYTHONPYCACHEPREFIX": sys.pycache_prefix}
    return {"PYTHONPYCACHEPREFIX": str(cache / "bytecode")}
