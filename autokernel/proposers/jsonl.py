"""Files of one JSON object per line that are only ever appended to, whole lines at a time."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from autokernel.errors import RunFolderError


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line and fsync it.  What a kill left of a last line is cut off first.

    Raises RunFolderError when the disk refuses it; the file then ends as it did.
    """
    data = (json.dumps(entry) + "\n").encode("ascii")  # escapes keep even a lone surrogate writable
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                size = path.read_bytes().rfind(b"\n") + 1
                os.ftruncate(fd, size)
            try:
                written = 0
                while written < len(data):
                    written += os.write(fd, data[written:])
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
    except OSError as error:
        raise RunFolderError(f"can't write {path}: {error.strerror}") from None


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole object of the file; lines that are none are passed over, and no file is an empty one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                found.append(entry)
    return found
