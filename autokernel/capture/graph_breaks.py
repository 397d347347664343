"""Where Dynamo cut a model into several graphs, and why.

Dynamo's own reports are log lines.  `watch` listens at the two places that every break and every function
that is given up passes: ``log_graph_break`` of the tracer and the call that turns a frame into a graph.  Both
are private, and this is the only file that knows them.  Where a torch version has them no more, nothing is
heard, and `explained` says that there are breaks without saying why.

`count` runs the model once more, as plain Python, and counts how often the lines of the breaks run.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

UNKNOWN = "reason unknown"


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """One place where Dynamo's graph ends before the model does.

    ``reason`` is Dynamo's own, its first sentence.  ``file``, ``line`` and ``code`` are the line outside of
    torch where it happens, in ``function``; None where Dynamo did not say.  ``skipped`` says what runs as
    plain Python because of it, without a graph: all of a function, or the rest of it.  ``count`` is how often
    that line runs in one forward pass; None where nobody counted.
    """

    reason: str
    file: str | None = None
    line: int | None = None
    code: str = ""
    function: str = ""
    skipped: str | None = None
    count: int | None = None

    @property
    def place(self) -> str:
        """``model.py:12``, or an empty text."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        """One line: place, code, how often, reason."""
        where = f"{self.place} `{self.code}`" if self.code else self.place or "an unknown place"
        times = f" ×{self.count}" if self.count is not None and self.count != 1 else ""
        whole = f" ({self.skipped} runs without a graph)" if self.skipped else ""
        return f"{where}{times}: {self.reason}{whole}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def total(breaks: Iterable[GraphBreak]) -> int:
    """How often a forward pass leaves a graph: the sum over all places."""
    return sum(1 if b.count is None else b.count for b in breaks)


def sentence(text: str) -> str:
    """The first sentence of Dynamo's reason, without addresses and what only Dynamo's authors read."""
    found = re.search(_EXPLANATION, text)
    words = found.group(1) if found else text.strip().split("\n\n")[0]
    words = " ".join(words.split())
    words = re.split(r"(?<!e\.g)(?<!i\.e)\.\s+(?=[A-Z`])", words, maxsplit=1)[0].rstrip(". ")
    words = re.sub(_OBJECT, r"`\1`", words)
    words = re.sub(_NOISE, "", words)
    return words or UNKNOWN


_EXPLANATION = re.compile(r"(?s)Explanation:\s*(.+?)(?:\n\s*(?:Hint|Developer debug context):|\Z)")
_OBJECT = re.compile(r"<(?:bound method|function|built-in function|class) '?([\w.<>]+?)'?(?: [^<>]*)?>")
_NOISE = re.compile(r" with argument types \[.*?\]|\s*\(has_kwargs \w+\)|\s*\(reason: None\)| at 0x[0-9a-f]+")


# --- listening to Dynamo ----------------------------------------------------------------------------------


@contextmanager
def watch() -> Iterator[list[GraphBreak]]:
    """The breaks that Dynamo meets while the context is open, in that order, one entry per place."""
    found: list[GraphBreak] = []

    def broke(error: BaseException, skipped: CodeType | None = None) -> None:
        entry = _entry(error, skipped)
        for index, old in enumerate(found):
            if (old.file, old.line, old.reason) == (entry.file, entry.line, entry.reason):
                found[index] = replace(old, skipped=old.skipped or entry.skipped)
                return
        found.append(entry)

    with _listening(broke):
        yield found


@contextmanager
def _listening(broke: Callable[..., None]) -> Iterator[None]:
    undo: list[tuple[type, str, Any]] = []

    def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = owner.__dict__.get(name) if isinstance(owner, type) else None
        if callable(original):
            undo.append((owner, name, original))
            setattr(owner, name, wraps(original)(around(original)))

    def around_log(original: Callable[..., Any]) -> Callable[..., Any]:
        def log_graph_break(*args: Any, **kwargs: Any) -> Any:
            error = next((a for a in (*args, *kwargs.values()) if isinstance(a, BaseException)), None)
            if error is not None and not getattr(error, "logged", False):
                broke(error)
            return original(*args, **kwargs)

        return log_graph_break

    def around_convert(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, frame, *args, **kwargs)
            except soft as error:  # what Dynamo takes back: the frame runs as it is
                broke(error, skipped=frame.f_code)
                raise

        return convert

    soft: tuple[type[BaseException], ...] = ()
    try:
        from torch._dynamo import convert_frame, exc, symbolic_convert

        soft = tuple(t for n in ("Unsupported", "UserError") if isinstance(t := getattr(exc, n, None), type))
        wrap(getattr(symbolic_convert, "InstructionTranslatorBase", None), "log_graph_break", around_log)
        wrap(getattr(convert_frame, "ConvertFrameAssert", None), "__call__", around_convert)
    except ImportError:
        pass
    try:
        yield
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


def _entry(error: BaseException, skipped: CodeType | None) -> GraphBreak:
    reason = sentence(str(getattr(error, "msg", None) or error))
    frames = [f for f in getattr(error, "real_stack", None) or () if not _of_torch(f.filename)]
    whole = _extent(skipped) if skipped is not None else None
    if frames:
        last = _users(frames)
        return _placed(reason, last.filename, last.lineno or 0, _function_name(last.name), whole)
    if skipped is not None and not _of_torch(skipped.co_filename):
        line = _definition(skipped)
        return _placed(reason, skipped.co_filename, line, _function_name(skipped.co_name), whole)
    return GraphBreak(reason, skipped=whole)


def _users(frames: Sequence[Any]) -> Any:
    """The innermost frame that is no part of Python's own library, if there is one."""
    own = [f for f in frames if not _of_python(f.filename)]
    return (own or frames)[-1]


