"""results.tsv: the journal of a run, and its only state.

One line per experiment, crashes and baselines included.  Header, writer and reader derive from
`autokernel.records.Experiment`.  A row is appended by a single write and fsynced before `Journal.append`
returns, so that a kill loses at most the row that was being written; what such a kill leaves behind is
set aside as ``results.tsv.torn-<n>`` the next time the journal is opened for writing.

In text, backslash, tab, newline and carriage return are written as ``\\\\``, ``\\t``, ``\\n`` and ``\\r``,
and a quote at the start of a cell as ``\\"``, so that readers with CSV quoting see it as plain text too.
An unknown value is an empty cell.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel.errors import RunFolderError
from autokernel.records import COLUMNS, FAMILIES, Experiment, column_types

if TYPE_CHECKING:
    import pandas as pd

FILE_NAME = "results.tsv"
HEADER = "\t".join(COLUMNS)
REQUIRED = COLUMNS[:3]
"""Without these a row can't be placed; a file that lacks any other column is an older one, and readable."""

# What earlier tools called the op families; their files stay readable.
_OLD_FAMILIES = {
    "matmul": "linear",
    "layernorm": "norm",
    "rmsnorm": "norm",
    "flash_attention": "attention",
    "fused_mlp": "gated_mlp",
    "rotary_embedding": "rope",
    "reduce": "reduction",
}
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r", '"': '"'}
_TYPES = column_types()


