"""From a model's reply to a kernel.py: a whole file in one fenced block, or search/replace blocks.

The text is only parsed.  It is never executed here, and never reaches a shell; the judge runs it, in a
process of its own.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Literal

from autokernel.proposers.clip import one_line
from autokernel.proposers.provider import Reply
from autokernel.proposers.search_replace import apply_blocks, find_blocks

Kind = Literal["file", "empty", "refused", "truncated", "unusable", "repeat"]

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n`]*$")
_PYTHON = frozenset({"", "python", "py", "python3"})
_DIFF = frozenset({"diff", "patch"})
_FIELD = re.compile(
    r"^(strategy|description|bottleneck|mechanism|prediction)[*_` ]*[:：](.*)$", re.IGNORECASE
)  # fmt: skip
_DEFINES = re.compile(r"^(?:def kernel_fn\b|kernel_fn\s*[=:])", re.MULTILINE)
_HUNK = re.compile(r"^@@ .*@@", re.MULTILINE)
RESERVED = frozenset({"repair", "tuned", "point", "starter", "by-hand"})
"""Strategy tags that mean something to the loop, and are not a model's to give."""
MAX_SOURCE = 200_000
MAX_REPLY = 400_000
_CLOSINGS = 12  # fences in a docstring that are tried as the end of a block,
_LOOKED_INTO = 50  # in so many blocks of a reply: an answer has one


@dataclass(slots=True)
class Edit:
    """``source`` is None when there is no usable file; ``problem`` then says why, and ``kind`` which way
    (``repeat``: there is one, and it has had its verdict).

    ``strategy`` are tags joined by commas, ``description`` one sentence.
    """

    source: str | None
    problem: str = ""
    kind: Kind = "file"
    strategy: str = ""
    description: str = ""


def extract_edit(reply: Reply, current: str = "") -> Edit:
    """The file in ``reply``; search/replace blocks are applied to ``current``.  Never raises."""
    if reply.finish == "refused":
        return Edit(None, "the model refused: " + one_line(reply.text), "refused")
    text = _after_thinking(reply.text.replace("\r\n", "\n").replace("\r", "\n"))
    if not text.strip():
        cut = reply.finish == "length"
        return Edit(None, "the reply was cut off before it began" if cut else "the reply was empty",
                    "truncated" if cut else "empty")  # fmt: skip
    if len(text) > MAX_REPLY:
        return Edit(None, f"the reply is {len(text)} characters long", "unusable")
    found = find_blocks(text)
    fences, prose, left_open = _split(found.rest)
    if reply.finish == "length" or (left_open and not found.blocks):
        return Edit(None, "the reply was cut off", "truncated")
    files, more = _files(fences, prose)
    edit = Edit(None, kind="unusable")
    edit.strategy, edit.description = _fields(prose + more)
    if found.problem:
        edit.problem = found.problem
    elif found.blocks and files:
        edit.problem = "the reply holds both a whole file and search/replace blocks: send one of the two"
    elif found.blocks:
        source, edit.problem = apply_blocks(current, found.blocks)
        _take(edit, source)
    elif len(files) > 1:
        edit.problem = f"the reply holds {len(files)} different files, one was asked for"
    elif files:
        _take(edit, files[0].strip("\n") + "\n")
    else:
        edit.problem = _why_none(fences, text)
    if edit.source is not None and edit.source.strip() == current.strip():
        edit.source, edit.kind, edit.problem = None, "unusable", "it is the file that was shown, unchanged"
    return edit


def _take(edit: Edit, source: str) -> None:
    if edit.problem:
        return
    if len(source) > MAX_SOURCE:
        edit.problem = f"the file is {len(source)} characters long"
    elif "\0" in source:
        edit.problem = "the file holds a NUL character"
    else:
        edit.source, edit.kind = source, "file"


def _after_thinking(text: str) -> str:
    """Without the thoughts that some local models put in front; an answer that never came is empty."""
    if not text.lstrip().startswith("<think>"):
        return text
    return text.partition("</think>")[2]


def _files(fences: list[tuple[str, list[str]]], prose: str) -> tuple[list[str], str]:
    """Different files among the blocks, and what stood beside the code in JSON."""
    files: dict[str, str] = {}
    more = ""
    for language, lines in fences:
        text = "\n".join(lines)
        if language in _PYTHON and _DEFINES.search(text):
            files.setdefault(text.strip(), text)
    if not files:
        texts = ["\n".join(lines) for language, lines in fences if language in ("json", "")]
        for text in [*texts, prose]:
            code, fields = _from_json(text)
            if code:
                files.setdefault(code.strip(), code)
                more = "\n" + fields
    return list(files.values()), more


