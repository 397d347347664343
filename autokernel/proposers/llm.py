"""A language model as a proposer.

    propose   what is known of the task -> one question -> one edit
              no usable edit in the answer: one corrective round, in the same conversation
              the last plan failed in its implementation: its repair is asked for, before any new idea
    learn     the verdict -> a short reflection, as the next question of that conversation

It is used only when somebody chose one.  Every exchange is in ``llm.jsonl`` of the run folder, in the form
that the ``replay`` provider reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from autokernel import scheduler
from autokernel.proposers import reflection
from autokernel.proposers.asking import Asker, Cost, NoAnswer
from autokernel.proposers.base import TaskState
from autokernel.proposers.clip import clip_middle
from autokernel.proposers.edit import Edit, extract_edit
from autokernel.proposers.evidence import bound_of
from autokernel.proposers.facts import DeviceFacts
from autokernel.proposers.playbook import backend_of
from autokernel.proposers.prompt import Repair, build_request, correction, facts_named, failure_text
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.proposers.provider import Message, Provider, Request
from autokernel.proposers.reflection import Reflection
from autokernel.proposers.spending import Spending
from autokernel.proposers.transcript import Purpose, Transcript
from autokernel.records import Experiment, Task
from autokernel.results import source_id, source_path
from autokernel.scheduler import REPAIR

MAX_FAILURES = 3
"""Requests in a row that the API refused for no reason we know: then it isn't asked any more."""
MAX_ANSWER = 40_000
"""Characters of an answer that are shown to the model again."""


