"""Read what a kernel file declares without running it.

Everything here works on the text: the judge's own process uses it to refuse what can't be a kernel, and
must never execute a candidate.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAX_BYTES = 1_000_000


class KernelSourceError(Exception):
    """The file can't be a kernel at all; the text is one clear line."""


@dataclass(frozen=True)
class KernelInfo:
    """What the module-level constants of a kernel file say.

    ``space`` maps a tunable constant's name to the values to try, ``has_prepack`` whether static inputs are
    packed once, ``shapes`` whether it serves only the shapes it was written for.
    """

    path: Path
    source: str
    backend: str
    shapes: Literal["fixed", "any"]
    space: dict[str, list[Any]] | None
    has_prepack: bool
    docstring: str


def read_source(path: Path) -> str:
    """The text of a kernel file; a byte-order mark is dropped and CRLF becomes LF.

    Raises `KernelSourceError` for a missing file, a folder, more than 1 MB, or bytes that are not UTF-8.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise KernelSourceError(f"{path} is a folder, not a kernel file")
        if not path.is_file():
            raise KernelSourceError(f"{path}: no such file")
        if path.stat().st_size > MAX_BYTES:
            raise KernelSourceError(f"{path} is larger than {MAX_BYTES // 1_000_000} MB")
        data = path.read_bytes()
    except OSError as error:
        raise KernelSourceError(f"{path} can't be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KernelSourceError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise KernelSourceError(f"{path} holds a NUL byte: not a text file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse(path: Path, known: dict[str, Any] | None = None) -> KernelInfo:
    """`KernelInfo` of a file, by its syntax tree alone; ``known`` are the backends that exist.

    Raises `KernelSourceError` with Python's own message for a syntax error, and for a file without
    ``kernel_fn``, with an unknown ``BACKEND``, or with constants that are not literals.
    """
    source = read_source(path)
    try:
        tree = ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise KernelSourceError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise KernelSourceError(f"{path} can't be parsed: {error}") from error
    defined: set[str] = set()
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    defined.add(target.id)
                    constants[target.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            defined.add(node.target.id)
            constants[node.target.id] = node.value
        elif isinstance(node, ast.ImportFrom | ast.Import):
            defined |= {(a.asname or a.name).split(".")[0] for a in node.names}
    if "kernel_fn" not in defined:
        raise KernelSourceError(f"{path} defines no kernel_fn")
    backend = _literal(path, constants, "BACKEND", str, "torch")
    if known is not None and backend not in known:
        raise KernelSourceError(f"{path}: unknown BACKEND {backend!r}; one of {', '.join(sorted(known))}")
    shapes = _literal(path, constants, "SHAPES", str, "fixed")
    if shapes not in ("fixed", "any"):
        raise KernelSourceError(f'{path}: SHAPES must be "fixed" or "any", not {shapes!r}')
    space = _literal(path, constants, "SPACE", dict, None)
    if space is not None:
        for name, values in space.items():
            if not isinstance(name, str) or not isinstance(values, list | tuple) or not values:
                raise KernelSourceError(f"{path}: SPACE must map names to non-empty lists")
            if name not in constants:
                raise KernelSourceError(f"{path}: SPACE names {name}, which is not a module-level constant")
        space = {name: list(values) for name, values in space.items()}
    return KernelInfo(
        path, source, backend, shapes, space or None, "prepack" in defined, ast.get_docstring(tree) or ""
    )


def _literal(path: Path, constants: dict[str, ast.expr], name: str, kind: type, default: Any) -> Any:
    if name not in constants:
        return default
    try:
        value = ast.literal_eval(constants[name])
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise KernelSourceError(f"{path}: {name} must be a literal") from error
    if not isinstance(value, kind):
        raise KernelSourceError(f"{path}: {name} must be a {kind.__name__}, not {value!r}")
    return value
