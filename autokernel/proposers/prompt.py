"""The request for one edit of kernel.py, built from plain data by pure functions.

    system   the rules, the device                                              the same for a whole run
    task     reference, shapes, roofline, knowledge                             the same for a task
    turn     times, evidence, source, memory, earlier attempts, what is asked   new every time

Each part has a budget of characters (`BUDGET`), which no input makes it exceed.  When a model's context is
shorter than all of them together, `build_request` leaves out more with every step of ``trim``: knowledge,
older attempts, memory, evidence, and then it clips the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autokernel.proposers.base import TaskState
from autokernel.proposers.clip import clip_list, clip_middle, fenced, one_line
from autokernel.proposers.evidence import describe_evidence, describe_roofline, stage_texts
from autokernel.proposers.facts import DeviceFacts
from autokernel.proposers.provider import Request
from autokernel.proposers.rules import RULES
from autokernel.records import Experiment, Port, Task

BUDGET = {
    "device": 2_500, "facts": 6_000, "reference": 20_000, "knowledge": 6_500,
    "times": 2_000, "evidence": 3_500, "source": 40_000, "memory": 5_000, "history": 6_000, "error": 6_000,
    "ask": 2_000,
}  # fmt: skip
"""Characters of each part, its heading included.  Rules are a constant."""
SYSTEM_LIMIT = len(RULES) + 2 + BUDGET["device"]
TASK_LIMIT = sum(BUDGET[n] for n in ("facts", "reference", "knowledge")) + 4
TURN_LIMIT = 12 + sum(BUDGET[n] for n in ("times", "evidence", "source", "memory", "history", "error", "ask"))

MAX_TRIM = 5
FEW_ATTEMPTS = 3
SHORT_REFERENCE = 4_000
MAX_OUTPUT_TOKENS = 32_000
LEAST_OUTPUT_TOKENS = 4_000

KNOWLEDGE = "# What is known to help here, and when it backfires"
MEMORY = "# What earlier attempts on such regions taught"
EDIT, REPAIR, CORRECT = "# Asked for: an edit", "# Asked for: a repair", "# Asked for: the edit again"

_IMPROVE = """\
Name the one bottleneck that the numbers above point to, and make the one change that moves it most. Don't
repeat what failed. If small changes have stopped paying, change the algorithm, what is fused, or how memory
is laid out."""
_MEND = """\
Only its implementation is wrong. Find the cause in the error text and mend the file above: the edit applies
to it. Change nothing else. If the plan itself can't work, say so in MECHANISM and make the smallest correct
file of it."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A plan whose last file failed: that file, and what went wrong, as the judge tells it."""

    row: Experiment
    source: str
    error: str


def build_request(
    state: TaskState,
    device: DeviceFacts | str,
    *,
    knowledge: str = "",
    repair: Repair | None = None,
    trim: int = 0,
) -> Request:
    """What is sent for one edit, or for the repair of one.  ``device`` may be no more than a name.

    ``knowledge`` are pages on such bottlenecks, in Markdown; ``trim`` is 0 to `MAX_TRIM`.
    """
    facts = facts_named(device, state.task) if isinstance(device, str) else device
    system = f"{RULES}\n\n{_part('device', '# The device', facts.describe())}"
    task = _join(
        _part("facts", f"# Task {state.task.name}", describe_task(state.task, facts)),
        _code_part(
            "reference", "# Reference: what the result must equal", state.reference,
            SHORT_REFERENCE if trim >= 5 else BUDGET["reference"],
        ),
        "" if trim >= 1 else _part("knowledge", KNOWLEDGE, knowledge),
    )  # fmt: skip
    turn = _join(
        _part("times", "# Times of one call", describe_times(state)),
        "" if trim >= 4 else _part("evidence", "# Evidence", describe_evidence(state, facts)),
        _source_part(state, repair),
        "" if trim >= 3 else _part("memory", MEMORY, state.recall),
        _history_part(state.history, FEW_ATTEMPTS if trim >= 2 else None),
        _error_part(state, repair),
        _ask(state, repair),
    )
    limit = max(MAX_OUTPUT_TOKENS >> max(trim - 1, 0), LEAST_OUTPUT_TOKENS)
    return Request(system, task, [{"role": "user", "content": turn}], limit)


def facts_named(name: str, task: Task) -> DeviceFacts:
    """What can be said of a device of which only the name is known."""
    kind = task.device.partition(":")[0]
    return DeviceFacts(name, kind, backends=("torch", "triton") if kind == "cuda" else ("torch", "cpp"))


def correction(problem: str, kind: str) -> str:
    """The second and last question of a round whose first answer holds no usable edit."""
    if kind == "truncated":
        how = (
            "Your answer reached its greatest length before the edit was whole. Send the same idea as "
            "search/replace blocks on the file that was shown, or as a shorter file, and say less before it."
        )
    elif kind == "repeat":
        how = f"{problem}. Send an edit that has not been tried."
    else:
        how = f"No edit could be taken from your answer: {problem}. Send it again in one of the two forms."
    return clip_middle(f"{CORRECT}\n{how} The four lines and the edit, nothing else.", BUDGET["ask"])


# --- task --------------------------------------------------------------------------------------------------


