"""What can be said of a kernel file without running it: an early error, never the defence."""

from __future__ import annotations

import ast
from pathlib import Path

from autokernel.judge.trial import StageResult, Trial, failed
from autokernel.records import Status

MAX_BYTES = 1 << 20
ALLOWED_IMPORTS = frozenset({
    "__future__", "torch", "triton", "math", "ctypes", "typing", "functools", "itertools", "operator",
    "dataclasses", "collections", "enum",
})  # fmt: skip
ALLOWED_PACKAGE = "autokernel.backends"


def run(trial: Trial) -> StageResult:
    wrong = check(trial.source)
    return failed(*wrong) if wrong else StageResult(True)


def check(path: Path) -> tuple[Status, str] | None:
    """(status, reason) when the file can't be judged, else None."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            return "compile_error", f"the file has {size} bytes; a kernel has at most {MAX_BYTES}"
        text = path.read_bytes().decode("utf-8-sig")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError) as error:
        return "compile_error", f"not a readable text file: {error}"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        return "compile_error", f"{type(error).__name__}: {error}" + (f" (line {line})" if line else "")
    if not _binds(tree, "kernel_fn"):
        return "compile_error", "defines no kernel_fn"
    for name in _imports(tree):
        top = name.split(".")[0]
        if (
            top not in ALLOWED_IMPORTS
            and name != ALLOWED_PACKAGE
            and not name.startswith(ALLOWED_PACKAGE + ".")
        ):
            return (
                "rejected",
                f"imports {name}; a kernel may import torch, triton, math, ctypes and {ALLOWED_PACKAGE}",
            )
    return None


def _binds(tree: ast.Module, name: str) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) == name:
            return True
    return False


def _imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [f"{base}.{alias.name}" for alias in node.names] if base == "autokernel" else [base]
    return names
