"""Flat buffers owned by the judge that a worker maps: how tensors cross without being serialised.

On a CPU an arena is a file in shared memory that both processes map.  On a CUDA device it is a block of
device memory of its own (so that nothing else of the judge, such as an expected output, can be seen through
it), handed over as the bytes of a CUDA IPC handle.  Where IPC is not available the worker maps a host file
instead, and copies to and from its own device buffer.

Nothing here is protected against a worker that writes where it should not: the judge compares inputs
with its own copy after every run, and never keeps an expected value in an arena.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from autokernel.judge.cuda_memory import SharedBlock, map_block
from autokernel.judge.layout import TensorSpec, aligned

_serial = itertools.count()


class Arena:
    """The judge's side. ``storage`` is on ``device`` or, without IPC, on the host."""

    def __init__(self, device: torch.device, nbytes: int, folder: Path, *, ipc: bool = True) -> None:
        self.device, self.nbytes = device, max(aligned(nbytes), 256)
        self._path: Path | None = None
        self._block: SharedBlock | None = None
        self.storage: torch.UntypedStorage
        if device.type == "cuda" and ipc:
            try:
                self._block = SharedBlock(self.nbytes, device)
                self.storage = self._block.storage
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, OSError, AttributeError):  # no IPC in this container or on this platform
                self._block = None
        if self._block is None:
            self._path = _shared_folder(folder, self.nbytes) / f"arena-{os.getpid()}-{next(_serial)}"
            self.storage = _mapped_file(str(self._path), self.nbytes)

    @property
    def kind(self) -> str:
        return "file" if self._block is None else "cuda-ipc"

    def export(self, folders: Sequence[Path] = ()) -> dict[str, Any]:
        """What a worker needs to map this arena. Close the arena only when that worker is gone.

        A file is linked into that of the worker's ``folders`` which is on the same file system: a worker
        sees the arenas that it is given, and no others.
        """
        if self._path is not None:
            path = self._path
            for folder in folders:
                if folder.stat().st_dev == path.stat().st_dev:
                    path = folder / path.name
                    with contextlib.suppress(FileExistsError):
                        path.hardlink_to(self._path)
                    break
            return {"kind": "file", "path": str(path), "nbytes": self.nbytes}
        assert self._block is not None
        return {"kind": "cuda-ipc", "handle": self._block.handle.hex(), "nbytes": self._block.nbytes}

    def view(self, spec: TensorSpec) -> Tensor:
        return spec.view(self.storage)

    def bytes(self) -> Tensor:
        return TensorSpec(torch.uint8, (self.nbytes,), (1,)).view(self.storage)

    def sync(self) -> None:
        """Make the judge's writes visible before a worker is told to read them."""
        if self._block is not None:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self.storage = torch.UntypedStorage(0)
        if self._block is not None:
            self._block.close()


class MappedArena:
    """The worker's side of one arena.

    ``views`` are on the worker's device. Without IPC, ``pull`` brings inputs over from the host file and
    ``push`` takes outputs back.
    """

    def __init__(self, exported: dict[str, Any], device: torch.device) -> None:
        self.host: torch.UntypedStorage | None = None
        if exported["kind"] == "cuda-ipc":
            self.storage = map_block(bytes.fromhex(exported["handle"]), exported["nbytes"], device)
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
