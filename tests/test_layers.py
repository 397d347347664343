"""The package's shape: imports point one way, and every plug-in file is in its folder's literal registry."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autokernel"

# From the bottom up.  A module may import from its own layer and from the ones above it in this list.  The
# longest matching name counts, so that a single module can sit lower than its package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "records", "torch_flags", "interrupt", "proposers.proposal"),
    ("hardware", "results", "run_folder", "scheduler"),
    ("capture",),
    ("regions", "roofline", "profile_records", "bound"),
    ("masks", "node_times", "findings", "profiling"),
    ("backends", "judge"),
    ("playbook",),
    ("proposers", "extraction", "reference_text", "reference_task"),
    ("tuner", "memory", "rows"),
    ("loop",),
    ("integrate",),
    ("report",),
    ("doctor", "bench", "session"),
    ("optimize", "dry_run"),
    ("cli",),
    ("__main__",),
)


def modules() -> dict[str, Path]:
    """Dotted name below ``autokernel`` -> file.  The package's own ``__init__`` is the lazy front door."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            found[".".join(parts)] = path
    return found


MODULES = modules()


def layer(module: str) -> int | None:
    best, length = None, -1
    for rank, names in enumerate(LAYERS):
        for name in names:
            if (module == name or module.startswith(name + ".")) and len(name) > length:
                best, length = rank, len(name)
    return best


def imports(name: str, path: Path) -> list[tuple[int, str, bool]]:
    """(line, module below autokernel, at import time) for every import in a file, also in functions.

    Imports for type checkers only are left out: nothing happens when they run, because they don't.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: list[tuple[int, str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child, top)
            return
        if isinstance(node, ast.Import):
            targets = [a.name.removeprefix("autokernel").removeprefix(".") for a in node.names
                       if a.name.split(".")[0] == "autokernel"]  # fmt: skip
            found.extend((node.lineno, t, top) for t in targets)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                base += node.module.split(".") if node.module else []
            elif node.module and node.module.split(".")[0] == "autokernel":
                base = node.module.split(".")[1:]
            else:
                base = None
            if base is not None:
                for alias in node.names:
                    full = ".".join([*base, alias.name])
                    found.append((node.lineno, full if full in MODULES else ".".join(base), top))
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(tree, True)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    own = layer(name)
    assert own is not None, f"{name} has no layer: put it into LAYERS"
    wrong = []
    for line, target, _ in imports(name, MODULES[name]):
        if not target:
            continue  # `import autokernel`, the lazy front door
        rank = layer(target)
        if rank is None or rank > own:
            wrong.append(f"{name}:{line} imports {target}")
    assert not wrong


def test_modules_form_a_dag_at_import_time() -> None:
    edges = {
        name: {t for _, t, top in imports(name, path) if top and t and t != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name in done:
            return
        for target in sorted(edges.get(name, ())):
            # A package's __init__ that gathers its own files is one thing with them.
            if not (target.startswith(name + ".") and MODULES[name].name == "__init__.py"):
                walk(target, (*above, name))
        done.add(name)

    for name in edges:
        walk(name, ())


def test_the_checks_see_a_wrong_import(tmp_path: Path) -> None:
    """This file's own test: an upward import, in a function and relative, is found."""
    path = tmp_path / "x.py"
    path.write_text("from .. import cli\ndef f():\n    from autokernel.loop import Limits\n")
    found = imports("regions.x", path)
    assert [(t, top) for _, t, top in found] == [("cli", True), ("loop", False)]
    assert all((layer(t) or 0) > (layer("regions.x") or 0) for _, t, _ in found)


# --- registries ------------------------------------------------------------------------------------------

# folder -> (module, name of the registry, files that are no plug-ins)
REGISTRIES = {
    "playbook/strategies": ("autokernel.playbook.strategies", "STRATEGIES", set()),
    "playbook/starters": ("autokernel.playbook.starters", "STARTERS", set()),
    "proposers/providers": ("autokernel.proposers.providers", "PROVIDERS", set()),
    "judge/stages": ("autokernel.judge.stages", "STAGES", set()),
    "backends": ("autokernel.backends", "BACKENDS", None),  # only files named *_backend.py
}


@pytest.mark.parametrize("folder", REGISTRIES)
def test_every_plug_in_is_in_its_registry(folder: str) -> None:
    module, name, helpers = REGISTRIES[folder]
    pytest.importorskip("torch")
    registry = getattr(importlib.import_module(module), name)
    entries = list(registry.values()) if isinstance(registry, dict) else list(registry)
    listed = {_file_of(entry) for entry in entries}
    pattern = "*_backend.py" if helpers is None else "*.py"
    files = {p.stem for p in (PACKAGE / folder).glob(pattern) if not p.stem.startswith("_")} - (
        helpers or set()
    )
    assert files, "an empty folder proves nothing"
    assert files <= listed, f"not in {name}: {sorted(files - listed)}"


def _file_of(entry: object) -> str:
    """The file of a registry's entry: its name, a module, or something that was defined in one."""
    if isinstance(entry, tuple):  # (family, file name)
        entry = str(entry[-1]).removesuffix(".py")
    if isinstance(entry, str):
        return entry
    name = getattr(entry, "__name__", "") if hasattr(entry, "__file__") else getattr(entry, "__module__", "")
    return str(name).split(".")[-1]


@pytest.mark.parametrize("folder", REGISTRIES)
def test_registries_are_literal(folder: str) -> None:
    """A list or a dict display in the package's __init__, so that a reader sees at once what there is."""
    _, name, _ = REGISTRIES[folder]
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and any(isinstance(t, ast.Name) and t.id == name for t in _targets(node))
    ]
    assert len(values) == 1 and isinstance(values[0], ast.List | ast.Dict | ast.Tuple)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
