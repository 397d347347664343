"""The folder of one run: who owns it, and whether this command may go on in it.

``run.json`` is written once, when the run starts: the arguments that fix what is measured, the versions and
the device.  A later command on the same folder must agree with it, or timings of different things would end
up in one table.  What may change between commands (``--budget``, ``--top``, ``--llm``) is not in it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autokernel.errors import RunFolderError
from autokernel.results import FILE_NAME, Journal, write_text_atomically

FORMAT = 1
LOCK = ".lock"


def now() -> str:
    """The time as the journal writes it: UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_stem(model: str) -> str:
    """The default run name of a model source: ``models/gpt2.py`` -> ``gpt2``, ``hf:ORG/Name`` -> ``name``."""
    text = model.rstrip("/")
    if text.endswith((".py", ".pt", ".safetensors")):
        stem = Path(text).stem
    else:
        stem = re.split(r"[/:]", text)[-1]
    return re.sub(r"[^\w.\-]+", "_", stem).strip(".").lower() or "run"


@dataclass(frozen=True)
class RunRecord:
    """What run.json holds.  ``identity`` is a hash of the model's source; all values are JSON."""

    arguments: dict[str, Any]
    identity: str
    versions: dict[str, str]
    device: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "created": now(),
            "arguments": self.arguments,
            "identity": self.identity,
            "versions": self.versions,
            "device": self.device,
        }


class RunFolder:
    """A run folder that this process holds the lock of.

    Two steps, so that a folder that can't be used is reported before the model is loaded: `RunFolder(path)`
    checks that it is ours to write in and takes the lock, `claim` compares or writes run.json.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.name = path.name or path.resolve().name
        self._lock: IO[str] | None = None
        self._new = False
        try:
            if fresh and path.exists():
                self._move_aside()
            self._new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            self._check_content()
            self._take_lock()
        except OSError as error:
            raise RunFolderError(
                f"can't write in the run folder {path}: {error.strerror}; choose another one with --run"
            ) from None

    @property
    def tasks_dir(self) -> Path:
        return self.path / "tasks"

    @property
    def moved_to(self) -> Path | None:
        """Where ``fresh`` moved the folder that was here before."""
        return getattr(self, "_moved_to", None)

    def _entries(self) -> set[str]:
        return {p.name for p in self.path.iterdir()} - {LOCK}

    def _check_content(self) -> None:
        entries = {e for e in self._entries() if not e.startswith(".")}
        if entries and "run.json" not in entries:
            if FILE_NAME in entries:
                raise RunFolderError(
                    f"{self.path} holds a run of an older format (no run.json): "
                    "choose another folder with --run, or move it aside with --fresh"
                )
            raise RunFolderError(f"{self.path} is not a run folder and not empty: choose another with --run")

    def _move_aside(self) -> None:
        """Rename what is here to ``<name>.old-<n>``: a fresh start deletes nothing."""
        if not self.path.is_dir():
            return  # mkdir reports it
        entries = self._entries()
        if not entries:
            return
        if not entries & {"run.json", FILE_NAME}:
            raise RunFolderError(f"{self.path} is not a run folder and not empty: choose another with --run")
        self._take_lock()  # not under the feet of a run that is going on
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(target)
        self.close()
        self._moved_to = target

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        file = (self.path / LOCK).open("a+", encoding="utf-8")
        try:
            # A POSIX record lock: the system drops it with this process, and children don't inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            who = f" (process {holder})" if holder else ""
            raise RunFolderError(
                f"another autokernel{who} is working in {self.path}: wait for it, or choose another --run"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file

    def claim(self, record: RunRecord) -> bool:
        """Write run.json, or check that the one that is there is of the same run.

        Returns True when the run goes on from an earlier one.  Raises RunFolderError, naming the first
        difference, when it is of another model, other arguments, versions or device, or an older format.
        """
        path = self.path / "run.json"
        if not path.exists():
            try:
                text = json.dumps(record.to_json(), indent=1) + "\n"
                write_text_atomically(path, text)
            except OSError as error:
                raise RunFolderError(f"can't write {path}: {error.strerror}") from None
            return False
        old = read_run_json(self.path)
        advice = "choose another folder with --run, or start over with --fresh"
        if old.get("format") != FORMAT:
            raise RunFolderError(f"{self.path} has run format {old.get('format')}, not {FORMAT}: {advice}")
        arguments = old.get("arguments") or {}
        model = record.arguments.get("model")
        if arguments.get("model") != model:
            raise RunFolderError(
                f"{self.path} is a run of {arguments.get('model')}, not of {model}: {advice}"
            )
        for key in sorted(arguments.keys() | record.arguments.keys()):
            before, after = arguments.get(key), record.arguments.get(key)
            if before != after:
                raise RunFolderError(
                    f"{self.path} is a run with {_flag(key, before)}, not {_say(after)}: {advice}"
                )
        if old.get("identity") != record.identity:
            raise RunFolderError(f"the source of {model} has changed since {self.path}: {advice}")
        for what, before, after in (
            ("device", (old.get("device") or {}).get("name"), record.device.get("name")),
            ("torch", (old.get("versions") or {}).get("torch"), record.versions.get("torch")),
        ):
            if before != after:
                raise RunFolderError(
                    f"{self.path} was measured with {what} {before}, here it is {after}: {advice}"
                )
        return True

    def journal(self) -> Journal:
        return Journal(self.path / FILE_NAME)

    def close(self) -> None:
        if self._lock is None:
            return
        # A command that failed before it had anything to write leaves nothing behind.
        with contextlib.suppress(OSError):
            if self._new and not self._entries():
                (self.path / LOCK).unlink()
                self.path.rmdir()
        self._lock.close()
        self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _say(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(v) for v in value) or "none"
    return "none" if value is None else str(value)


def _flag(key: str, value: Any) -> str:
    name = {"input_shapes": "input-shape"}.get(key, key.replace("_", "-"))
    return f"--{name} {_say(value)}"


def read_run_json(folder: Path) -> dict[str, Any]:
    """run.json of a run folder.  Raises RunFolderError when it is missing or damaged."""
    path = folder / "run.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"can't read {path}: {error.strerror}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise RunFolderError(
            f"{path} is damaged: choose another folder with --run, or start over with --fresh"
        )
    return data
