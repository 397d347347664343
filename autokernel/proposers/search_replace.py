"""Search/replace blocks: found in a reply, and applied to a source.

    <<<<<<< SEARCH
    lines of the source, exactly
    =======
    lines that take their place
    >>>>>>> REPLACE

Every block is matched, line by line, against the source as it was shown: it must occur exactly once, and two
blocks may not touch the same lines.
"""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass

_OPEN = re.compile(r"^ {0,3}<{5,9} ?SEARCH\b")
_DIVIDE = re.compile(r"^ {0,3}={5,9}[ \t]*$")
_CLOSE = re.compile(r"^ {0,3}>{5,9} ?REPLACE\b")
MAX_BLOCKS = 50
_COMPARED = 4000  # lines of a source among which the closest is looked for


@dataclass(frozen=True, slots=True)
class Block:
    search: tuple[str, ...]
    replace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """``rest`` is the text without the blocks.  ``problem`` says which block isn't whole."""

    blocks: tuple[Block, ...]
    rest: str
    problem: str = ""


def find_blocks(text: str) -> Found:
    """The blocks of ``text``, wherever they stand: in a fence or not."""
    blocks: list[Block] = []
    rest: list[str] = []
    search: list[str] = []
    replace: list[str] = []
    where = "outside"
    for line in text.split("\n"):
        number = len(blocks) + 1
        if _OPEN.match(line):
            if where != "outside":
                return Found((), "\n".join(rest), f"block {number} has no >>>>>>> REPLACE line")
            where, search, replace = "search", [], []
        elif where == "search" and _DIVIDE.match(line):
            where = "replace"
        elif where != "outside" and _CLOSE.match(line):
            if where == "search":
                return Found((), "\n".join(rest), f"block {number} has no ======= line")
            blocks.append(Block(tuple(search), tuple(replace)))
            where = "outside"
        elif where == "outside":
            rest.append(line)
        else:
            (search if where == "search" else replace).append(line)
    if where != "outside":
        return Found((), "\n".join(rest), f"block {len(blocks) + 1} has no >>>>>>> REPLACE line")
    return Found(tuple(blocks), "\n".join(rest))


def apply_blocks(source: str, blocks: tuple[Block, ...]) -> tuple[str, str]:
    """(the new source, why there is none): one of the two is empty."""
    if len(blocks) > MAX_BLOCKS:
        return "", f"{len(blocks)} blocks: send the whole file instead"
    lines = source.split("\n")
    spans: list[tuple[int, int, int, Block]] = []
    for number, block in enumerate(blocks, start=1):
        size = len(block.search)
        if not any(line.strip() for line in block.search):
            return "", f"block {number} searches for nothing: a new file is sent whole"
        places = _places(lines, block.search)
        if len(places) > 1:
            at = " and ".join(str(p + 1) for p in places[:3])
            return "", f"block {number} occurs {len(places)} times (lines {at}): add lines around it"
        if not places:
            return "", f"block {number}: {_missing(lines, block.search, blocks[: number - 1])}"
        spans.append((places[0], places[0] + size, number, block))
    spans.sort(key=lambda s: s[:3])
    for (_, end, first, _), (start, _, second, _) in itertools.pairwise(spans):
        if start < end:
            return "", f"blocks {min(first, second)} and {max(first, second)} change the same lines"
    for start, end, _, block in reversed(spans):
        lines[start:end] = block.replace
    result = "\n".join(lines)
    return (result, "") if result != source else ("", "the blocks change nothing")


def _places(lines: list[str], search: tuple[str, ...]) -> list[int]:
    if len(search) > len(lines):
        return []
    first, wanted = search[0], list(search)
    return [i for i, line in enumerate(lines) if line == first and lines[i : i + len(wanted)] == wanted]


def _missing(lines: list[str], search: tuple[str, ...], earlier: tuple[Block, ...]) -> str:
    """Why ``search`` isn't found, with the closest line of the file."""
    loose = [" ".join(line.split()) for line in lines]
    wanted = tuple(" ".join(line.split()) for line in search)
    if places := _places(loose, wanted):
        return f"it differs in white space from the file's line {places[0] + 1}: {_quote(lines[places[0]])}"
    if any(_places(list(block.replace), search) for block in earlier):
        return "its lines are what an earlier block puts in; every block is matched with the file as shown"
    start, length = _longest(lines, search)
    if length:
        here = lines[start + length] if start + length < len(lines) else "the end of the file"
        return (
            f"it matches from line {start + 1} on, and then the file has {_quote(here)} "
            f"where the block has {_quote(search[length])}"
        )
    line = next((text for text in search if text.strip()), "")
    close = difflib.get_close_matches(line[:200], [text[:200] for text in lines[:_COMPARED]], n=1, cutoff=0.5)
    if not close:
        return f"no line of the file is like {_quote(line)}"
    number = next(i for i, text in enumerate(lines, start=1) if text[:200] == close[0])
    return f"the file has no line {_quote(line)}; the closest is line {number}: {_quote(lines[number - 1])}"


def _longest(lines: list[str], search: tuple[str, ...]) -> tuple[int, int]:
    """Where the longest beginning of ``search`` stands, and how many lines it has."""
    best = (0, 0)
    for start, line in enumerate(lines[:_COMPARED]):
        if line != search[0] or not line.strip():
            continue
        length = 0
        while (
            length < len(search) and start + length < len(lines) and lines[start + length] == search[length]
        ):
            length += 1
        if length > best[1]:
            best = (start, length)
    return best


def _quote(line: str) -> str:
    return repr(line if len(line) <= 120 else line[:119] + "…")