def _from_json(text: str) -> tuple[str, str]:
    """The code in a JSON object, and its other texts as fields; empty for anything else."""
    if not text.strip().startswith("{"):
        return "", ""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    texts = {k: v for k, v in data.items() if isinstance(v, str)} if isinstance(data, dict) else {}
    codes = [v for v in texts.values() if _DEFINES.search(v)]
    if len(codes) != 1:
        return "", ""
    fields = "\n".join(f"{k}: {one_line(v)}" for k, v in texts.items() if v is not codes[0])
    return codes[0].replace("\r\n", "\n"), fields


def _split(text: str) -> tuple[list[tuple[str, list[str]]], str, bool]:
    """Fenced blocks as (language, lines), the text around them, and whether the last one was left open."""
    lines = text.split("\n")
    blocks: list[tuple[str, list[str]]] = []
    prose: list[str] = []
    index = 0
    while index < len(lines):
        match = _FENCE.match(lines[index])
        if not match:
            prose.append(lines[index])
            index += 1
            continue
        ends = _closings(lines, index, match[1])
        if not ends:
            return blocks, "\n".join(prose), True
        language = match[2].lower()
        look = language in _PYTHON and len(blocks) < _LOOKED_INTO
        end = _end_of_file(lines, index, ends) if look else ends[0]
        blocks.append((language, lines[index + 1 : end]))
        index = end + 1
    return blocks, "\n".join(prose), False


def _closings(lines: list[str], start: int, fence: str) -> list[int]:
    """The lines that can end the block that begins at ``start``: the first, and a few after it."""
    ends: list[int] = []
    for index in range(start + 1, len(lines)):
        match = _FENCE.match(lines[index])
        if match and not match[2] and match[1][0] == fence[0] and len(match[1]) >= len(fence):
            ends.append(index)
            if len(ends) == _CLOSINGS:
                break
    return ends


def _end_of_file(lines: list[str], start: int, ends: list[int]) -> int:
    """Where a Python block ends: at the first fence, unless that one stands inside a string of the file."""
    if not any('"""' in line or "'''" in line for line in lines[start + 1 : ends[0]]):
        return ends[0]
    for end in ends:
        text = "\n".join(lines[start + 1 : end])
        if len(text) > MAX_SOURCE:
            break
        if _parses(text) and (end == ends[0] or _DEFINES.search(text)):
            return end
    return ends[0]


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an escape sequence that Python would rather not see
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _why_none(fences: list[tuple[str, list[str]]], text: str) -> str:
    if any(language in _DIFF for language, _ in fences) or _HUNK.search(text):
        return "diffs aren't taken: send the whole file, or search/replace blocks"
    code = any(language in _PYTHON for language, _ in fences)
    what = "no python block that defines kernel_fn" if code else "neither a python block with a kernel_fn " \
        "nor search/replace blocks"  # fmt: skip
    return f"the reply holds {what}: {one_line(text)}"


def _fields(prose: str) -> tuple[str, str]:
    """(strategy, description) from the lines of these names."""
    fields: dict[str, str] = {}
    for line in prose.split("\n"):
        if match := _FIELD.match(line[:600].lstrip(" \t*_#>-`")):
            fields[match[1].lower()] = one_line(match[2].strip(" \t*_`."), 300)
    parts = [fields.get("mechanism") or fields.get("description") or one_line(prose)]
    named = (("bound by", "bottleneck"), ("predicted", "prediction"))
    about = [f"{name} {fields[key]}" for name, key in named if fields.get(key)]
    if about:
        parts.append(f"({'; '.join(about)})")
    return tags(fields.get("strategy", "")), " ".join(p for p in parts if p)


def tags(text: str) -> str:
    """``Split-K, larger tiles`` -> ``split-k,larger-tiles``; at most four, as memory compares them."""
    found = [re.sub(r"[^a-z0-9]+", "-", t.lower()).strip("-")[:40] for t in re.split(r"[,;/+]", text[:400])]
    return ",".join(list(dict.fromkeys(t for t in found if t and t not in RESERVED))[:4])
