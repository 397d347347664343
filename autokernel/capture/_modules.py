"""Finding and importing the Python code of a model, and saying in one line what went wrong in it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType

from ..errors import UsageError

_FORMS = "use a .py file with build() and example_inputs(model), or package.module:callable"
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Source:
    """Where the model's code is.

    ``path`` is set for a file, ``module`` for an importable module; ``attribute`` is what to call in it
    when the model was given as ``module:callable``.  ``folder`` goes on ``sys.path`` while it loads.
    """

    label: str
    name: str
    folder: Path
    path: Path | None = None
    module: str | None = None
    attribute: str | None = None


def find(model: str) -> Source:
    """Which kind of source ``model`` is.  Raises `UsageError` when it is none, or not there."""
    for prefix, what in (("hf:", "Hugging Face models"), ("timm:", "timm models")):
        if model.startswith(prefix):
            raise UsageError(
                f"{model}: {what} can't be loaded by name yet: write a .py file whose build() makes it"
            )
    path = Path(model)
    if path.is_dir():
        raise UsageError(f"{model} is a folder, and folders can't be loaded yet: {_FORMS}")
    if path.suffix in _WEIGHTS:
        raise UsageError(
            f"{model} holds weights, not a model: give the model's .py file and --checkpoint {model}"
        )
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise UsageError(f"{model}: no such file{_similar(path)}")
        if path.suffix != ".py":
            raise UsageError(f"{model} is not a Python file: {_FORMS}")
        path = path.resolve()
        return Source(model, path.stem, path.parent, path=path)
    module, colon, attribute = model.partition(":")
    names = [*module.split("."), *attribute.split(".")] if colon else [""]
    if all(name.isidentifier() for name in names):
        return Source(model, attribute.split(".")[-1], Path.cwd(), module=module, attribute=attribute)
    if not colon and all(name.isidentifier() for name in module.split(".")):
        raise UsageError(f"{model}: no such file; {_FORMS}")
    raise UsageError(f"{model!r} is not a model source: {_FORMS}")


def _similar(path: Path) -> str:
    """`` (did you mean …?)`` when the folder has a file of nearly that name."""
    import difflib

    try:
        names = [p.name for p in path.parent.glob("*.py")]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


# Modules by path and content, so that loading a file twice gives the same classes.
_loaded: dict[tuple[Path, str], ModuleType] = {}
# Top-level helpers that a model's folder brought in: name -> folder.
_helpers: dict[str, Path] = {}


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put ``folder`` first on ``sys.path`` for a while.

    Helper modules that a *previous* model's folder brought in under a name that this folder uses too are
    dropped first: otherwise this model would silently get the other one's ``config.py``.
    """
    for name, home in list(_helpers.items()):
        if home != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
            del _helpers[name]
    before = set(sys.modules)
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if "." not in name and file and Path(file).resolve().is_relative_to(folder):
                _helpers[name] = folder


def import_source(source: Source) -> ModuleType:
    """Import the source's module.  Whatever it raises becomes a `UsageError` that says where."""
    if source.path is None:
        assert source.module is not None
        with user_code(f"{source.module} can't be imported", source):
            return importlib.import_module(source.module)
    try:
        content = source.path.read_bytes()
    except OSError as error:
        raise UsageError(f"{source.label} can't be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()[:12]
    key = (source.path, digest)
    if key not in _loaded:
        # A name of its own: a model in select.py or types.py must not shadow the standard library.
        place = hashlib.sha256(str(source.path).encode()).hexdigest()[:6]
        name = f"autokernel_model_{source.name}_{digest[:6]}{place}"
        spec = importlib.util.spec_from_file_location(name, source.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses, pickle and Dynamo look a class's module up by name
        try:
            with user_code(f"{source.label} can't be imported", source):
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        _loaded[key] = module
    return _loaded[key]


def local_sources(source: Source) -> list[Path]:
    """The source file and the helpers beside it that it imports, directly or through each other.

    Packages and installed modules are not followed.
    """
    if source.path is None:
        file = getattr(sys.modules.get(source.module or ""), "__file__", None)
        return [Path(file)] if file and file.endswith(".py") else []
    found = [source.path]
    for path in found:
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                stem = source.folder.joinpath(*name.split("."))
                for helper in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
                    if helper.is_file() and helper not in found:
                        found.append(helper)
    return [found[0], *sorted(found[1:])]


@contextlib.contextmanager
def user_code(what: str, source: Source) -> Iterator[None]:
    """Turn anything that the user's own code raises into a `UsageError`: ``what``, message and place."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # their code may raise anything
        raise UsageError(
            f"{what}: {type(error).__name__}: {one_line(error)}{_place(error, source)}"
        ) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or "no message"


def _place(error: BaseException, source: Source) -> str:
    """`` (file.py line N)``: the innermost frame in the model's own folder."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name} line {error.lineno})"
    place = ""
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        inside = (
            file.is_absolute() and file.is_relative_to(source.folder) and "site-packages" not in file.parts
        )
        if file == source.path or (inside and not file.is_relative_to(Path(__file__).parents[1])):
            place = f" ({file.name} line {frame.tb_lineno})"
        frame = frame.tb_next
    return place
