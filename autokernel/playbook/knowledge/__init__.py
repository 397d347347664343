"""What is known about making kernels fast, as short entries with their signs, pattern, risk and source.

The pages beside this file are Markdown for people and agents to read; `entries` parses them, `relevant` picks
those that fit a diagnosis, `render` writes them for a prompt.  An entry looks like this::

    ## Title
    `its-id` · backends triton, cuda · families norm, softmax · bounds dram, launch

    **Signs.** The counters and numbers that call for it.

    What to do, with a minimal pattern, **Backfires**, and **Source**.

``families any`` fits every family; the bounds are those of `autokernel.records.Bound`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGES = (
    "torch", "triton", "cuda_memory", "cuda_compute", "cuda_synchronisation", "cutlass", "cpp",
)  # fmt: skip
_LABELS = re.compile(r"^`([\w-]+)` · backends ([\w, ]+) · families ([\w, ]+) · bounds ([\w, ]+)$")
_SIGNS = "**Signs.** "


@dataclass(frozen=True)
class Entry:
    """One piece of advice.  ``families`` is empty where it fits any; ``signs`` say what calls for it.

    ``text`` holds what to do, a minimal pattern, when it backfires, and the source.
    """

    id: str
    title: str
    backends: tuple[str, ...]
    families: tuple[str, ...]
    bounds: tuple[str, ...]
    signs: str
    text: str


def page_path(page: str) -> Path:
    return Path(__file__).with_name(f"{page}.md")


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, in the order of the pages."""
    return tuple(e for page in PAGES for e in parse(page_path(page).read_text(encoding="utf-8"), page))


def parse(markdown: str, page: str = "page") -> list[Entry]:
    """The entries of a page: its level-2 sections.  Raises ValueError for one that is not of the form."""
    return [_entry(section, page) for section in _sections(markdown)]


def _sections(markdown: str) -> list[str]:
    """Split at level-2 headings outside fenced code."""
    sections: list[list[str]] = []
    fenced = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if line.startswith("## ") and not fenced:
            sections.append([])
        if sections:
            sections[-1].append(line)
    return ["\n".join(lines).strip() for lines in sections]


def _entry(section: str, page: str) -> Entry:
    title, _, rest = section.partition("\n")
    labels, _, body = rest.strip().partition("\n")
    match = _LABELS.match(labels.strip())
    if match is None:
        raise ValueError(f"{page}.md, {title!r}: {labels!r} is no line of labels")
    signs, _, text = body.strip().partition("\n\n")
    if not signs.startswith(_SIGNS) or not text.strip():
        raise ValueError(f"{page}.md, {title!r}: it must start with {_SIGNS!r} and go on after that")
    backends, families, bounds = (
        tuple(word.strip() for word in match[i].split(",") if word.strip() != "any") for i in (2, 3, 4)
    )
    signs = " ".join(signs.removeprefix(_SIGNS).split())
    return Entry(match[1], title.removeprefix("## ").strip(), backends, families, bounds, signs, text.strip())


def relevant(*, backends: Sequence[str], family: str, bound: str, limit_chars: int = 6000) -> list[Entry]:
    """The entries for a diagnosis, best first, as many as `render` writes within ``limit_chars``.

    Only entries of the ``backends``, and none that is for other families.  First come those that name both
    the bound and the family, then those that name the bound and fit any family, then the family under another
    bound, then the rest; among equals the order of ``backends``, then that of the pages.  An entry with no
    room is passed over for a shorter one.
    """
    ranked: list[tuple[int, int, int, Entry]] = []
    for position, entry in enumerate(entries()):
        ours = [i for i, name in enumerate(backends) if name in entry.backends]
        if ours and (not entry.families or family in entry.families):
            misfit = 2 * (bound not in entry.bounds) + (family not in entry.families)
            ranked.append((misfit, ours[0], position, entry))
    chosen: list[Entry] = []
    left = limit_chars
    for _, _, _, entry in sorted(ranked, key=lambda item: item[:3]):
        size = len(render([entry])) + 2 * bool(chosen)
        if size <= left:
            chosen.append(entry)
            left -= size
    return chosen


def render(entries: Iterable[Entry]) -> str:
    """Entries as Markdown for a prompt."""
    return "\n\n".join(f"## {e.title} [{e.id}]\n{_SIGNS}{e.signs}\n\n{e.text}" for e in entries)
