"""Every exchange with a language model, in ``llm.jsonl`` of the run folder.

One line per request: task, purpose (edit, repair, correct, reflect), what was asked, what came, tokens, cost.
The constant parts of a prompt are written once per file.  ``match`` is the heading of the task, by which
``--llm replay:llm.jsonl`` gives each task its own answers in the order they came.  No key is ever in it.

An answer is on disk before anything is done with it.  If the run is killed before the row that it leads to,
`Transcript.unspent` hands it out again, so that it isn't paid for twice, and `Transcript.totals` says what
was paid in all.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from autokernel.proposers import jsonl
from autokernel.proposers.keys import redact
from autokernel.proposers.provider import ProviderError, Reply, Request

Purpose = Literal["edit", "repair", "correct", "reflect"]
_NUMBERS = ("tokens_in", "tokens_out", "tokens_cached")


class Transcript:
    """``path`` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._earlier = jsonl.read(path) if path else []
        self._written = {e["prompt"].get(f"{part}_id") for e in self._earlier
                         if isinstance(e.get("prompt"), dict) for part in ("system", "task")}  # fmt: skip

    def record(
        self,
        task: str,
        purpose: Purpose,
        attempt: int,
        request: Request,
        answer: Reply | ProviderError,
        seconds: float,
    ) -> None:
        """Raises RunFolderError when the disk refuses it.  ``attempt`` counts the task's rows until then."""
        if self.path is None:
            return
        entry: dict[str, Any] = {"task": task, "purpose": purpose, "attempt": attempt,
                                 "match": redact(request.task.partition("\n")[0])}  # fmt: skip
        reply = answer.lost if isinstance(answer, ProviderError) else answer
        if isinstance(answer, ProviderError):
            entry |= {"error": redact(str(answer)), "kind": answer.kind}
        else:
            entry |= {"text": redact(answer.text), "finish": answer.finish}
        if reply is not None:
            entry |= {name: getattr(reply, name) for name in _NUMBERS}
            entry |= {"cost_usd": reply.cost_usd, "model": reply.model}
        entry |= {"seconds": round(seconds, 3), "prompt": self._prompt(request)}
        jsonl.append(self.path, entry)

    def _prompt(self, request: Request) -> dict[str, Any]:
        prompt: dict[str, Any] = {"turn": redact(request.turns[-1]["content"])}
        for part, text in (("system", request.system), ("task", request.task)):
            name = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
            prompt[f"{part}_id"] = name
            if name not in self._written:
                self._written.add(name)
                prompt[part] = redact(text)
        prompt["max_output_tokens"] = request.max_output_tokens
        return prompt

    def unspent(self, task: str, purpose: Purpose, attempt: int) -> Reply | None:
        """The next answer that an earlier, killed process got for this very round and made no row of."""
        mine = [e for e in self._earlier if e.get("task") == task and e.get("attempt") == attempt]
        mine = [e for e in mine if isinstance(e.get("text"), str)]
        if not mine:
            return None
        entry = mine[0]
        if entry.get("purpose") != purpose:  # the round went another way
            self._earlier = [e for e in self._earlier if e not in mine]
            return None
        self._earlier.remove(entry)
        finish = entry.get("finish")
        return Reply(
            entry["text"],
            finish if finish in ("length", "refused") else "stop",
            *(entry[n] if isinstance(entry.get(n), int) else None for n in _NUMBERS),
            cost_usd=entry["cost_usd"] if isinstance(entry.get("cost_usd"), float | int) else None,
            model=str(entry.get("model") or ""),
        )

    def totals(self) -> tuple[int, float | None]:
        """Tokens of what earlier processes recorded, and dollars; None if those of any answer are unknown."""
        paid = [e for e in self._earlier if isinstance(e.get("tokens_in"), int)]
        tokens = sum(e["tokens_in"] + (e.get("tokens_out") or 0) for e in paid)
        costs = [e.get("cost_usd") for e in paid]
        return tokens, None if None in costs else sum(c for c in costs if c is not None)