def _placed(reason: str, file: str, line: int, function: str, skipped: str | None) -> GraphBreak:
    return GraphBreak(reason, file, line, linecache.getline(file, line).strip(), function, skipped)


def _function_name(name: str) -> str:
    """The function as the user wrote it: Dynamo goes on after a break in functions of its own."""
    found = re.match(r"torch_dynamo_resume_in_(.+)_at_\d+$", name)
    return found.group(1) if found else name


def _extent(code: CodeType) -> str:
    name = _function_name(code.co_name)
    return f"the rest of {name}" if name != code.co_name else f"all of {_qualified(code)}"


def _qualified(code: CodeType) -> str:
    return code.co_qualname.rpartition("<locals>.")[2]


def _definition(code: CodeType) -> int:
    """The line of ``def``: that of the code object is its first decorator's."""
    for line in range(code.co_firstlineno, code.co_firstlineno + 20):
        if re.match(r"\s*(async\s+)?def\s", linecache.getline(code.co_filename, line)):
            return line
    return code.co_firstlineno


def _of_torch(file: str) -> bool:
    import torch

    return file.startswith("<") or Path(file).is_relative_to(Path(torch.__file__).parent)


def _of_python(file: str) -> bool:
    home = Path(ast.__file__).parent
    path = Path(file)
    return path.is_relative_to(home) and "site-packages" not in path.relative_to(home).parts


# --- what Dynamo did not say ------------------------------------------------------------------------------


def explained(found: Sequence[GraphBreak], graphs: int, model: Any) -> list[GraphBreak]:
    """``found`` with places for what lacks one, and with what must have happened but was not reported.

    A break without a place lies at the model's own ``forward`` (it is the first thing that Dynamo looks at);
    several graphs, or none, without any break that was heard of are one of unknown reason.
    """
    missing = [] if found or graphs == 1 else [GraphBreak(UNKNOWN)]
    code = _forward_code(model)
    done: list[GraphBreak] = []
    for entry in [*found, *missing]:
        if entry.file is None and graphs == 0 and code is not None:
            line = _definition(code)
            entry = _placed(entry.reason, code.co_filename, line, code.co_name, f"all of {_qualified(code)}")
        done.append(entry)
    return done


def _forward_code(model: Any) -> CodeType | None:
    function = inspect.unwrap(getattr(type(model), "forward", None) or model)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) and not _of_torch(code.co_filename) else None


# --- counting ---------------------------------------------------------------------------------------------


def count(breaks: Sequence[GraphBreak], run: Callable[[], object]) -> list[GraphBreak]:
    """``breaks`` with how often ``run()`` comes to each of their lines.

    A statement over several lines counts once each time.  What other threads run is not seen.
    """
    hits: dict[GraphBreak, int] = {b: 0 for b in breaks if b.file and b.line}
    spans = {b: _statement(str(b.file), int(b.line or 0)) for b in hits}
    files = {b.file for b in hits}
    at: dict[CodeType, list[GraphBreak]] = {}

    def breaks_in(code: CodeType) -> list[GraphBreak]:
        if code not in at:
            lines = {line for _, _, line in code.co_lines()} | {_definition(code)}
            own = [b for b in hits if b.file == code.co_filename and b.function == code.co_name]
            at[code] = [b for b in own if b.line in lines]
        return at[code]

    def called(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        here = breaks_in(code) if code.co_filename in files else []
        if not here:
            return None
        for one in here:
            hits[one] += one.line == _definition(code)  # a break at the function itself
        steps = [one for one in here if one.line != _definition(code)]
        before = 0

        def stepped(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "line":
                for one in steps:
                    first, last, end = spans[one]
                    again = first != end and first <= before <= end
                    hits[one] += first <= frame.f_lineno <= last and not again
                before = frame.f_lineno
            return stepped

        return stepped

    earlier = sys.gettrace()
    sys.settrace(called)
    try:
        run()
    finally:
        sys.settrace(earlier)
    return [replace(b, count=hits[b]) if b in hits else b for b in breaks]


def _statement(file: str, line: int) -> tuple[int, int, int]:
    """First and last line of the statement at ``line`` (of a compound one its head), and the last line from
    which coming back to it is no new run: for ``with`` its body's, as that is left through the first line."""
    best = (line, line, line)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return best
    for node in ast.walk(tree):  # from the outside in
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Try):
            continue
        end = node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else end
        if node.lineno <= line <= last:
            best = (node.lineno, last, end if isinstance(node, ast.With | ast.AsyncWith) else last)
    return best
