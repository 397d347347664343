"""A language model as a proposer: prompt, one question, one whole-file edit.

It is used only when ``--llm PROVIDER:MODEL`` says so.  Every exchange is appended to ``llm.jsonl`` in the run
folder, in the form that the ``replay`` provider reads.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from autokernel.errors import UsageError
from autokernel.proposers.base import TaskState
from autokernel.proposers.edit import extract_edit
from autokernel.proposers.playbook import backend_of
from autokernel.proposers.prompt import build_prompt
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.proposers.provider import Message, Provider, ProviderError, Reply
from autokernel.proposers.providers import PROVIDERS

MAX_FAILURES = 3


@dataclass
class Spending:
    """Tokens and dollars of a run so far, with their limits; None is no limit."""

    max_tokens: int | None = None
    max_usd: float | None = None
    tokens: int = 0
    usd: float = 0.0
    unpriced: bool = False

    def add(self, tokens_in: int | None, tokens_out: int | None, cost_usd: float | None) -> None:
        self.tokens += (tokens_in or 0) + (tokens_out or 0)
        self.usd += cost_usd or 0.0
        if cost_usd is None and (tokens_in or tokens_out):
            self.unpriced = True

    def exhausted(self) -> str:
        """Why no further question may be asked; empty when one may."""
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return f"--max-tokens {self.max_tokens} is spent ({self.tokens} used)"
        if self.max_usd is not None and self.unpriced:
            return "the provider reports no cost, so --max-usd can't be kept: use --max-tokens"
        if self.max_usd is not None and self.usd >= self.max_usd:
            return f"--max-usd {self.max_usd:g} is spent (${self.usd:.2f} used)"
        return ""


def make_provider(text: str, base_url: str | None = None) -> Provider:
    """The provider of ``--llm NAME:MODEL``.  Raises UsageError for a name or form that doesn't exist."""
    name, colon, model = text.partition(":")
    if name not in PROVIDERS:
        raise UsageError(f"--llm {text}: no provider {name!r}; there are {', '.join(sorted(PROVIDERS))}")
    if not colon or not model:
        raise UsageError(f"--llm {text}: expected {name}:{'FILE.jsonl' if name == 'replay' else 'MODEL'}")
    return PROVIDERS[name].create(model, base_url)


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
        self.dead = self.dead or self.spending.exhausted()
        if self.dead:
            return None
        messages = build_prompt(state, self._device)
        start = time.monotonic()
        try:
            reply = self.provider.complete(messages)
        except ProviderError as error:
            self._write(messages, None, str(error))
            self._failures += 1
            if error.final or self._failures >= MAX_FAILURES:
                self.dead = f"{self.name} is not asked any more: {error}"
            return Failure(
                str(error),
                model=self.provider.model,
                proposer=self.name,
                final=bool(self.dead),
                seconds=time.monotonic() - start,
            )
        if reply is None:
            return None
        self._failures = 0
        self._write(messages, reply, "")
        self.spending.add(reply.tokens_in, reply.tokens_out, reply.cost_usd)
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

    def _write(self, messages: list[Message], reply: Reply | None, error: str) -> None:
        if self._record is None:
            return
        entry: dict[str, object] = {"prompt": messages[-1]["content"]}
        if reply is None:
            entry["error"] = error
        else:
            entry |= {
                "text": reply.text,
                "finish": reply.finish,
                "tokens_in": reply.tokens_in,
                "tokens_out": reply.tokens_out,
                "cost_usd": reply.cost_usd,
                "model": reply.model,
            }
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
