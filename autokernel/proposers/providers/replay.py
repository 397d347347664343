"""Replies read from a file: for tests, demonstrations and looking again at a recorded run.

Each line of the JSONL file is an object with ``text`` (and optionally ``finish``, ``tokens_in``,
``tokens_out``, ``tokens_cached``, ``cost_usd``, ``model``), or with ``error`` (and ``kind``) for a call
that failed.  A line with ``match`` is given only to a prompt that contains that text.  Lines are used once,
in order; the other providers' exchanges are recorded in the same form to ``llm.jsonl`` in the run folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from autokernel.errors import UsageError
from autokernel.proposers.provider import ErrorKind, ProviderError, Reply, Request

_FINISHES = ("stop", "length", "refused")


_KINDS = get_args(ErrorKind)


def create(model: str, base_url: str | None = None, **unused: object) -> Replay:
    """``model`` is the path of the file."""
    return Replay(Path(model))


class Replay:
    name = "replay"

    def __init__(self, path: Path) -> None:
        self.model = path.name
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"can't read the recording {path}: {reason}") from None
        self._pending: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                self._pending.append(_parse(path, number, line))

    def complete(self, request: Request) -> Reply | None:
        prompt = "\n".join([request.system, request.task, *(turn["content"] for turn in request.turns)])
        for index, entry in enumerate(self._pending):
            if entry.get("match", "") in prompt:
                del self._pending[index]
                break
        else:
            return None
        if "error" in entry:
            raise ProviderError(str(entry["error"]), kind=entry.get("kind", "other"))
        return Reply(
            text=entry["text"],
            finish=entry.get("finish", "stop"),
            tokens_in=entry.get("tokens_in"),
            tokens_out=entry.get("tokens_out"),
            tokens_cached=entry.get("tokens_cached"),
            cost_usd=entry.get("cost_usd"),
            model=entry.get("model", self.model),
        )


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or not (isinstance(entry.get("text"), str) or "error" in entry):
        raise UsageError(f'{path}, line {number}: expected a JSON object with "text" or "error"')
    if entry.get("finish", "stop") not in _FINISHES:
        raise UsageError(f"{path}, line {number}: finish must be one of {', '.join(_FINISHES)}")
    if entry.get("kind", "other") not in _KINDS:
        raise UsageError(f"{path}, line {number}: kind must be one of {', '.join(_KINDS)}")
    return entry