@dataclass
class Talk:
    """One round's conversation: the first request by how much is left out, and what has been said since."""

    state: TaskState
    first: Callable[[int], Request]
    repair: Repair | None
    cost: Cost = field(default_factory=Cost)
    since: list[Message] = field(default_factory=list)
    answer: str = ""
    proposal: Proposal | None = None

    @property
    def base(self) -> str:
        """The source that an edit applies to."""
        return self.repair.source if self.repair else self.state.current

    def go_on(self, question: str) -> None:
        answer = clip_middle(self.answer.strip(), MAX_ANSWER) or "(an empty answer)"
        said: list[Message] = [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
        self.since += said


class LLMProposer:
    """Asks ``provider`` for the next edit.

    ``dead`` says why it will not be asked again in this run: a limit is spent, the API refuses the key, or
    it didn't come back.  ``say`` is told of that and of every pause, ``stop`` ends a pause early.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        device: DeviceFacts | str,
        patience: int = 5,
        spending: Spending | None = None,
        record: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.provider = provider
        self.name = provider.name
        self.patience: int | None = patience
        self.spending = spending or Spending()
        self.dead = ""
        self._device = device
        self._say = say
        self._asker = Asker(provider, self.spending, Transcript(record), say, stop, sleep)
        self._failures = 0
        self._declined: dict[str, str] = {}
        self._knowledge: dict[str, str] = {}
        self._talk: Talk | None = None

    def propose(self, state: TaskState) -> Proposal | Failure | None:
        self._talk = None
        if self.dead or self._declines(state):
            return None
        talk = self._begin(state)
        try:
            edit = self._edit(talk)
        except NoAnswer as none:
            return self._give_up(none, talk)
        if edit is None:
            return None
        self._failures = 0
        if edit.source is None:
            return self._failure(edit.problem, talk, strategy=REPAIR if talk.repair else "")
        talk.proposal = self._proposal(edit, edit.source, talk)
        self._talk = talk
        return talk.proposal

    def request(self, state: TaskState) -> Request:
        """What would be sent first."""
        return self._begin(state).first(0)

    def learn(self, state: TaskState, proposal: Proposal, row: Experiment) -> Reflection | None:
        """Ask what to make of the verdict; its cost is added to ``proposal``.

        Not for a plan that is going to be repaired, nor where the limits of the run don't allow it, nor from
        an API that is in trouble.
        """
        talk = self._talk
        if talk is None or talk.proposal is not proposal or self.dead or row.status == "infra_error":
            return None
        if scheduler.open_plan([*state.history, row], self.name) is not None:
            return None
        self._talk = None
        failed = row.status not in ("keep", "discard")
        talk.go_on(reflection.question(row, failure_text(state, row) if failed else ""))
        try:
            answer = self._ask(talk, "reflect", limit=reflection.MAX_OUTPUT_TOKENS)
        except NoAnswer:
            answer = None  # whatever it is, the next proposal will meet it
        proposal.tokens_in, proposal.tokens_out = talk.cost.tokens_in, talk.cost.tokens_out
        proposal.cost_usd, proposal.seconds = talk.cost.cost_usd, talk.cost.seconds
        if answer is None or answer.finish == "refused":
            return None
        return reflection.parse(answer.text, state.task, row)

    # -- one round -------------------------------------------------------------------------------------------

    def _begin(self, state: TaskState) -> Talk:
        facts = facts_named(self._device, state.task) if isinstance(self._device, str) else self._device
        knowledge = self._known(state, facts)
        repair = self._repair(state)

        def first(trim: int) -> Request:
            return build_request(state, facts, knowledge=knowledge, repair=repair, trim=trim)

        return Talk(state, first, repair)

    def _repair(self, state: TaskState) -> Repair | None:
        row = scheduler.open_plan(state.history, self.name)
        if row is None:
            return None
        path = source_path(state.task.dir, row.candidate)
        if not path.exists():
            return None
        source = path.read_text(encoding="utf-8", errors="replace")
        return Repair(row, source, failure_text(state, row))

    def _edit(self, talk: Talk) -> Edit | None:
        """The edit of this round, or why there is none; None at the end of a recording.  Raises NoAnswer."""
        reply = self._ask(talk, "repair" if talk.repair else "edit")
        if reply is None:
            return None
        first = self._checked(extract_edit(reply, talk.base), talk.state)
        if not first.problem or first.kind == "refused":
            return first
        talk.go_on(correction(first.problem, first.kind))
        try:
            again = self._ask(talk, "correct")
        except NoAnswer as none:
            first.problem += f" (and the corrected answer didn't come: {none})"
            self.dead = self._buried(str(none)) if none.final else self.dead
            return first
        if again is None:
            return first
        second = self._checked(extract_edit(again, talk.base), talk.state)
        if not second.strategy:  # said once is enough
            second.strategy, second.description = first.strategy, first.description
        if second.source is None:
            second.problem = f"{second.problem}; before that: {first.problem}"
        return second

    def _checked(self, edit: Edit, state: TaskState) -> Edit:
        """An edit that has had its verdict keeps its source, but has a problem."""
        if edit.source is not None and (name := source_id(edit.source)) in state.tried:
            row = next((r for r in reversed(state.history) if r.candidate == name), None)
            outcome = f", which ended as {row.status}" if row else ""
            edit.kind, edit.problem = "repeat", f"That is the same file as attempt {name}{outcome}"
        return edit

    def _ask(self, talk: Talk, purpose: Purpose, *, limit: int | None = None):
        """Raises NoAnswer."""

        def request_at(trim: int) -> Request:
            request = talk.first(trim)
            return replace(
                request,
                turns=[*request.turns, *talk.since],
                max_output_tokens=min(request.max_output_tokens, limit or request.max_output_tokens),
            )

        reply = self._asker.ask(
            request_at,
            talk.cost,
            task=talk.state.task.name,
            purpose=purpose,
            attempt=talk.state.attempts,
            patient=purpose != "reflect",
        )
        talk.answer = reply.text if reply else ""
        return reply

    def _proposal(self, edit: Edit, source: str, talk: Talk) -> Proposal:
        strategy, description = edit.strategy or "unnamed", edit.description
        if talk.repair:
            plan = [t for t in talk.repair.row.strategy.split(",") if t and t != REPAIR]
            strategy, description = ",".join([*plan, REPAIR]), f"repair: {description}"
        return Proposal(source, strategy, description, backend_of(source), **self._paid(talk))

    def _failure(self, reason: str, talk: Talk, *, strategy: str = "") -> Failure:
        return Failure(reason, strategy=strategy, final=bool(self.dead), **self._paid(talk))

    def _paid(self, talk: Talk) -> dict:
        cost = talk.cost
        return {
            "tokens_in": cost.tokens_in, "tokens_out": cost.tokens_out, "cost_usd": cost.cost_usd,
            "model": cost.model or self.provider.model, "proposer": self.name, "seconds": cost.seconds,
        }  # fmt: skip

    # -- whom and when not to ask ----------------------------------------------------------------------------

    def _declines(self, state: TaskState) -> bool:
        """Whether this task isn't worth a question; said once."""
        task = state.task
        if task.name in self._declined:
            return True
        why = scheduler.not_worth_asking(task, state.times_us)
        if why:
            self._decline(task, why)
        return bool(why)

    def _decline(self, task: Task, why: str) -> None:
        self._declined[task.name] = why
        self._say(f"{self.name} is not asked about {task.name}: {why}")

    def _give_up(self, none: NoAnswer, talk: Talk) -> Failure | None:
        """The row of a request without an answer; None where nothing was sent."""
        self._failures += 1
        if none.overflow:
            self._decline(talk.state.task, str(none))
        elif none.final or self._failures >= MAX_FAILURES:
            self.dead = self._buried(str(none))
        if none.unsent and talk.cost.tokens_in is None:
            return None
        return self._failure(str(none), talk)

    def _buried(self, why: str) -> str:
        text = f"{self.name} is not asked any more: {why}"
        self._say(text)
        return text

    def _known(self, state: TaskState, facts: DeviceFacts) -> str:
        """Pages of the knowledge base that fit, chosen once: a task's part of the prompt doesn't change."""
        name = state.task.name
        if name not in self._knowledge:
            from autokernel.playbook import knowledge

            bound = bound_of(state, facts)
            backends = sorted(facts.backends, key=lambda b: b == "torch")  # kernels first, then library calls
            entries = knowledge.relevant(backends=backends, family=state.task.family, bound=bound)
            self._knowledge[name] = knowledge.render(entries)
        return self._knowledge[name]
