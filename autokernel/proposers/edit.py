"""From a model's reply to a kernel.py: one whole file in one fenced block, or the reason why there is none.

The text is only parsed.  It is never executed here, and never reaches a shell; the judge runs it, in a
process of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autokernel.proposers.provider import Reply

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n`]*$")
_PYTHON = frozenset({"", "python", "py", "python3"})
_FIELD = re.compile(r"^\W*(strategy|description)\W*:\W*(.+?)\W*$", re.IGNORECASE | re.MULTILINE)
MAX_SOURCE = 200_000


@dataclass(slots=True)
class Edit:
    """``source`` is None when there is no usable file; ``problem`` then says why."""

    source: str | None
    problem: str = ""
    strategy: str = ""
    description: str = ""


def extract_edit(reply: Reply) -> Edit:
    """The file in ``reply``.  Strategy and description come from lines of these names outside the block."""
    if reply.finish == "refused":
        return Edit(None, "the model refused: " + _start(reply.text))
    if not reply.text.strip():
        return Edit(None, "the reply was empty")
    blocks, prose, open_block = _split(reply.text)
    if open_block or reply.finish == "length":
        return Edit(None, "the reply was cut off")
    files = [text for language, text in blocks if language in _PYTHON and "kernel_fn" in text]
    if not files:
        return Edit(None, "the reply holds no python block with a kernel_fn: " + _start(reply.text))
    if len({f.strip() for f in files}) > 1:
        return Edit(None, f"the reply holds {len(files)} different files, one was asked for")
    source = files[-1].strip("\n") + "\n"
    if len(source) > MAX_SOURCE:
        return Edit(None, f"the file is {len(source)} characters long")
    fields = {name.lower(): value for name, value in _FIELD.findall(prose)}
    return Edit(
        source,
        strategy=_tags(fields.get("strategy", "")),
        description=fields.get("description") or _start(prose),
    )


def _split(text: str) -> tuple[list[tuple[str, str]], str, bool]:
    """Fenced blocks as (language, content), the text around them, and whether the last one was left open."""
    blocks: list[tuple[str, str]] = []
    prose: list[str] = []
    inside: list[str] = []
    fence = language = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, inside = match[1], match[2].lower(), []
            else:
                prose.append(line)
        elif match and not match[2] and match[1][0] == fence[0] and len(match[1]) >= len(fence):
            blocks.append((language, "\n".join(inside)))
            fence = ""
        else:
            inside.append(line)
    return blocks, "\n".join(prose), bool(fence)


def _tags(text: str) -> str:
    """``Split-K, larger tiles`` -> ``split-k,larger-tiles``; at most four, as memory compares them."""
    tags = [re.sub(r"[^a-z0-9]+", "-", t.lower()).strip("-")[:40] for t in re.split(r"[,;/+]", text)]
    return ",".join([t for t in tags if t][:4])


def _start(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
