"""OpenAI's chat-completions API, and every server that speaks it (``--base-url``: vLLM, Ollama, a gateway).

No limit on the reply is sent: the two spellings of that parameter are not understood everywhere, and a
kernel that is cut off is worth nothing.  Rate limits and dropped connections are retried by the SDK.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from autokernel.errors import UsageError
from autokernel.proposers.provider import Finish, Message, ProviderError, Reply

TIMEOUT_S = 600.0
RETRIES = 3


def create(model: str, base_url: str | None = None) -> OpenAICompatible:
    return OpenAICompatible(model, base_url)


class OpenAICompatible:
    name = "openai"

    def __init__(self, model: str, base_url: str | None = None) -> None:
        if not model:
            raise UsageError("--llm openai:MODEL needs a model name")
        key = os.environ.get("OPENAI_API_KEY", "")
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        if not key and not base_url:
            raise UsageError(
                "no API key: set OPENAI_API_KEY, or give the --base-url of a local server, "
                "or leave --llm out to use the built-in playbook"
            )
        import openai

        self.model = model
        # A local server wants no key, but the SDK wants something to send.
        self._client = openai.OpenAI(
            api_key=key or "none", base_url=base_url, timeout=TIMEOUT_S, max_retries=RETRIES
        )

    def complete(self, messages: Sequence[Message]) -> Reply | None:
        import openai

        try:
            completion: Any = self._client.chat.completions.create(
                model=self.model,
                messages=list(messages),  # type: ignore[arg-type]
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise ProviderError(_one_line(error), final=True) from None
        except openai.OpenAIError as error:
            raise ProviderError(_one_line(error)) from None
        return _reply(completion, self.model)


def _reply(completion: Any, model: str) -> Reply:
    """Servers differ in what they leave out, so nothing but a choice with a message is taken for granted."""
    usage = getattr(completion, "usage", None)
    tokens_in = getattr(usage, "prompt_tokens", None)
    tokens_out = getattr(usage, "completion_tokens", None)
    cost = getattr(usage, "cost", None)  # gateways such as OpenRouter report it
    choices = getattr(completion, "choices", None) or []
    message = getattr(choices[0], "message", None) if choices else None
    if message is None:
        raise ProviderError("the server's answer holds no message")
    refusal = getattr(message, "refusal", None)
    reason = getattr(choices[0], "finish_reason", None)
    finish: Finish = "stop"
    if refusal or reason == "content_filter":
        finish = "refused"
    elif reason == "length":
        finish = "length"
    return Reply(
        text=getattr(message, "content", None) or refusal or "",
        finish=finish,
        tokens_in=tokens_in if isinstance(tokens_in, int) else None,
        tokens_out=tokens_out if isinstance(tokens_out, int) else None,
        cost_usd=float(cost) if isinstance(cost, int | float) else None,
        model=getattr(completion, "model", None) or model,
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:300]
