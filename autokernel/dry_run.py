"""``optimize --dry-run``: the first prompt that a language model would get, and what asking would cost.

The model is captured, profiled and cut into tasks as usual, so that a real run goes on from the same folder.
No kernel is judged, no baseline is timed, and nothing is sent: no key is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel import scheduler
from autokernel.errors import UsageError
from autokernel.loop import TaskLoop
from autokernel.optimize import Options, chosen, count_spent, kernel_task
from autokernel.proposers.prompt import build_request
from autokernel.proposers.provider import Request
from autokernel.proposers.spending import Spending, typical_input_tokens, worst_input_tokens
from autokernel.results import Journal
from autokernel.run_folder import RunFolder, run_stem
from autokernel.session import Session

if TYPE_CHECKING:
    from rich.console import Console

    from autokernel.capture.source import SourceSpec
    from autokernel.proposers.choice import Choice
    from autokernel.records import Task


@dataclass(frozen=True)
class Preview:
    """What would be sent first, on ``task``, and the limits it would be sent under."""

    task: str
    choice: Choice
    request: Request

    @property
    def spending(self) -> Spending:
        return self.choice.spending

    def estimate(self) -> dict[str, Any]:
        """Tokens and dollars of one request, and how many of them the limits let through; None: unknown."""
        found: dict[str, Any] = {}
        for name, (tokens, dollars) in {
            "worst": self.spending.worst(self.request),
            "typical": self.spending.typical(self.request),
        }.items():
            found[name] = {"tokens": tokens, "usd": dollars, "requests": self._fit(tokens, dollars)}
        found["worst"]["tokens_in"] = worst_input_tokens(self.request)
        found["typical"]["tokens_in"] = typical_input_tokens(self.request)
        return found

    def _fit(self, tokens: int, dollars: float | None) -> int | None:
        counts = []
        if self.spending.max_tokens is not None:
            counts.append((self.spending.max_tokens - self.spending.tokens) // tokens)
        if self.spending.max_usd is not None and dollars:
            counts.append(int((self.spending.max_usd - self.spending.usd) / dollars))
        return max(min(counts), 0) if counts else None

    def to_json(self) -> dict[str, Any]:
        request = self.request
        return {
            "task": self.task,
            "provider": self.choice.name,
            "model": self.choice.model,
            "request": {
                "system": request.system,
                "task": request.task,
                "turns": list(request.turns),
                "max_output_tokens": request.max_output_tokens,
            },
            "estimate": self.estimate(),
        }

    def text(self) -> str:
        request = self.request
        parts = [f"===== system\n{request.system}", f"===== task: {self.task}\n{request.task}"]
        parts += [f"===== {turn['role']}\n{turn['content']}" for turn in request.turns]
        lines = ["===== estimate", f"Nothing was sent. {self.choice.describe()}"]
        for name, numbers in self.estimate().items():
            cost = "cost unknown" if numbers["usd"] is None else f"${numbers['usd']:.4f}"
            count = "" if numbers["requests"] is None else f"; the limits let {numbers['requests']} through"
            out = numbers["tokens"] - numbers["tokens_in"]
            lines.append(f"{name + ':':8} {numbers['tokens_in']} tokens in, {out} out, {cost} each{count}")
        return "\n\n".join([*parts, "\n".join(lines)])


def dry_run(
    model: str,
    ref: Path | None,
    spec: SourceSpec | None,
    device: str,
    run: Path | None,
    options: Options,
    out: Console,
) -> tuple[Path, Preview]:
    """The run folder, and the preview of its first task by the scheduler's order.

    Raises UsageError where nobody would be asked, or about nothing.
    """
    choice = chosen(options)
    if choice is None:
        raise UsageError("--dry-run shows what a model would be asked: add --llm PROVIDER:MODEL")
    if ref is not None:
        where = run or Path("runs") / run_stem(model)
        with RunFolder(where, fresh=options.fresh) as folder:
            task, name = kernel_task(folder, Path(model), ref, device)
            return folder.path, _preview(choice, task, folder.journal(), name)
    assert spec is not None
    with Session.start(spec, run, fresh=options.fresh, out=out) as session:
        plans = scheduler.plan(session.tasks(options.top))
        worth_it = [plan.task for plan in plans if plan.effort == "full"]
        if not worth_it:
            raise UsageError(f"{model}: no task has head-room left, so nobody would be asked")
        return session.path, _preview(choice, worth_it[0], session.journal, session.device)


def _preview(choice: Choice, task: Task, journal: Journal, device: str) -> Preview:
    loop = TaskLoop(task, journal, _never, [], tag="", device=device)
    count_spent(choice, journal)
    return Preview(task.name, choice, build_request(loop.recall(), device))


def _never(task: Task) -> Any:
    raise AssertionError("a dry run judges nothing")
