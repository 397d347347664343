"""Search the numbers of a kernel (tile sizes, warps, stages), so that a language model needn't.

A kernel declares ``SPACE = {"BLOCK": [64, 128], "num_warps": [4, 8]}`` and has a module-level constant of
each name.  A point of that space is tried as a *frozen* source: the constants rewritten in place, and no
``SPACE``, so that what was measured and what is kept are one file.  Sources are only parsed here, never
executed; what a point is worth is the caller's business (`tune` takes a ``measure`` function).

``SPACE_FITS = "num_stages * BLOCK_K * (BLOCK_M + BLOCK_N) * 2 <= 232448"`` leaves out the points for which it
does not hold: tiles that would overflow the device's shared memory take longest to compile, for nothing.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = int | float | str | bool | None
Values = dict[str, Value]
Measure = Callable[[str], "float | None"]

MARK = "# tuned"
POINT = "point"
"""The strategy tag of a row that is one point of a search; `TUNED` is that of the search's result."""
TUNED = "tuned"
MAX_POINTS = 100_000


class SpaceError(ValueError):
    """SPACE is malformed, or names something that can't be rewritten: the kernel's fault, not ours."""


@dataclass(slots=True)
class Tuned:
    """``source`` is frozen at ``values``.  ``latency_us`` is None when no variant could be measured.

    ``measured`` has every point that was tried, in order, with its latency (None: failed).
    """

    source: str
    values: Values
    latency_us: float | None
    measured: list[tuple[Values, float | None]] = field(default_factory=list)


def space_of(source: str) -> dict[str, list[Value]]:
    """The SPACE of a source; empty when it has none.  Raises SpaceError when it is malformed."""
    node = _assignments(source).get("SPACE")
    if node is None:
        return {}
    try:
        space = _literal(node[-1])
    except ValueError:
        raise SpaceError("SPACE is not a literal dict") from None
    if not isinstance(space, dict):
        raise SpaceError("SPACE is not a dict of name -> list of values")
    result: dict[str, list[Value]] = {}
    for name, values in space.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SpaceError(f"SPACE has a key {name!r} that is no name")
        if not isinstance(values, list | tuple) or not values:
            raise SpaceError(f"SPACE[{name!r}] is not a list of values")
        if not all(v is None or isinstance(v, int | float | str | bool) for v in values):
            raise SpaceError(f"SPACE[{name!r}] holds something that is neither number nor text")
        result[name] = list(dict.fromkeys(values))
    return result


def defaults_of(source: str) -> Values:
    """The values that the constants named in SPACE have now.  Raises SpaceError when one is missing."""
    found = _assignments(source)
    values: Values = {}
    for name in space_of(source):
        nodes = found.get(name, [])
        if len(nodes) != 1:
            how = "not assigned" if not nodes else f"assigned {len(nodes)} times"
            raise SpaceError(f"SPACE names {name}, which is {how} at module level")
        try:
            values[name] = _literal(nodes[0])
        except ValueError:
            raise SpaceError(f"SPACE names {name}, whose value is not a literal") from None
    return values


def fits_of(source: str) -> Callable[[Values], bool]:
    """The SPACE_FITS of a source, to be asked about a point.  Raises SpaceError when it is malformed."""
    node = _assignments(source).get("SPACE_FITS")
    if node is None:
        return lambda point: True
    try:
        text = _literal(node[-1])
        tree = ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError, TypeError):
        raise SpaceError("SPACE_FITS is not the text of an expression") from None
    _evaluate(tree, dict.fromkeys(space_of(source), 1))
    return lambda point: bool(_evaluate(tree, point))


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> Any:
    """Arithmetic and comparisons over the constants of a SPACE, and nothing else."""
    match node:
        case ast.Constant(value=int() | float() | bool() as value):
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.BoolOp(op=op, values=parts):
            found = [bool(_evaluate(part, values)) for part in parts]
            return all(found) if isinstance(op, ast.And) else any(found)
    raise SpaceError(
        f"SPACE_FITS can't have {ast.unparse(node)!r}: numbers, names of SPACE, + - * // < <= and or"
    )


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def freeze(source: str, values: Mapping[str, Value]) -> str:
    """``source`` with the module-level constants in ``values`` rewritten and without its SPACE
    and SPACE_FITS.

    Everything else keeps its text.  Raises SpaceError when a name isn't assigned exactly once.
    """
    source = _normalised(source)
    found = _assignments(source)
    edits: list[tuple[_Assign, bytes]] = []
    for name, value in values.items():
        if len(found.get(name, [])) != 1:
            raise SpaceError(f"{name} is not assigned exactly once at module level")
        edits.append((found[name][0], repr(value).encode()))
    edits += [(node, b"") for name in ("SPACE", "SPACE_FITS") for node in found.get(name, [])]
    lines = [line.encode() for line in source.split("\n")]  # the parser's columns count bytes
    # From the end backwards, so that positions stay valid.
    for node, text in sorted(edits, key=lambda e: (e[0].lineno, e[0].col_offset), reverse=True):
        _splice(lines, node, text)
    return b"\n".join(lines).decode()


_Assign = ast.Assign | ast.AnnAssign


