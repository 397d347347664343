"""Flat buffers owned by the judge that a worker maps: how tensors cross without being serialised.

On a CPU an arena is a file in shared memory that both processes map.  On a CUDA device the judge
allocates it with torch, in a memory pool of its own (so that no other tensor of the judge, such as an
expected output, shares the block), and hands over a CUDA IPC handle as bytes.  Where IPC is not
available the worker maps a host file instead, and copies to and from its own device buffer.

Nothing here is protected against a worker that writes where it should not: the judge compares inputs
with its own copy after every run, and never keeps an expected value in an arena.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from autokernel.judge.layout import TensorSpec, aligned

_serial = itertools.count()
_pools = threading.Lock()
"""torch aborts the process when one thread drops a memory pool while another allocates from one."""


@dataclass(frozen=True, slots=True)
class Export:
    """One worker's right to map an arena: what it is told, and the raw IPC fields to release it by."""

    told: dict[str, Any]
    fields: tuple[Any, ...] = ()


class Arena:
    """The judge's side. ``storage`` is on ``device`` or, without IPC, on the host."""

    def __init__(self, device: torch.device, nbytes: int, folder: Path, *, ipc: bool = True) -> None:
        self.device, self.nbytes = device, max(aligned(nbytes), 256)
        self._spare: tuple[Any, ...] | None = None
        self._path: Path | None = None
        self._pool: Any = None
        self.kind = "file"
        if device.type == "cuda" and ipc:
            try:
                self._allocate_cuda()
                self.kind = "cuda-ipc"
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # no IPC in this container or on this platform
                self._spare = None
        if self.kind == "file":
            self._path = _shared_folder(folder, self.nbytes) / f"arena-{os.getpid()}-{next(_serial)}"
            self.storage = _mapped_file(str(self._path), self.nbytes)

    def _allocate_cuda(self) -> None:
        with _pools:
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                block = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        self.storage: torch.UntypedStorage = block.untyped_storage()
        self._spare = self.storage._share_cuda_()

    def export(self) -> Export:
        """What a worker needs to map this arena: one export per worker, released when that one is dead."""
        if self.kind == "file":
            return Export({"kind": "file", "path": str(self._path), "nbytes": self.nbytes})
        fields, self._spare = self._spare or self.storage._share_cuda_(), None
        plain = [f.hex() if isinstance(f, bytes) else f for f in fields]
        is_bytes = [isinstance(f, bytes) for f in fields]
        return Export({"kind": "cuda-ipc", "fields": plain, "is_bytes": is_bytes}, fields)

    def release(self, export: Export) -> None:
        """The worker that mapped ``export`` has been killed: give back the reference it held.

        A killed process can't do it itself, and the block would otherwise stay in torch's limbo for ever.
        """
        if export.fields:
            handle, offset = export.fields[4:6]
            with contextlib.suppress(RuntimeError):
                torch.UntypedStorage._release_ipc_counter(handle, offset, device=self.device)

    def view(self, spec: TensorSpec) -> Tensor:
        return spec.view(self.storage)

    def bytes(self) -> Tensor:
        return TensorSpec(torch.uint8, (self.nbytes,), (1,)).view(self.storage)

    def sync(self) -> None:
        """Make the judge's writes visible before a worker is told to read them."""
        if self.kind == "cuda-ipc":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self._spare is not None:
            self.release(Export({}, self._spare))
            self._spare = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        with _pools:
            self.storage = torch.UntypedStorage(0)
            self._pool = None


class MappedArena:
    """The worker's side of one arena.

    ``views`` are on the worker's device. Without IPC, ``pull`` brings inputs over from the host file and
    ``push`` takes outputs back.
    """

    def __init__(self, exported: dict[str, Any], device: torch.device) -> None:
        self.host: torch.UntypedStorage | None = None
        if exported["kind"] == "cuda-ipc":
            fields = [
                bytes.fromhex(f) if is_bytes else f
                for f, is_bytes in zip(exported["fields"], exported["is_bytes"], strict=True)
            ]
            self.storage = cast(torch.UntypedStorage, torch.UntypedStorage._new_shared_cuda(*fields))
        else:
            mapped = _mapped_file(exported["path"], exported["nbytes"])
            if device.type == "cpu":
                self.storage = mapped
            else:
                self.host = mapped
                self.storage = torch.UntypedStorage(exported["nbytes"], device=device)

    def view(self, spec: TensorSpec) -> Tensor:
        return spec.view(self.storage)

    def pull(self) -> None:
        if self.host is not None:
            self.storage.copy_(self.host, False)

    def push(self) -> None:
        if self.host is not None:
            self.host.copy_(self.storage, False)


def _mapped_file(path: str, nbytes: int) -> torch.UntypedStorage:
    """The file's bytes, shared with every other process that maps it; made if it is not there."""
    return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(path, True, nbytes))


def _shared_folder(scratch: Path, nbytes: int) -> Path:
    """/dev/shm where it has room to spare (a container's default is 64 MB, and overrunning it is SIGBUS)."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 * nbytes + (64 << 20):
        folder = shm / scratch.name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    return scratch


def remove_shared_folder(scratch: Path) -> None:
    """Delete what ``_shared_folder`` may have made for this judge's scratch folder."""
    shutil.rmtree(Path("/dev/shm") / scratch.name, ignore_errors=True)
