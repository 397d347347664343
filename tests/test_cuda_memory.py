"""Shared device memory against a driver made of malloc: calls, arguments, and what errors become."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from autokernel.judge import cuda_memory
from autokernel.judge.arena import Arena
from autokernel.judge.cuda_memory import GRANULE, CudaDriverError, SharedBlock, map_block

CUDA = torch.device("cuda", 0)

DRIVER = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
struct Handle { unsigned char reserved[64]; };
static int depth, retained, live, fail;
extern "C" {
int cuDevicePrimaryCtxRetain(void** c, int device) { *c = (void*)0x77; retained++; return device; }
int cuCtxPushCurrent_v2(void* c) { depth++; return c == (void*)0x77 ? 0 : 201; }
int cuCtxPopCurrent_v2(void**) { depth--; return 0; }
int cuMemAlloc_v2(uint64_t* p, size_t n) {
    if (depth != 1) return 201;
    if (fail == 2) return 2;
    *p = (uint64_t)calloc(n, 1); live++; return 0;
}
int cuMemFree_v2(uint64_t p) { if (depth != 1) return 201; free((void*)p); live--; return 0; }
int cuIpcGetMemHandle(Handle* h, uint64_t p) {
    if (fail == 801) return 801;
    memset(h, 0xA5, 64); memcpy(h->reserved, &p, 8); return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* p, Handle h, unsigned flags) {
    if (flags != 1 || h.reserved[63] != 0xA5) return 1;
    memcpy(p, h.reserved, 8); return 0;
}
int cuGetErrorName(int code, const char** text) {
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : "?";
    return 0;
}
void set_fail(int code) { fail = code; }
int get_live() { return live; }
int get_open() { return depth; }
int get_retained() { return retained; }
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source, library = tmp_path / "driver.cpp", tmp_path / "libdriver.so"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))

    def wrapped(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(pointer), dtype=torch.uint8)

    monkeypatch.setattr(cuda_memory, "_driver", loaded)
    monkeypatch.setattr(cuda_memory, "_retained", {})
    monkeypatch.setattr(cuda_memory, "_wrapped", wrapped)
    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    return loaded


def test_a_block_is_seen_through_its_handle(driver: ctypes.CDLL) -> None:
    block = SharedBlock(1000, CUDA)
    assert block.nbytes == GRANULE and len(block.handle) == 64
    mapped = map_block(block.handle, block.nbytes, CUDA)
    torch.empty(0, dtype=torch.uint8).set_(block.storage, 0, (8,)).copy_(torch.arange(8))
    assert torch.empty(0, dtype=torch.uint8).set_(mapped, 0, (8,)).tolist() == list(range(8))
    assert driver.get_live() == 1
    block.close()
    block.close()
    assert driver.get_live() == 0 and driver.get_open() == 0
    assert driver.get_retained() == 1  # for good: the context would be destroyed with the last one


def test_no_memory_and_no_ipc(driver: ctypes.CDLL, tmp_path: Path) -> None:
    driver.set_fail(2)
    with pytest.raises(torch.OutOfMemoryError, match="5 MiB of device memory: cuMemAlloc_v2: CUDA_ERROR_OUT"):
        SharedBlock(5 << 20, CUDA)
    driver.set_fail(801)
    with pytest.raises(CudaDriverError, match="cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"):
        SharedBlock(5 << 20, CUDA)
    assert driver.get_live() == 0 and driver.get_open() == 0
    arena = Arena(CUDA, 4096, tmp_path)  # goes through the host then
    assert arena.kind == "file" and arena.export()["kind"] == "file"
    arena.close()


def test_an_arena_on_a_device(driver: ctypes.CDLL, tmp_path: Path) -> None:
    arena = Arena(CUDA, 4096, tmp_path)
    told = arena.export()
    assert told["kind"] == "cuda-ipc" and told["nbytes"] == GRANULE
    arena.close()
    assert driver.get_live() == 0