def describe_task(task: Task, facts: DeviceFacts) -> str:
    calls = "once" if task.call_count == 1 else f"{task.call_count} times"
    head = f"Family {task.family}, called {calls} per forward pass of the model"
    if task.share is not None:
        head += f", {task.share:.1%} of its time"
    lines = [head + ".", "Inputs, in the order of kernel_fn:"]
    ports = [f"- {_port(p)}" for p in task.inputs]
    ports += ["Outputs:", *(f"- {_port(p, output=True)}" for p in task.outputs)]
    lines.append(clip_middle("\n".join(ports), BUDGET["facts"] - 1_500))
    return "\n".join([*lines, describe_roofline(task, facts)])


def _port(port: Port, *, output: bool = False) -> str:
    text = f"{one_line(port.name, 60)}: {port.dtype}{list(port.shape)}, strides {list(port.stride)}"
    if output or port.role == "activation":
        return text
    return f"{text}, {port.role} (static: prepack gets it)"


# --- turn --------------------------------------------------------------------------------------------------


def describe_times(state: TaskState) -> str:
    lines = [f"{one_line(name, 40)}: {us:.2f} µs" for name, us in sorted(state.baselines.items())]
    best = min(state.baselines.values(), default=None)
    if state.current_latency_us is None:
        lines.append("current kernel.py: not timed yet")
    else:
        line = f"current kernel.py: {state.current_latency_us:.2f} µs"
        if best is not None:
            line += f", {best / state.current_latency_us:.2f}× the best baseline"
        lines.append(line + (" (kept: the one to beat)" if state.ahead else " (not ahead of it yet)"))
    if state.task.roofline_us is not None:
        lines.append(f"roofline: {state.task.roofline_us:.2f} µs")
    return "\n".join(lines)


def describe_history(history: Sequence[Experiment], last: int | None = None) -> list[str]:
    """The attempts, oldest first, one line each, with the outcome and the reason."""
    lines = []
    for row in history:
        tags = row.strategy.split(",")
        if row.status in ("baseline", "infra_error") or (row.proposer == "tuner" and "tuned" not in tags):
            continue  # points of a search are no attempts of their own, its result is
        outcome = row.status
        if row.latency_us is not None:
            outcome += f" at {row.latency_us:.2f} µs"
        if row.speedup_vs_best_baseline is not None:
            outcome += f", {row.speedup_vs_best_baseline:.2f}× the best baseline"
        what = f"[{one_line(row.strategy, 160)}] {row.backend}: {one_line(row.description, 240)}"
        reason = f" ({one_line(row.reason, 300)})" if row.reason else ""
        lines.append(f"- {what} -> {outcome}{reason}")
    return lines[-last:] if last else lines


def failure_text(state: TaskState, row: Experiment) -> str:
    """Why an attempt failed: the row's reason, and what its worker printed where that is known."""
    verdict = state.verdicts.get(row.candidate)
    log = verdict.log.strip() if verdict is not None else ""
    return row.reason if not log or log in row.reason else f"{row.reason}\nIts process printed:\n{log}"


def _source_part(state: TaskState, repair: Repair | None) -> str:
    if repair is not None:
        return _code_part(
            "source", "# The file that failed: repair this one", repair.source, BUDGET["source"]
        )
    return _code_part("source", "# kernel.py now: what your edit applies to", state.current, BUDGET["source"])


def _history_part(history: Sequence[Experiment], last: int | None) -> str:
    title = "# Tried on this task, oldest first"
    return _part("history", title, clip_list(
        describe_history(history, last), BUDGET["history"] - len(title) - 1, newest_last=True
    ))  # fmt: skip


def _error_part(state: TaskState, repair: Repair | None) -> str:
    if repair is not None:
        texts = [repair.error, *stage_texts(state.verdicts, repair.row.candidate)]
        return _part("error", f"# Why it failed: {repair.row.status}", "\n".join(texts))
    attempts = [
        r for r in state.history if r.candidate and r.proposer != "tuner" and r.status != "infra_error"
    ]
    if not attempts or attempts[-1].status in ("keep", "discard"):
        return ""
    last = attempts[-1]
    return _part("error", f"# The last attempt failed: {last.status}", failure_text(state, last))


def _ask(state: TaskState, repair: Repair | None) -> str:
    if repair is not None:
        plan = f"[{one_line(repair.row.strategy)}] {one_line(repair.row.description, 400)}"
        return _part("ask", REPAIR, f"The plan stands: {plan}\n{_MEND}")
    best = min(state.times_us, default=None)
    goal = f"What counts is less than {best:.2f} µs.\n" if best is not None else ""
    return _part("ask", EDIT, f"{goal}{_IMPROVE}")


# --- parts -------------------------------------------------------------------------------------------------


def _part(name: str, title: str, body: str) -> str:
    """A titled part within its budget; nothing for an empty one."""
    if not body.strip():
        return ""
    return f"{title}\n{clip_middle(body.strip(), BUDGET[name] - len(title) - 1)}"


def _code_part(name: str, title: str, source: str, limit: int) -> str:
    if not source.strip():
        return ""
    note = " (clipped: edit it with search/replace blocks)" if name == "source" else " (clipped)"
    room = limit - len(title) - len(note) - 80
    body = fenced(clip_middle(source, room))
    if len(body) > limit - len(title) - len(note) - 1:  # a fence of its own length in it
        body = clip_middle(source, room)
    return f"{title}{note if len(source) > room else ''}\n{body}"


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
