"""The tables of ``docs/red-team.md``, from the kernels and their table; run it to write them."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "red-team.md"
BEGIN, END = "<!-- written by tests/redteam/page.py -->", "<!-- to here -->"
FORMS = {"both": "CPU, GPU", "cpu": "CPU", "gpu": "GPU"}

if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

from redteam.table import CHEATS, HONEST, PROBLEM_FAULTS, Line  # noqa: E402


def _head(path: Path) -> tuple[str, str]:
    """What a kernel does, and the line of its docstring that says what follows from it."""
    lines = path.read_text(encoding="utf-8").split('"""')[1].strip().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(("Defence", "Must pass")))
    return " ".join(lines[:at]).strip(), " ".join(lines[at:]).partition(": ")[2].strip()


def _verdict(line: Line) -> str:
    named = {"correct": f"brings nothing over `{line.like}`"} if line.like else {}
    status = " or ".join(named.get(one, one) for one in line.status.split("|"))
    return f"{status}, `{line.provenance}`" if line.provenance else status


def tables() -> str:
    lines = ["| cheat | what it does | what stops it | verdict | forms |", "| --- | --- | --- | --- | --- |"]
    for name, line in CHEATS.items():
        what, how = _head(HERE / "cheats" / f"{name}.py")
        lines.append(f"| `{name}` | {what} | {how} | {_verdict(line)} | {FORMS[line.forms]} |")
    lines += ["", "| honest kernel | what it does | why it must pass | forms |", "| --- | --- | --- | --- |"]
    for name, line in HONEST.items():
        what, why = _head(HERE / "honest" / f"{name}.py")
        lines.append(f"| `{name}` | {what} | {why} | {FORMS[line.forms]} |")
    faults = ", ".join(f"`{name}`" for name in PROBLEM_FAULTS)
    return "\n".join([*lines, "", f"Tasks that are refused before any kernel is tried: {faults}."]) + "\n"


def current() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(BEGIN) + len(BEGIN)] + "\n\n" + tables() + "\n" + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(current(), encoding="utf-8")
