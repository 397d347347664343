"""Finding a model's source, importing Python code and building a model from it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ._messages import Source, user_code

if TYPE_CHECKING:
    from torch import nn

_FORMS = (
    "use a .py file with build() and example_inputs(model), package.module:callable, "
    "a Hugging Face folder, hf:ORG/NAME or timm:NAME"
)
_LONGEST_NAME = 255  # bytes, of one part of a path: asking about a longer one raises
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Built:
    """A model as it was built, before it goes to its device.

    ``example(model)`` makes its example inputs, where the source knows them.  ``contents`` is what beside
    the arguments decides which model it is, for its identity; ``cast`` says that ``--dtype`` is still to do.
    """

    model: nn.Module
    example: Callable[[Any], Any] | None = None
    contents: dict[str, Any] = field(default_factory=dict)
    cast: bool = True


def find(model: str) -> Source:
    """Which kind of source ``model`` is.  Raises `UsageError` when it is none, or not there."""
    here = Path.cwd()
    if not model.strip():
        raise UsageError(f"no model is given: {_FORMS}")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in model.split("/")):
        raise UsageError(f"{model[:40]}...: no such file; {_FORMS}")
    prefix, colon, name = model.partition(":")
    prefix = prefix.lower() if colon else prefix
    if colon and prefix in ("hf", "timm"):
        if not name.strip("/"):
            raise UsageError(f"{model} names no model: say for instance hf:ORG/NAME or timm:resnet18")
        if prefix == "timm":
            return Source(model, _run_name(name), here, attribute=name, library="timm")
        if not Path(name).is_dir():
            return Source(model, _run_name(name), here, attribute=name, library="transformers")
    path = Path(name if colon and prefix == "hf" else model)
    if path.is_dir():
        path = path.resolve()
        return Source(model, _run_name(path.name), here, path=path, library="transformers")
    if path.suffix in _WEIGHTS:
        if (path.parent / "config.json").is_file():
            raise UsageError(f"{model} holds weights: give the folder that it is in, {path.parent}")
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
    if colon and module.endswith(".py"):
        raise UsageError(
            f"{model}: a class in a file is given as {module} --class-name {attribute or 'NAME'}"
        )
    names = [*module.split("."), *attribute.split(".")] if colon else [""]
    if all(name.isidentifier() for name in names):
        return Source(model, attribute.split(".")[-1], Path.cwd(), module=module, attribute=attribute)
    if not colon and all(name.isidentifier() for name in module.split(".")):
        raise UsageError(f"{model}: no such file; {_FORMS}")
    hub = re.fullmatch(r"(?:https?://(?:huggingface\.co|hf\.co)/)?(\w[\w.-]*/\w[\w.-]*)/?", model)
    if hub is not None:
        raise UsageError(f"{model}: no such folder; a model of the Hugging Face Hub is hf:{hub[1]}")
    if not colon and "/" in model:
        raise UsageError(f"{model}: no such file or folder; {_FORMS}")
    raise UsageError(f"{model!r} is not a model source: {_FORMS}")


def _run_name(name: str) -> str:
    """``Qwen/Qwen3-0.6B`` -> ``qwen3-0.6b``: short, and fit for a folder's name."""
    return re.sub(r"[^\w.-]+", "_", name.rstrip("/").rsplit("/", 1)[-1]).strip("._").lower() or "model"


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
def on_path(source: Source) -> Iterator[None]:
    """Put the source's folder first on ``sys.path`` for a while.

    Helper modules that a *previous* model's folder brought in under a name that this folder uses too are
    dropped first: otherwise this model would silently get the other one's ``config.py``.
    """
    if source.library is not None:
        yield
        return
    folder = source.folder
    for name, home in list(_helpers.items()):
        if home != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
            del _helpers[name]
    before, here, arguments = set(sys.modules), Path.cwd(), sys.argv
    entry = str(folder)
    sys.path.insert(0, entry)
    # A file that reads a command line sees an empty one, not autokernel's; one that goes to another folder
    # comes back.
    sys.argv = [str(source.path or source.module)]
    try:
        yield
    finally:
        sys.argv = arguments
        os.chdir(here)
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


def build(source: Source, class_name: str | None, shapes: Sequence[Any]) -> Built:
    """Build the model of a Python source.  Raises `UsageError` when there is none, or it can't be built.

    The file's own example inputs count when no shapes are given.
    """
    module = import_source(source)
    function, name = _builder(module, source, class_name)
    model = _call(function, name, source)
    example = getattr(module, "example_inputs", None)
    return Built(model, example if callable(example) and not shapes else None)


def _builder(module: ModuleType, source: Source, class_name: str | None) -> tuple[Callable[[], Any], str]:
    """What to call to get the model, and its name for messages."""
    if class_name and source.attribute:
        raise UsageError(f"{source.label} says what to call: leave --class-name out")
    name = class_name or source.attribute
    if not name:
        function = getattr(module, "build", None)
        if callable(function):
            return function, "build()"
        raise UsageError(f"{source.label} has no build() function: {_what_to_do(module, source)}")
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise UsageError(f"{source.label} has no {name!r}: {_what_to_do(module, source)}")
    if not callable(target) or _is_module(target):
        raise UsageError(
            f"{name!r} in {source.label} is {_a(target)}, not a class or function"
            + (": write a build() that makes it" if _is_module(target) else "")
        )
    return target, f"{name}()"


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _a(value: Any) -> str:
    """``a tuple``, ``an OrderedDict``, ``the class Net``."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _what_to_do(module: ModuleType, source: Source) -> str:
    """What is in the module, and the flag that would use it."""
    from torch import nn

    own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    classes = [k for k, v in own.items() if inspect.isclass(v) and issubclass(v, nn.Module)]
    functions = [k for k, v in own.items() if inspect.isfunction(v) and not k.startswith("_")]
    if source.attribute is not None:
        return f"it has {', '.join(classes + functions)}" if classes or functions else "it defines no model"
    if not classes:  # a file that only brings them in from elsewhere
        classes = [k for k, v in vars(module).items() if inspect.isclass(v) and issubclass(v, nn.Module)]
    if classes:
        listed = ", ".join(classes[-6:])
        return f"add build(), or pass --class-name with one of its modules ({listed})"
    if functions:
        return f"add build(), or pass --class-name with one of its functions ({', '.join(functions[-6:])})"
    return "add build(), which returns the model; the file defines no nn.Module"


def _call(function: Callable[[], Any], name: str, source: Source) -> nn.Module:
    from torch import nn

    required = required_parameters(function)
    if required:
        raise UsageError(
            f"{name} in {source.label} needs arguments ({', '.join(required)}): "
            "add a build() to the file that calls it with them"
        )
    smaller = "build a smaller model, or one of a smaller number type"
    with user_code(f"{source.label}: {name} failed", source, smaller):
        model = function()
    if inspect.iscoroutine(model):
        model.close()  # nobody waits for it, and Python would say so
    if not isinstance(model, nn.Module):
        hint = ": call it" if inspect.isclass(model) and issubclass(model, nn.Module) else ""
        if isinstance(model, dict) and all(hasattr(v, "dtype") for v in model.values()):
            hint = ": return the model, and give weights with --checkpoint"
        raise UsageError(f"{name} in {source.label} returned {_a(model)}, not an nn.Module{hint}")
    return model


def required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in free]


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
