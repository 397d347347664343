"""OpenAI's chat-completions API, and every server that speaks it (``--base-url``: vLLM, Ollama, LM Studio,
a gateway).

The limit on the reply has two spellings: OpenAI itself takes only the new one, older servers only the old
one (and some pass over what they don't know in silence), so the address decides which is tried first.
Whatever a server refuses by name is left out from then on.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit

from autokernel.errors import UsageError
from autokernel.proposers.keys import VARIABLES, find_key
from autokernel.proposers.provider import Finish, ProviderError, Request
from autokernel.proposers.providers._errors import kind_of, one_line
from autokernel.proposers.providers._wire import Heard, Streaming, note, whole

_NEW, _OLD = "max_completion_tokens", "max_tokens"


def create(model: str, base_url: str | None = None, **settings: Any) -> OpenAICompatible:
    """``settings`` are the keyword arguments of `Streaming`."""
    return OpenAICompatible(model, base_url, **settings)


class OpenAICompatible(Streaming):
    name = "openai"
    key_variable = VARIABLES["openai"]
    default_address = "https://api.openai.com/v1"

    def __init__(self, model: str, base_url: str | None, **settings: Any) -> None:
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        super().__init__(model, base_url, **settings)
        key = find_key(self.name)
        if not key and not base_url:
            raise UsageError(
                "no API key: set OPENAI_API_KEY, or give the --base-url of a local server, "
                "or leave --llm out to use the built-in playbook"
            )
        import openai

        # What is still to be tried, the first of it in use.
        self._limit_names = [_OLD, _NEW, ""]
        if (urlsplit(self.address).hostname or "").endswith("openai.com"):
            self._limit_names = [_NEW, _OLD]  # never without a limit where it costs money
        self._usage_asked = True
        # A local server wants no key, but the SDK wants something to send.
        self._client = openai.OpenAI(
            api_key=key or "none", base_url=self.address, **self._clock.options(openai)
        )

    def _sdk_errors(self) -> tuple[type[Exception], ...]:
        import openai

        return (openai.OpenAIError,)

    def _open(self, request: Request) -> Any:
        options: dict[str, Any] = {}
        if self._limit_names[0]:
            options[self._limit_names[0]] = self._limit_of(request)
        if self._usage_asked:
            options["stream_options"] = {"include_usage": True}
        if self.effort:
            options["reasoning_effort"] = self.effort
        return self._client.chat.completions.create(
            model=self.model,
            messages=_messages(request),  # type: ignore[arg-type]
            stream=True,
            **options,
        )

    def _read(self, stream: Any, heard: Heard) -> None:
        if stream.response.headers.get("content-type", "").startswith("application/json"):
            stream.response.read()
            self._read_whole(stream.response.json(), heard)
            return
        for chunk in stream:
            _take(chunk, "delta", heard)

    def _read_whole(self, answer: Any, heard: Heard) -> None:
        """The answer of a server that doesn't stream, or sends its errors with a good status."""
        if error := _get(answer, "error"):
            text = json.dumps(error)
            kind = kind_of(None, text)
            raise ProviderError(
                self._line(kind, None, one_line(_text(_get(error, "message")) or text)), kind=kind
            )
        _take(answer, "message", heard)
        heard.ended = heard.began

    def _drop(self, message: str) -> bool:
        if self.effort and "effort" in message:
            note(f"{self.model} takes no effort {self.effort!r}; it is asked without")
            self.effort = None
        elif self._usage_asked and ("stream_options" in message or "include_usage" in message):
            self._usage_asked = False
        elif len(self._limit_names) > 1 and self._limit_names[0] in message:
            del self._limit_names[0]
        else:
            return False
        return True


def _messages(request: Request) -> list[dict[str, str]]:
    """Plain strings: lists of parts are not understood everywhere.  What is constant comes first, for the
    caches."""
    messages = [{"role": "system", "content": request.system}] if request.system else []
    for number, turn in enumerate(request.turns):
        task = f"{request.task}\n\n" if number == 0 and request.task else ""
        messages.append({"role": turn["role"], "content": task + turn["content"]})
    return messages


def _take(answer: Any, part: str, heard: Heard) -> None:
    """Take in one chunk, or a whole answer.  Servers differ in what they leave out: nothing is taken for
    granted."""
    model, usage = _get(answer, "model"), _get(answer, "usage")
    if isinstance(model, str):
        heard.model = model
    if usage is not None:
        _count(usage, heard)
    choices = _get(answer, "choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = _get(choice, part)
    if message is not None and not isinstance(message, str | int | float | list):
        heard.began = True
        refusal = _get(message, "refusal")
        heard.text.append(_text(_get(message, "content")) or _text(refusal))
        heard.hidden += len(_text(_get(message, "reasoning_content")) or _text(_get(message, "reasoning")))
        if refusal:
            heard.finish = "refused"
    if reason := _get(choice, "finish_reason"):
        heard.ended = heard.began = True
        finishes: dict[str, Finish] = {"length": "length", "content_filter": "refused"}
        heard.finish = finishes.get(reason, heard.finish)


def _count(usage: Any, heard: Heard) -> None:
    heard.tokens_in = whole(_get(usage, "prompt_tokens"))
    heard.tokens_out = whole(_get(usage, "completion_tokens"))
    details = _get(usage, "prompt_tokens_details")
    heard.tokens_cached = whole(_get(details, "cached_tokens"))
    heard.tokens_written = whole(_get(details, "cache_write_tokens"))
    cost = _get(usage, "cost")  # gateways such as OpenRouter report it
    heard.cost_usd = float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) else None


def _text(content: Any) -> str:
    """Text, also of a list of parts; nothing of any other kind of part."""
    if isinstance(content, list):
        return "".join(_text(_get(part, "text")) for part in content)
    return content if isinstance(content, str) else ""


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
