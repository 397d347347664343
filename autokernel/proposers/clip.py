"""Text made to fit: nothing that goes into a prompt or a row is longer than its reader was promised."""

from __future__ import annotations

import re


def clip_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters: the first and the last lines stay, and a note says what is left out.

    Of a compiler's message both ends matter: the first error, and what it came to.
    """
    if len(text) <= limit:
        return text
    note = f"\n… {len(text) - limit} characters left out …\n"
    room = limit - len(note)
    if room < 40:
        return text[: max(limit, 0)]
    head = text[: room * 2 // 3]
    tail = text[len(text) - (room - len(head)) :]
    whole_head, whole_tail = head.rpartition("\n")[0], tail.partition("\n")[2]
    if len(whole_head) > len(head) // 2:  # whole lines, unless a line is longer than what there is room for
        head = whole_head
    if len(whole_tail) > len(tail) // 2:
        tail = whole_tail
    return head + note + tail


def clip_list(lines: list[str], limit: int, *, newest_last: bool = False) -> str:
    """Whole lines, ``limit`` characters in all; of a list that ends with the newest, the last ones."""
    kept: list[str] = []
    used = 0
    for line in reversed(lines) if newest_last else lines:
        if used + len(line) + 1 > limit:
            break
        kept.append(line)
        used += len(line) + 1
    return "\n".join(reversed(kept) if newest_last else kept)


def one_line(text: str, limit: int = 160) -> str:
    """``text`` on one line, without control characters: a terminal will show it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 8 * limit]).split())
    return line if len(line) <= limit and len(text) <= 8 * limit else line[: limit - 1] + "…"


def quantity(value: float, unit: str) -> str:
    """``134225920, "B"`` -> ``134 MB``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def fenced(text: str, language: str = "python") -> str:
    """``text`` in a Markdown fence that is longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
