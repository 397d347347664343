"""Where a model comes from, and what went wrong with it in one line."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UsageError


@dataclass(frozen=True)
class Source:
    """Where the model's code is.

    ``path`` is set for a file, ``module`` for an importable module; ``attribute`` is what to call in it
    when the model was given as ``module:callable``.  ``folder`` goes on ``sys.path`` while it loads.

    A model of a ``library`` (transformers or timm) has its name there in ``attribute``, or its folder in
    ``path``; nothing of it goes on ``sys.path``.
    """

    label: str
    name: str
    folder: Path
    path: Path | None = None
    module: str | None = None
    attribute: str | None = None
    library: str | None = None


def library(source: Source) -> Any:
    """Import the source's library; `UsageError` with the command that installs it when it is missing."""
    name = source.library or ""
    try:
        with user_code(f"{source.label}: {name} can't be imported", source):
            return importlib.import_module(name)
    except UsageError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name == name:
            extra = {"transformers": "hf"}.get(name, name)
            raise UsageError(
                f"{source.label} needs {name}, which is not installed: "
                f"run `uv sync --extra {extra}` or `pip install 'autokernel[{extra}]'`"
            ) from cause
        raise


def close_to(name: str, names: Iterable[str]) -> str:
    """``: did you mean a, b or c?`` with the names closest to ``name``; ``""`` when none is near."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    if not close:
        return ""
    return f": did you mean {' or '.join([', '.join(close[:-1]), close[-1]] if close[1:] else close)}?"


_SMALLER = "lower the sizes with --input-shape, choose a smaller --dtype, or another --device"


@contextlib.contextmanager
def user_code(what: str, source: Source, smaller: str = _SMALLER, *, traced: bool = False) -> Iterator[None]:
    """Turn anything that the user's own code raises into a `UsageError`: ``what``, message and place.

    ``smaller`` says what to do when memory runs out.  ``traced``: autokernel's own code runs in between, and
    what that raises is left as it is.
    """
    try:
        yield
    except (UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:  # their code may raise anything, and leave with sys.exit()
        if traced and _our_own(error):
            raise
        place = _place(error, source)
        memory = out_of_memory(error)
        if memory is not None:
            raise UsageError(f"{what}: out of memory{memory}: {smaller}{place}") from error
        if isinstance(error, SystemExit):
            code = "" if error.code is None else repr(error.code)
            raise UsageError(f"{what}: it calls sys.exit({code[:200]}), take that out{place}") from error
        raise UsageError(
            f"{what}: {type(error).__name__}: {one_line(error)}{place}{_what_to_do(error)}"
        ) from error


def _our_own(error: BaseException) -> bool:
    """Whether autokernel raised it, or a compiler's backend did, which is autokernel as well."""
    from torch._dynamo.exc import BackendCompilerFailed

    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    file = Path(frame.tb_frame.f_code.co_filename) if frame is not None else Path()
    return isinstance(error, BackendCompilerFailed) or file.is_relative_to(Path(__file__).parents[1])


def out_of_memory(error: BaseException) -> str | None:
    """`` (what it asked for, what was free)`` as far as the error says so; None for any other error."""
    import torch

    text = text_of(error)
    host = isinstance(error, RuntimeError) and re.search("DefaultCPUAllocator|Storage size calculation", text)
    if not host and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    asked = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+ \w+)", text)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    if asked is None:
        return ""
    need = asked[1]
    if need.endswith(" bytes"):
        need = f"{int(need.split()[0]) / 2**30:.2f} GiB"
    return f" ({need} more were needed{f', {free[1]} are free' if free else ''})"


def _what_to_do(error: BaseException) -> str:
    """What to do when the device has no kernel for the number type, and about a few other messages."""
    text = text_of(error)
    found = re.search(
        r"(?:not implemented for '|[Uu]nsupported dtype |dtypes not supported. Got )(Half|BFloat16)", text
    )
    if found is not None:
        name = {"Half": "float16", "BFloat16": "bfloat16"}[found[1]]
        return f"; this device has no such operation in {name}: try --dtype float32"
    if "the same dtype" in text and re.search("Half|BFloat16", text):
        return "; --dtype changes weights and inputs, not tensors that the code makes with their own type"
    if isinstance(error, ImportError) and "relative import" in text:
        return "; a file in a package is given as package.module:callable"
    return ""


def text_of(error: BaseException) -> str:
    """The error's own words, without the stack of torch's C++ code that some of torch's have behind them."""
    if isinstance(error, SyntaxError) and error.msg and error.filename:
        return error.msg  # str() repeats the place
    shown = "".join(traceback.format_exception_only(error))  # unlike str(), never fails
    text = shown.partition(": ")[2]
    return re.split(r"\s+Exception raised from |\s+C\+\+ CapturedTraceback", text, maxsplit=1)[0]


def one_line(error: BaseException) -> str:
    text = " ".join(text_of(error).split())
    return "".join(c for c in text if c.isprintable())[:400] or "no message"


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
        if source.library is not None:
            inside = source.library in file.parts
        if file == source.path or (inside and not file.is_relative_to(Path(__file__).parents[1])):
            place = f" ({file.name} line {frame.tb_lineno})"
        frame = frame.tb_next
    return place