def format_cell(value: object) -> str:
    """One cell.  ``None`` and NaN become empty; floats keep nine significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = re.sub(r"[\\\t\n\r]", lambda m: _ESCAPES[m.group()], str(value))
        return "\\" + text if text.startswith('"') else text
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return str(value)


def parse_cell(name: str, text: str) -> Any:
    """The value of column ``name``: typed, ``None`` for an empty number.  Raises ValueError."""
    kind = _TYPES[name]
    if kind is str:
        return re.sub(r"\\(.)", lambda m: _UNESCAPES.get(m.group(1), m.group()), text)
    return kind(text) if text else None


def format_row(row: Experiment) -> str:
    return "\t".join(format_cell(getattr(row, name)) for name in COLUMNS)


def parse_row(header: list[str], line: str) -> Experiment:
    """A line back into an `Experiment`.  Raises ValueError with the reason."""
    cells = line.split("\t")
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells, {len(header)} columns")
    values = {name: parse_cell(name, cell) for name, cell in zip(header, cells, strict=True)}
    kind = values["kernel_type"]
    if kind not in FAMILIES:
        values["kernel_type"] = _OLD_FAMILIES.get(kind, "other")
    return Experiment(**values)


def results_path(place: str | Path) -> Path:
    """``place`` is a run folder or a TSV file; the path of its results.tsv."""
    path = Path(place)
    return path / FILE_NAME if path.is_dir() else path


def read_results(place: str | Path) -> list[Experiment]:
    """Every whole row of a run folder's journal or of a TSV file, in order; a torn last line is left out.

    Nothing is changed on disk.  Raises RunFolderError when there is no such file, when it isn't a
    results.tsv, or when a line in it is damaged.
    """
    path = results_path(place)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"can't read {path}: {error.strerror}") from None
    header, rows, _ = _parse(path, data)
    if not header:
        raise RunFolderError(f"{path} is empty: no experiment has been logged there")
    return rows


def results_frame(place: str | Path) -> pd.DataFrame:
    """The journal of a run folder (or a TSV file) as a typed frame: ``Int64``, ``float64``, ``string``."""
    import pandas as pd

    rows = read_results(place)
    dtypes = {int: "Int64", float: "float64", str: "string"}
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    return pd.DataFrame({n: pd.Series(v, dtype=dtypes[_TYPES[n]]) for n, v in columns.items()})  # type: ignore[call-overload]


def _parse(path: Path, data: bytes) -> tuple[list[str], list[Experiment], int]:
    """Header, rows, and how many bytes of ``data`` are whole (what follows is a torn line)."""
    whole = data.rfind(b"\n") + 1
    text = data[:whole].decode("utf-8", errors="replace")
    lines = text.split("\n")[:-1]
    if not lines:
        return [], [], 0
    header = lines[0].rstrip("\r").split("\t")
    unknown = [name for name in header if name not in _TYPES]
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise RunFolderError(f"{path} is not a results.tsv: it has no column {missing[0]!r}")
    if unknown:
        raise RunFolderError(
            f"{path} has a column {unknown[0]!r} that this version doesn't know; "
            "use the autokernel that wrote it, or another folder with --run"
        )
    rows: list[Experiment] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(parse_row(header, line.rstrip("\r")))
        except (ValueError, TypeError) as error:
            if number == len(lines) and whole == len(data):
                # A power cut can leave the last line at its full length, but not its content.
                return header, rows, len(data) - len(data[:-1].rsplit(b"\n", 1)[1]) - 1
            raise RunFolderError(f"{path}, line {number} is damaged ({error}); repair or remove it") from None
    return header, rows, whole


class Journal:
    """results.tsv opened for appending.

    ``rows`` are the experiments that it holds; ``torn`` is where a torn last line was moved to, if there
    was one.  Several processes may append to one file (``bench`` in two terminals): each append takes the
    file lock and numbers its row after the last one in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn: Path | None = None
        self.rows: list[Experiment] = []
        self._size = 0
        try:
            with self._locked():
                self._load(set_aside=True)
        except OSError as error:
            raise RunFolderError(f"can't write {path}: {error.strerror}") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(self._fd)

    def _load(self, *, set_aside: bool) -> None:
        data = self.path.read_bytes()
        header, self.rows, whole = _parse(self.path, data)
        if header and header != list(COLUMNS):
            raise RunFolderError(
                f"{self.path} was written by an older version: `autokernel report` reads it, "
                "but a new row needs another folder (--run) or --fresh"
            )
        if whole < len(data) and set_aside:
            self.torn = _set_aside(self.path, data[whole:])
            os.ftruncate(self._fd, whole)
            os.fsync(self._fd)
        if not header:
            self._write((HEADER + "\n").encode())
            _sync_folder(self.path.parent)
        self._size = os.fstat(self._fd).st_size

    def append(self, row: Experiment) -> Experiment:
        """Write ``row`` under the next number and return it with that number.

        Raises RunFolderError when the disk refuses it; the file is then as it was.
        """
        try:
            with self._locked():
                if os.fstat(self._fd).st_size != self._size:
                    self._load(set_aside=True)  # another process has appended
                number = max((r.experiment for r in self.rows), default=0) + 1
                line = format_row(replace(row, experiment=number))
                # What is kept in memory is what a resumed run will read: decisions don't differ by a digit.
                row = parse_row(list(COLUMNS), line)
                self._write((line + "\n").encode("utf-8", errors="replace"))
                self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise RunFolderError(f"can't write {self.path}: {error.strerror}") from None
        self.rows.append(row)
        return row

    def _write(self, data: bytes) -> None:
        before = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise

    # Views that the loop asks for.
    def of_task(self, task: str) -> list[Experiment]:
        return [r for r in self.rows if r.task == task]

    def baselines(self, task: str) -> dict[str, float]:
        """Latency in us of each of the task's baselines, by name."""
        rows = self.of_task(task)
        return {r.backend: r.latency_us for r in rows if r.status == "baseline" and r.latency_us}

    def tried(self, task: str) -> set[str]:
        """Hashes of the sources that have a verdict; an ``infra_error`` is none, and is tried again."""
        return {r.candidate for r in self.of_task(task) if r.candidate and r.status != "infra_error"}


def _set_aside(path: Path, torn: bytes) -> Path:
    number = 1
    while True:
        target = path.with_name(f"{path.name}.torn-{number}")
        try:
            with target.open("xb") as file:
                file.write(torn)
                file.flush()
                os.fsync(file.fileno())
            return target
        except FileExistsError:
            number += 1


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def source_id(source: str) -> str:
    """The name of a source by its content: the first 12 hex digits of its SHA-256."""
    return hashlib.sha256(source.encode("utf-8", errors="replace")).hexdigest()[:12]


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` as a whole: a reader, or a kill, sees the old text or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def source_path(task_dir: Path, candidate: str) -> Path:
    """Where the source with this hash lies in a task folder."""
    return task_dir / "attempts" / f"{candidate}.py"


def store_source(task_dir: Path, source: str) -> tuple[str, Path]:
    """Keep ``source`` in ``attempts/<sha12>.py`` of the task folder.  Returns the hash and the path."""
    name = source_id(source)
    path = source_path(task_dir, name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, source)
    return name, path
