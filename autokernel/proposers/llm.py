"""A language model as a proposer: prompt, one question, one whole-file edit.

It is used only when ``--llm PROVIDER:MODEL`` says so.  Every exchange is appended to ``llm.jsonl`` in the run
folder, in the form that the ``replay`` provider reads.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from autokernel.proposers.base import TaskState
from autokernel.proposers.edit import extract_edit
from autokernel.proposers.keys import redact
from autokernel.proposers.playbook import backend_of
from autokernel.proposers.prompt import build_request
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.proposers.provider import Provider, ProviderError, Reply, Request
from autokernel.proposers.spending import Spending

MAX_FAILURES = 3


class LLMProposer:
    """Asks ``provider`` for the next edit.

    ``dead`` says why it will not be asked again in this run: a limit is spent, the API refuses the key, or
    it has failed `MAX_FAILURES` times in a row.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        device: str,
        patience: int = 5,
        spending: Spending | None = None,
        record: Path | None = None,
    ) -> None:
        self.provider = provider
        self.name = provider.name
        self.patience: int | None = patience
        self.spending = spending or Spending()
        self.dead = ""
        self._device = device
        self._record = record
        self._failures = 0

    def propose(self, state: TaskState) -> Proposal | Failure | None:
        messages = build_request(state, self._device)
        self.dead = self.dead or self.spending.refuses(messages)
        if self.dead:
            return None
        start = time.monotonic()
        try:
            reply = self.provider.complete(messages)
        except ProviderError as error:
            self._write(messages, None, str(error))
            if error.lost is not None:
                self.spending.add(error.lost.tokens_in, error.lost.tokens_out, error.lost.cost_usd)
            self._failures += 1
            if error.final or self._failures >= MAX_FAILURES:
                self.dead = f"{self.name} is not asked any more: {error}"
            return Failure(
                str(error),
                tokens_in=error.lost and error.lost.tokens_in,
                tokens_out=error.lost and error.lost.tokens_out,
                cost_usd=error.lost and error.lost.cost_usd,
                model=self.provider.model,
                proposer=self.name,
                final=bool(self.dead),
                seconds=time.monotonic() - start,
            )
        if reply is None:
            return None
        self._failures = 0
        self._write(messages, reply, "")
        self.spending.add(reply.tokens_in, reply.tokens_out, reply.cost_usd, reply.tokens_cached)
        edit = extract_edit(reply)
        common = {
            "tokens_in": reply.tokens_in,
            "tokens_out": reply.tokens_out,
            "cost_usd": reply.cost_usd,
            "model": reply.model or self.provider.model,
            "proposer": self.name,
            "seconds": time.monotonic() - start,
        }
        if edit.source is None:
            return Failure(edit.problem, **common)
        return Proposal(
            edit.source, edit.strategy or "unnamed", edit.description, backend_of(edit.source), **common
        )

    def _write(self, messages: Request, reply: Reply | None, error: str) -> None:
        if self._record is None:
            return
        entry: dict[str, object] = {"prompt": messages.task + messages.turns[-1]["content"]}
        if reply is None:
            entry["error"] = error
        else:
            entry |= {
                "text": reply.text,
                "finish": reply.finish,
                "tokens_in": reply.tokens_in,
                "tokens_out": reply.tokens_out,
                "tokens_cached": reply.tokens_cached,
                "cost_usd": reply.cost_usd,
                "model": reply.model,
            }
        with self._record.open("a", encoding="utf-8") as file:
            file.write(redact(json.dumps(entry)) + "\n")
