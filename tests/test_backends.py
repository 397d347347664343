"""Reading and loading kernel files, and the C++ builder."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from autokernel import backends
from autokernel.backends import BACKENDS, KernelSourceError, cpp_backend, load_kernel, read_kernel

GOOD = '''"""Doubles."""
import torch

BACKEND = "torch"
SHAPES = "any"
BLOCK = 64
SPACE = {"BLOCK": [64, 128]}


def prepack(w):
    return (w.t(),)


def kernel_fn(x, w):
    return x @ w
'''
ADD_ONE = """
extern "C" void run(const float* x, float* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = x[i] + 1.0f;
}
"""
needs_compiler = pytest.mark.skipif(cpp_backend.compiler() is None, reason="no C++ compiler")


def put(folder: Path, data: str | bytes, name: str = "kernel.py") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("data", [GOOD, GOOD.replace("\n", "\r\n"), b"\xef\xbb\xbf" + GOOD.encode()])
def test_read_and_load(tmp_path, data):
    path = put(tmp_path, data)
    info = read_kernel(path)
    assert (info.backend, info.shapes, info.space) == ("torch", "any", {"BLOCK": [64, 128]})
    assert info.has_prepack and info.docstring == "Doubles." and "\r" not in info.source
    kernel = load_kernel(path)
    assert kernel.backend == "torch" and kernel.space == info.space and kernel.shapes == "any"
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    assert kernel.prepack is not None
    assert torch.equal(kernel.fn(x, *kernel.prepack(w)), x @ w.t())


def test_reading_does_not_execute(tmp_path):
    path = put(tmp_path, "import os\nos._exit(3)\ndef kernel_fn(x):\n    return x\n")
    assert read_kernel(path).backend == "torch"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("x = (\n", "line 1: '(' was never closed"),
        ("def kernel_fn(x):\nreturn x\n", "line 2: expected an indented block"),
        ("def other(x):\n    return x\n", "no kernel_fn"),
        ("BACKEND = 'fortran'\ndef kernel_fn(x):\n    return x\n", "unknown BACKEND 'fortran'; one of cpp"),
        ("BACKEND = 3\ndef kernel_fn(x):\n    return x\n", "BACKEND must be a str"),
        ("BACKEND = 'tor' + 'ch'\ndef kernel_fn(x):\n    return x\n", "BACKEND must be a literal"),
        ("SHAPES = 'some'\ndef kernel_fn(x):\n    return x\n", "SHAPES must be"),
        ("SPACE = {'N': []}\nN = 1\ndef kernel_fn(x):\n    return x\n", "non-empty lists"),
        ("SPACE = {'N': [1]}\ndef kernel_fn(x):\n    return x\n", "not a module-level constant"),
        (b"\xff\xfe\x00k", "not UTF-8"),
        (b"def kernel_fn(x):\n    return x\n\0", "NUL byte"),
        ("# " + "x" * 1_000_001 + "\n", "larger than 1 MB"),
        ("(" * 5000, "kernel.py"),
    ],
)
def test_what_can_not_be_a_kernel(tmp_path, data, words):
    path = put(tmp_path, data)
    for reader in (read_kernel, load_kernel):
        with pytest.raises(KernelSourceError) as caught:
            reader(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_folders_and_missing_files(tmp_path):
    with pytest.raises(KernelSourceError, match="is a folder"):
        read_kernel(tmp_path)
    with pytest.raises(KernelSourceError, match="no such file"):
        read_kernel(tmp_path / "none.py")


def test_kernel_fn_must_be_callable(tmp_path):
    with pytest.raises(KernelSourceError, match="not callable"):
        load_kernel(put(tmp_path, "kernel_fn = 3\n"))


def test_a_module_that_raises_passes_through(tmp_path):
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        load_kernel(put(tmp_path, "1 / 0\ndef kernel_fn(x):\n    return x\n"))
    assert not [m for m in set(sys.modules) - before if m.startswith("autokernel_kernel_")]


def test_two_versions_side_by_side(tmp_path):
    path = put(tmp_path, "def kernel_fn(x):\n    return x + 1\n")
    first = load_kernel(path)
    put(tmp_path, "def kernel_fn(x):\n    return x + 2\n")
    second = load_kernel(path)
    assert first.fn(1) == 2 and second.fn(1) == 3


@pytest.mark.parametrize("name", BACKENDS)
def test_registry(name):
    module = importlib.import_module(f"autokernel.backends.{BACKENDS[name]}")
    assert name == module.NAME and backends.backend(name) is module
    for device in ("cpu", "cuda", "cuda:0"):
        there, why = module.available(device)
        assert there or why


def test_availability():
    assert cpp_backend.available("cuda") == (False, "C++ kernels run on the CPU only")
    with pytest.raises(KernelSourceError, match="unknown BACKEND"):
        backends.backend("fortran")


@needs_compiler
def test_cpp_builds_once_and_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = cpp_backend.load(ADD_ONE)
    run = library.function("run", pointers=2, ints=1)
    x, out = torch.randn(100), torch.empty(100)
    run(x.data_ptr(), out.data_ptr(), 100)
    assert torch.equal(out, x + 1)
    first = library.path.stat().st_mtime_ns
    assert cpp_backend.load(ADD_ONE).path.stat().st_mtime_ns == first
    assert cpp_backend.build(ADD_ONE, ["-DX=1"]) != library.path
    assert [p.suffix for p in library.path.parent.iterdir()] == [".so", ".so"]  # no scratch left behind


@needs_compiler
def test_cpp_error_is_the_compilers_own_and_bounded():
    with pytest.raises(cpp_backend.CompileError) as caught:
        cpp_backend.load('extern "C" void run() { undefined_name(); }')
    assert "undefined_name" in str(caught.value) and "kernel.cpp:1" in str(caught.value)
    many = 'extern "C" void run() {' + "\n".join(f"wrong_{k}();" for k in range(2000)) + "}"
    with pytest.raises(cpp_backend.CompileError) as caught:
        cpp_backend.load(many)
    assert len(str(caught.value)) < 5000


@needs_compiler
def test_cpp_in_a_read_only_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    path = cpp_backend.build(ADD_ONE + "// elsewhere\n")
    assert path.is_file() and not str(path).startswith(str(blocked))


@needs_compiler
def test_cpp_concurrent_builds(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(cpp_backend.build(ADD_ONE + "// many\n")))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(paths)) == 1 and len(paths) == 4


def test_no_compiler(monkeypatch):
    code = "from autokernel.backends import cpp_backend as c; print(c.available('cpu'))"
    env = {**os.environ, "PATH": "/nonexistent"}
    env.pop("CXX", None)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert result.stdout.startswith("(False, 'no C++ compiler")
    env["CXX"] = "missing-compiler"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "CXX=missing-compiler not found" in result.stdout


@needs_compiler
def test_cpp_shares_torchs_thread_pool():
    """One OpenMP runtime in the process: two would keep each other's threads spinning."""
    cpp_backend.load('#include <omp.h>\nextern "C" void run(int* n) { *n = omp_get_max_threads(); }\n')
    torch.ones(1000).sum()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


def test_pointers():
    x = torch.arange(6.0).view(2, 3).t()
    addresses, owners = cpp_backend.pointers(x, torch.ones(2))
    assert owners[0].is_contiguous() and torch.equal(owners[0], x)
    assert addresses[1].value == owners[1].data_ptr()
    with pytest.raises(ValueError, match="meta"):
        cpp_backend.pointers(torch.ones(2, device="meta"))
