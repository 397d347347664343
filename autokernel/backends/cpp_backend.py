"""C++ kernels: one string, built by the system's compiler, called through ctypes.

A kernel file holds its C++ in ``SOURCE`` with ``extern "C"`` functions and calls
``cpp_backend.load(SOURCE)``.  Libraries are cached by the hash of everything that shapes the machine code:
source, flags, compiler version and the processor's feature list.  OpenMP comes from the copy of libgomp
that PyTorch has loaded, so that both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import LoadedKernel

if TYPE_CHECKING:
    import torch

NAME = "cpp"
# No -ffast-math: it would change results.  Dropping errno, traps and signalling NaNs changes none.
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-tree-loop-distribute-patterns", "-Wno-psabi",
)  # fmt: skip
COMPILE_TIMEOUT_S = 120
_MESSAGE_LIMIT = 4000


class CompileError(RuntimeError):
    """The compiler refused the source; the text is its message, bounded."""


@dataclass(frozen=True)
class Library:
    """A loaded shared library."""

    path: Path
    handle: ctypes.CDLL

    def function(self, name: str, *, pointers: int, ints: int = 0) -> Callable[..., None]:
        """The ``extern "C" void name(pointers..., ints...)``: addresses first, then C ints."""
        fn = getattr(self.handle, name)
        fn.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int] * ints
        fn.restype = None
        return fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


@cache
def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX`` when set, else c++, g++ or clang++."""
    chosen = os.environ.get("CXX")
    names = [shlex.split(chosen)[0]] if chosen and shlex.split(chosen) else ["c++", "g++", "clang++"]
    return next((found for found in map(shutil.which, names) if found), None)


@cache
def _compiler_version(path: str) -> str:
    result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return (result.stdout or result.stderr).splitlines()[0] if (result.stdout or result.stderr) else ""


@cache
def _processor() -> str:
    """What ``-march=native`` resolves to, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


@cache
def _openmp() -> tuple[str, ...]:
    """Link arguments for PyTorch's own OpenMP runtime, or the compiler's if that one isn't there."""
    import torch

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if libraries:
        return str(libraries[0]), f"-Wl,-rpath,{libraries[0].parent}"
    return ("-fopenmp",)


def available(device: str) -> tuple[bool, str]:
    """Whether C++ kernels can be built and run for ``device``."""
    if device.split(":")[0] != "cpu":
        return False, "C++ kernels run on the CPU only"
    if compiler() is None:
        chosen = os.environ.get("CXX")
        return False, f"no C++ compiler ({f'CXX={chosen} not found' if chosen else 'c++, g++ or clang++'})"
    return True, ""


def cache_dir() -> Path:
    """Where libraries are kept; a private temporary folder when the user's cache can't be written."""
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("autokernel")) / "cpp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _private_dir()


@cache
def _private_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="autokernel-cpp-"))


def build(source: str, flags: Sequence[str] = ()) -> Path:
    """Compile ``source`` to a shared library and return its path; a cached one is reused.

    Raises `CompileError` with the compiler's message.  The library appears under its final name only when
    it is whole, so processes that build the same source at once don't disturb each other.
    """
    path = compiler()
    if path is None:
        raise CompileError(available("cpu")[1])
    options = [*FLAGS, *flags]
    parts = [source, *options, *_openmp(), path, _compiler_version(path), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = cache_dir()
    target = folder / f"{digest}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(prefix=f".{digest[:8]}-", dir=folder) as scratch:
        unit, objects, library = (Path(scratch) / name for name in ("kernel.cpp", "kernel.o", "kernel.so"))
        unit.write_text(source, encoding="utf-8")
        _run([path, *options, "-c", str(unit), "-o", str(objects)], scratch)
        _run([path, "-shared", str(objects), "-o", str(library), *_openmp()], scratch)
        library.replace(target)
    return target


def _run(command: list[str], cwd: str) -> None:
    try:
        result = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"the C++ compiler took longer than {COMPILE_TIMEOUT_S} s") from error
    if result.returncode:
        message = (result.stderr or result.stdout).replace(cwd + "/", "").strip()
        if len(message) > _MESSAGE_LIMIT:
            message = message[:_MESSAGE_LIMIT] + " ..."
        raise CompileError(message or f"the C++ compiler ended with status {result.returncode}")


@cache
def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def load_source(source: str, flags: Sequence[str] = ()) -> Library:
    """Build (or find) and load a library; see `build` for the errors."""
    path = build(source, tuple(flags))
    return Library(path, _open(path))


def pointers(*tensors: torch.Tensor) -> tuple[list[ctypes.c_void_p], list[torch.Tensor]]:
    """``(addresses, owners)`` of CPU tensors, made contiguous first where they are not.

    Keep ``owners`` until the call is over: a contiguous copy lives only as long as they do.
    """
    owners = [t.resolve_conj().resolve_neg().contiguous() for t in tensors]
    for t in owners:
        if t.device.type != "cpu":
            raise ValueError(f"a C++ kernel was given a tensor on {t.device}")
    return [ctypes.c_void_p(t.data_ptr()) for t in owners], owners


def load(path: Path | str, source: str | None = None, flags: Sequence[str] = ()) -> Any:
    """Two uses: ``load(SOURCE, flags=...)`` inside a kernel file gives a `Library`; the backend registry
    calls ``load(path, source)`` to execute a kernel file and gets a `LoadedKernel`.
    """
    if source is None:
        return load_source(str(path), flags)
    return _load_file(Path(path), source)


def _load_file(path: Path, source: str) -> LoadedKernel:
    from ._module import finish

    return finish(path, source)
