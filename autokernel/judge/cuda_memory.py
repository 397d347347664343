"""Device memory that another process can map, by the CUDA driver's own calls.

torch can share tensors between processes, too, but through its allocator: the mapped block holds whatever
else lies in it, and what a killed process held stays counted for ever.  Here a block is one allocation, in
whole granules (the driver packs smaller ones together, and a handle opens all of that), and it is freed when
we say so.  Close a block only when the processes that mapped it are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

GRANULE = 2 << 20
_LAZY_PEER_ACCESS = 1


class CudaDriverError(RuntimeError):
    """A driver call failed; the message has the call and the driver's name for the error."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class SharedBlock:
    """``nbytes`` of device memory of our own, zeroed. Raises CudaDriverError or torch.OutOfMemoryError."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self.nbytes = device, -(-nbytes // GRANULE) * GRANULE
        pointer, handle = ctypes.c_uint64(), _Handle()
        with _context(device):
            try:
                _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(self.nbytes))
            except CudaDriverError as error:
                if "OUT_OF_MEMORY" not in str(error):
                    raise
                torch.cuda.empty_cache()  # torch may hold what we need
                try:
                    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(self.nbytes))
                except CudaDriverError as again:
                    raise torch.OutOfMemoryError(f"{nbytes >> 20} MiB of device memory: {again}") from again
            self._pointer: int = pointer.value
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
            except CudaDriverError:
                _call("cuMemFree_v2", pointer)
                raise
        self.handle = bytes(handle.reserved)
        block = _wrapped(self._pointer, self.nbytes, device)
        block.zero_()
        self.storage = block.untyped_storage()

    def close(self) -> None:
        """Free it. No tensor on it may be used afterwards."""
        if self._pointer:
            torch.cuda.synchronize(self.device)
            with _context(self.device):
                _call("cuMemFree_v2", ctypes.c_uint64(self._pointer))
            self._pointer, self.storage = 0, torch.UntypedStorage(0)


def map_block(handle: bytes, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Another process's block, by its handle; mapped for as long as this process lives."""
    pointer = ctypes.c_uint64()
    with _context(device):
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
    return _wrapped(pointer.value, nbytes, device).untyped_storage()


class _Memory:
    """What torch wraps without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def _wrapped(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    block: Tensor = torch.as_tensor(_Memory(pointer, nbytes), device=device)
    if block.data_ptr() != pointer:
        raise CudaDriverError("torch copied a block instead of wrapping it")
    return block


_retained: dict[int, ctypes.c_void_p] = {}


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """The device's primary context, the one that torch uses, current on this thread.

    It is held for good: were it given back before torch's runtime has taken it up, it would be destroyed,
    and our blocks with it.
    """
    torch.cuda.init()
    index = device.index or 0
    if index not in _retained:
        context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(index))
        _retained[index] = context
    _call("cuCtxPushCurrent_v2", _retained[index])
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


_driver: Any = None


def _call(name: str, *args: Any) -> None:
    global _driver
    if _driver is None:
        _driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(_driver, name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver.cuGetErrorName(code, ctypes.byref(text))
        raise CudaDriverError(f"{name}: {(text.value or b'').decode() or code}")