def _assignments(source: str) -> dict[str, list[_Assign]]:
    """Module-level ``NAME = value`` statements by name."""
    try:
        tree = ast.parse(_normalised(source))
    except (SyntaxError, ValueError) as error:
        raise SpaceError(f"not Python: {error}") from None
    found: dict[str, list[_Assign]] = {}
    for node in tree.body:
        targets: Sequence[ast.expr] = ()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            found.setdefault(targets[0].id, []).append(node)
    return found


def _literal(node: _Assign) -> Any:
    """The assigned value.  Raises ValueError when it is no literal."""
    assert node.value is not None
    return ast.literal_eval(node.value)


def _normalised(source: str) -> str:
    """With ``\\n`` line ends only, so that the parser's line numbers are indices into ``split("\\n")``."""
    return re.sub(r"\r\n?", "\n", source)


def _splice(lines: list[bytes], node: _Assign, text: bytes) -> None:
    """Put ``text`` in place of the assigned value; with no text, take the whole statement out."""
    where = node.value if text else node
    assert where is not None and where.end_lineno is not None and where.end_col_offset is not None
    first, last = where.lineno - 1, where.end_lineno - 1
    head, tail = lines[first][: where.col_offset], lines[last][where.end_col_offset :]
    if text:
        mark = b"" if tail.strip() else b"  " + MARK.encode()
        lines[first : last + 1] = [head + text + tail.rstrip() + mark]
    elif head.strip() or tail.strip().startswith(b";"):
        lines[first : last + 1] = [head + b"pass" + tail]  # it shares its line with another statement
    else:
        lines[first : last + 1] = []


def tune(
    source: str,
    measure: Measure,
    *,
    budget: int = 24,
    start_latency_us: float | None = None,
    seed: int = 0,
    precompile: Callable[[Sequence[str]], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Find the fastest point of ``source``'s SPACE within ``budget`` measurements.

    Starts from the values in the file, then coordinate descent (each constant in turn, all of its values,
    until a whole round brings nothing), then random points with what is left of the budget.  A space that
    fits into the budget is searched whole.  ``start_latency_us`` is the time of the values in the file, when
    it was measured already; ``measure`` returns None for a point that fails.  ``precompile`` is given each
    batch of sources before they are measured one after the other, so that compilers can run in parallel.
    Points for which SPACE_FITS does not hold are left out.  Deterministic for one ``seed``.
    Raises SpaceError.
    """
    space = space_of(source)
    start = defaults_of(source)
    search = _Search(source, measure, budget, precompile, should_stop, fits_of(source))
    if start_latency_us is None:
        search.batch([start])
    else:
        search.know(start, start_latency_us)
    if math.prod(len(v) for v in space.values()) <= budget:
        search.batch([dict(zip(space, point, strict=True)) for point in itertools.product(*space.values())])
    else:
        _descend(search, space, start)
        _scatter(search, space, random.Random(seed))
    best, latency = search.best()
    best = start if best is None else best
    return Tuned(freeze(source, best), best, latency, search.measured)


class _Search:
    def __init__(
        self,
        source: str,
        measure: Measure,
        budget: int,
        precompile: Callable[[Sequence[str]], None] | None,
        should_stop: Callable[[], bool],
        fits: Callable[[Values], bool],
    ) -> None:
        self.source, self.measure, self.left, self.fits = source, measure, budget, fits
        self.precompile, self.should_stop = precompile, should_stop
        self.measured: list[tuple[Values, float | None]] = []
        self._seen: set[tuple[tuple[str, str], ...]] = set()

    def know(self, point: Values, latency_us: float) -> None:
        self._seen.add(_key(point))
        self.measured.append((point, latency_us))

    def batch(self, points: Sequence[Values]) -> None:
        """Measure the points that are new, as far as the budget goes."""
        new: list[Values] = []
        for point in points:
            key = _key(point)
            if key not in self._seen and len(new) < self.left and self.fits(point):
                self._seen.add(key)
                new.append(point)
        sources = [freeze(self.source, point) for point in new]
        if self.precompile is not None and len(sources) > 1:
            self.precompile(sources)
        for point, text in zip(new, sources, strict=True):
            if self.should_stop():
                self.left = 0
                return
            self.left -= 1
            self.measured.append((point, self.measure(text)))

    def best(self) -> tuple[Values | None, float | None]:
        timed = [(us, i) for i, (_, us) in enumerate(self.measured) if us is not None]
        if not timed:
            return None, None
        latency, index = min(timed)
        return self.measured[index][0], latency


def _key(point: Values) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in point.items()))


def _descend(search: _Search, space: Mapping[str, Sequence[Value]], start: Values) -> None:
    current = start
    improved = True
    while improved and search.left:
        improved = False
        for name, values in space.items():
            search.batch([{**current, name: value} for value in values])
            best, _ = search.best()
            if best is not None and best != current:
                current, improved = best, True


def _scatter(search: _Search, space: Mapping[str, Sequence[Value]], rng: random.Random) -> None:
    """Random points that were not measured yet, in one batch (so that they compile in parallel)."""
    points: list[Values] = []
    for _ in range(min(MAX_POINTS, 20 * search.left)):
        points.append({name: rng.choice(list(values)) for name, values in space.items()})
    search.batch(points)
