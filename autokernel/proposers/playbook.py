"""The proposers that need no key: the task's own kernel.py, and the built-in strategies."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autokernel.proposers.base import TaskState
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.records import Task
from autokernel.results import source_id

if TYPE_CHECKING:
    from autokernel.playbook.strategies import StrategyContext

STARTER = "starter"


def backend_of(source: str) -> str:
    """The value of a kernel's BACKEND constant, read without running it; empty for what doesn't parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if "BACKEND" in names:
                return node.value.value if isinstance(node.value.value, str) else ""
    return "torch"  # what a file that says nothing is taken for


class StarterProposer:
    """Proposes kernel.py as it lies in the task folder, if it has no verdict yet.

    That is the starter after an extraction, and later whatever a person wrote there by hand.
    """

    name = "starter"
    patience = None

    def propose(self, state: TaskState) -> Proposal | None:
        path = state.task.dir / "kernel.py"
        source = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if not source.strip() or source_id(source) in state.tried:
            return None
        if any(row.candidate not in ("", source_id(source)) for row in state.history):
            return Proposal(
                source, "by-hand", "kernel.py as edited by hand", backend_of(source), proposer="hand"
            )
        return Proposal(
            source,
            STARTER,
            "the starter of this family, as extracted",
            backend_of(source),
            proposer=self.name,
        )


class PlaybookProposer:
    """Proposes what every strategy makes of the region, in registry order.

    ``context_of`` builds what strategies look at (the region's subgraph and its constants); it is called
    once per task, and only when a strategy applies.  A strategy is trusted code, but a plug-in: if it
    raises, that is one `Failure` in the journal and not the end of a night's run.
    """

    name = "playbook"
    patience = None

    def __init__(
        self, context_of: Callable[[Task], StrategyContext], strategies: Sequence[Any] | None = None
    ) -> None:
        self._context_of = context_of
        self._strategies = strategies
        self._pending: dict[str, list[Proposal | Failure]] = {}

    def propose(self, state: TaskState) -> Proposal | Failure | None:
        pending = self._pending.get(state.task.fingerprint)
        if pending is None:
            pending = self._pending[state.task.fingerprint] = list(self._all(state.task))
        while pending:
            item = pending.pop(0)
            if isinstance(item, Failure) or source_id(item.source) not in state.tried:
                return item
        return None

    def _all(self, task: Task) -> Iterable[Proposal | Failure]:
        strategies = self._strategies
        if strategies is None:
            from autokernel.playbook.strategies import STRATEGIES

            strategies = STRATEGIES
        applicable = [s for s in strategies if task.family in s.FAMILIES or "*" in s.FAMILIES]
        if not applicable:
            return
        context = self._context_of(task)
        for strategy in applicable:
            try:
                yield from strategy.propose(context)
            except Exception as error:  # noqa: BLE001 - the plug-in edge: see the class docstring
                yield Failure(
                    f"strategy {strategy.NAME} failed: {type(error).__name__}: {error}",
                    strategy=strategy.NAME,
                    proposer=self.name,
                )
