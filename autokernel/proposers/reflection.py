"""What a proposer makes of a verdict: was the diagnosis right, what to avoid, what to try.

Kept in ``reflections.jsonl`` of the run folder, one line each, and read from there for the next prompt on
this task and on others of its family, also by a resumed run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from autokernel.proposers import jsonl
from autokernel.proposers.clip import clip_middle, one_line
from autokernel.records import Experiment, Task

FILE_NAME = "reflections.jsonl"
REFLECT = "# Asked for: a reflection"
MAX_FIELD = 300
MAX_PROBLEM = 3_000
MAX_OUTPUT_TOKENS = 3_000
"""Of the reply; three lines, and what a model thinks before it writes them."""
_FIELD = re.compile(r"^(diagnosis|avoid|try)[*_` ]*[:：](.*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reflection:
    """On one attempt.  ``next`` is what to try; ``speedup`` is against the best baseline, None if untimed."""

    task: str
    family: str
    candidate: str
    strategy: str
    status: str
    speedup: float | None
    diagnosis: str
    avoid: str
    next: str

    def __str__(self) -> str:
        outcome = self.status + (f" at {self.speedup:.2f}× the best baseline" if self.speedup else "")
        parts = [f"[{self.strategy}] {outcome}", f"diagnosis {self.diagnosis}" if self.diagnosis else ""]
        parts += [f"avoid: {self.avoid}" if self.avoid else "", f"try: {self.next}" if self.next else ""]
        return "; ".join(p for p in parts if p)


def question(row: Experiment, problem: str = "") -> str:
    """What is asked after the verdict that ``row`` holds; ``problem`` is the text of a failure."""
    outcome = row.status
    if row.latency_us is not None:
        outcome += f": {row.latency_us:.2f} µs"
    if row.speedup_vs_best_baseline is not None:
        outcome += f", {row.speedup_vs_best_baseline:.2f}× the best baseline"
    if row.speedup_vs_parent is not None:
        outcome += f", {row.speedup_vs_parent:.2f}× the kernel it was made from"
    if row.pct_peak is not None:
        outcome += f", {row.pct_peak:.0f} % of the roofline's speed"
    if row.bound:
        outcome += f", bound: {row.bound}"
    text = clip_middle(problem or one_line(row.reason, 400), MAX_PROBLEM)
    return (
        f"{REFLECT}\nThe verdict on your edit: {outcome}\n{text}\n"
        "Compare it with your prediction. Write three lines and nothing else. They are shown before the next "
        "attempt on this region and on others like it, so name mechanisms and numbers:\n"
        "DIAGNOSIS: <right, wrong or unclear> - <the number that shows it>\n"
        "AVOID: <what not to do again on such a region, and why>\n"
        "TRY: <the next thing that is worth it, or nothing>"
    )


def parse(text: str, task: Task, row: Experiment) -> Reflection | None:
    """The reflection in a reply; None for one that holds none of the three lines."""
    found: dict[str, str] = {}
    for line in text[:20_000].splitlines():
        if match := _FIELD.match(line[:2000].lstrip(" \t*_#>-`")):
            found[match[1].lower()] = one_line(match[2].strip(" \t*_`"), MAX_FIELD)
    if not any(found.values()):
        return None
    return Reflection(
        task.name, task.family, row.candidate, row.strategy, row.status, row.speedup_vs_best_baseline,
        found.get("diagnosis", ""), found.get("avoid", ""), found.get("try", ""),
    )  # fmt: skip


def store(run: Path, reflection: Reflection) -> None:
    """Raises RunFolderError when the disk refuses it."""
    jsonl.append(run / FILE_NAME, asdict(reflection))


def load(run: Path) -> list[Reflection]:
    """All of a run, oldest first, one per attempt; what isn't of this form is passed over."""
    found: dict[tuple[str, str], Reflection] = {}
    for entry in jsonl.read(run / FILE_NAME):
        try:
            one = Reflection(**{f.name: entry[f.name] for f in fields(Reflection)})
        except KeyError:
            continue
        texts = (
            one.task,
            one.family,
            one.candidate,
            one.strategy,
            one.status,
            one.diagnosis,
            one.avoid,
            one.next,
        )
        if all(isinstance(t, str) for t in texts) and isinstance(one.speedup, float | int | None):
            found[one.task, one.candidate] = one
    return list(found.values())


def relevant(reflections: Sequence[Reflection], task: Task, limit: int = 8) -> list[Reflection]:
    """Those on ``task``, then those on others of its family; of each the newest first."""
    newest = list(reversed(reflections))
    own = [r for r in newest if r.task == task.name]
    return [*own, *(r for r in newest if r.task != task.name and r.family == task.family)][:limit]
