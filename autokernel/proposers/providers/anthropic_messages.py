"""Anthropic's messages API (``--llm anthropic:MODEL``), or a server that speaks it (``--base-url``).

The constant parts, system and task, end in cache marks, so that a second request on a task reads them at a
tenth of the price.  The model thinks as it sees fit (adaptive); one that doesn't know that is given a
budget, and one that can't think at all does without.  Thinking is never part of the text, nor is any block
that isn't text.
"""

from __future__ import annotations

import os
from typing import Any

from autokernel.errors import UsageError
from autokernel.proposers.keys import VARIABLES, find_key
from autokernel.proposers.provider import Request
from autokernel.proposers.providers._wire import Heard, Streaming, note, whole

_CACHED = {"type": "ephemeral"}
_MIN_BUDGET = 1024


def create(model: str, base_url: str | None = None, **settings: Any) -> AnthropicMessages:
    """``settings`` are the keyword arguments of `Streaming`."""
    return AnthropicMessages(model, base_url, **settings)


class AnthropicMessages(Streaming):
    name = "anthropic"
    key_variable = VARIABLES["anthropic"]
    default_address = "https://api.anthropic.com"

    def __init__(self, model: str, base_url: str | None, **settings: Any) -> None:
        base_url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or None
        super().__init__(model, base_url, **settings)
        key = find_key(self.name)
        if not key and not base_url:
            raise UsageError(
                "no API key: set ANTHROPIC_API_KEY, or give the --base-url of a local server, "
                "or leave --llm out to use the built-in playbook"
            )
        import anthropic

        self._thinking = "adaptive"
        # The SDK adds /v1/messages itself; an address that was given for other clients may end in /v1.
        address = self.address.rstrip("/").removesuffix("/v1")
        self._client = anthropic.Anthropic(
            api_key=key or "none", base_url=address, **self._clock.options(anthropic)
        )

    def _sdk_errors(self) -> tuple[type[Exception], ...]:
        import anthropic

        return (anthropic.AnthropicError,)

    def _open(self, request: Request) -> Any:
        limit = self._limit_of(request)
        options: dict[str, Any] = {}
        if self._thinking == "adaptive":
            options["thinking"] = {"type": "adaptive"}
        elif self._thinking == "enabled" and limit > 2 * _MIN_BUDGET:
            options["thinking"] = {"type": "enabled", "budget_tokens": limit // 2}
        if self.effort:
            options["output_config"] = {"effort": self.effort}
        system = [{"type": "text", "text": request.system, "cache_control": _CACHED}]
        return self._client.messages.create(
            model=self.model,
            max_tokens=limit,
            system=system,  # type: ignore[arg-type]
            messages=_messages(request),  # type: ignore[arg-type]
            stream=True,
            **options,
        )

    def _read(self, stream: Any, heard: Heard) -> None:
        for event in stream:
            kind = getattr(event, "type", None)
            if kind == "message_start":
                message = getattr(event, "message", None)
                heard.began = True
                heard.model = getattr(message, "model", None) or ""
                _count(getattr(message, "usage", None), heard)
            elif kind == "content_block_start":
                block = getattr(event, "content_block", None)
                if getattr(block, "type", None) == "text":
                    heard.text.append(getattr(block, "text", None) or "")
            elif kind == "content_block_delta":
                delta = getattr(event, "delta", None)
                if getattr(delta, "type", None) == "text_delta":
                    heard.text.append(getattr(delta, "text", None) or "")
                else:
                    heard.hidden += len(getattr(delta, "thinking", None) or "")
            elif kind == "message_delta":
                reason = getattr(getattr(event, "delta", None), "stop_reason", None)
                if reason == "refusal":
                    heard.finish = "refused"
                elif reason in ("max_tokens", "model_context_window_exceeded"):
                    heard.finish = "length"
                _count(getattr(event, "usage", None), heard, final=True)
            elif kind == "message_stop":
                heard.ended = True

    def _drop(self, message: str) -> bool:
        if self.effort and ("effort" in message or "output_config" in message):
            note(f"{self.model} takes no effort {self.effort!r}; it is asked without")
            self.effort = None
            return True
        if self._thinking and ("thinking" in message or "adaptive" in message):
            self._thinking = "enabled" if self._thinking == "adaptive" else ""
            return True
        return False


def _messages(request: Request) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(request.turns):
        content: Any = turn["content"]
        if number == 0 and request.task:
            content = [
                {"type": "text", "text": request.task, "cache_control": _CACHED},
                {"type": "text", "text": turn["content"]},
            ]
        messages.append({"role": turn["role"], "content": content})
    return messages


def _count(usage: Any, heard: Heard, *, final: bool = False) -> None:
    """Input comes with the first event, in three parts; output grows, and counts with the last."""
    plain = whole(getattr(usage, "input_tokens", None))
    if plain is not None:
        read = whole(getattr(usage, "cache_read_input_tokens", None)) or 0
        written = whole(getattr(usage, "cache_creation_input_tokens", None)) or 0
        heard.tokens_in, heard.tokens_cached, heard.tokens_written = plain + read + written, read, written
    if final:
        heard.tokens_out = whole(getattr(usage, "output_tokens", None))
