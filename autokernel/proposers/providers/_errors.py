"""What an API's refusal means: its status, code and wording -> the kind of a ProviderError, and one line.

The two SDKs' exceptions have the same shape, and the servers that speak OpenAI's protocol each have words
of their own for the same thing; the patterns are from those of OpenAI, Anthropic, vLLM, Ollama, llama.cpp
and LM Studio.
"""

from __future__ import annotations

import json
import re
from typing import Any

from autokernel.proposers.keys import redact
from autokernel.proposers.provider import ErrorKind

_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length|request_too_large"
    r"|maximum context length|exceeds? (the |its |your )?(available |maximum |model'?s? )*context"
    r"|context (window|length|size|limit)\W+(is |was )?(exceeded|too small)|exceed context limit"
    r"|prompt is too long|prompt too long|longer than the maximum model length|input is too long"
    r"|input tokens exceed|input token count|request too large|exceeds the maximum size"
    r"|context the overflows|context overflow|number of tokens to keep from the initial prompt",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"insufficient_quota|exceeded your current quota|credit balance is too low|billing|payment required"
    r"|insufficient (balance|credit|fund)|spend(ing)?[ _]limit|out of credits|quota[ _]exceeded",
    re.IGNORECASE,
)
_MODEL = re.compile(
    r"model_not_found|\bmodel\b[^.]*(not found|(does|do) not exist|doesn'?t exist|is not available)"
    r"|(unknown|invalid|no such) model|invalid model identifier|no models? loaded|not a chat model",
    re.IGNORECASE,
)
_AUTH = re.compile(r"authentication_error|permission_error|invalid_api_key|incorrect api key", re.IGNORECASE)
_RATE = re.compile(r"rate_limit|too many requests", re.IGNORECASE)
_SERVER = re.compile(
    r"overloaded|api_error|internal server error|service unavailable|server_error", re.IGNORECASE
)
_PAGE = re.compile(r"^\s*(<!doctype html|<html|<\?xml|<head|<body)", re.IGNORECASE)


def kind_of(status: int | None, text: str) -> ErrorKind:
    """``status`` is None for an error that came in the middle of an answer; ``text`` holds codes and
    message."""
    if status == 402 or (_QUOTA.search(text) and status not in (401, 404)):
        return "quota"
    if _OVERFLOW.search(text) or status == 413:
        return "overflow"
    if status in (401, 403) or _AUTH.search(text):
        return "auth"
    if status == 404 or _MODEL.search(text):
        return "model"
    if status == 429 or _RATE.search(text):
        return "rate"
    if status in (407, 408):
        return "connection"
    if (status or 0) >= 500 or _SERVER.search(text):
        return "server"
    return "bad_answer" if is_page(text) else "other"


def is_page(text: str) -> bool:
    return bool(_PAGE.match(text))


def facts(error: Any) -> tuple[int | None, str, str]:
    """(status, message, everything that tells the kind) of an SDK's exception."""
    status = getattr(error, "status_code", None)
    if status == 200:
        status = None  # the answer had begun well; this came in its middle
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = ""
    codes = [getattr(error, name, None) for name in ("code", "type", "error_code")]
    if isinstance(inner, dict):
        message = inner.get("message") or inner.get("error") or ""
        codes += [inner.get("code"), inner.get("type")]
    elif isinstance(inner, str):
        message = inner
    if not isinstance(message, str) or not message.strip():
        message = json.dumps(inner) if isinstance(inner, dict) else str(error)
    return status, message, " ".join([*(str(c) for c in codes if c), message])


def one_line(text: str, limit: int = 300) -> str:
    """A message in one line, without keys; of a web page, its title."""
    if is_page(text):
        title = re.search(r"<(?:title|h1)[^>]*>(.*?)</", text, re.IGNORECASE | re.DOTALL)
        text = "a web page" + (f", “{title[1].strip()}”" if title else "")
    text = " ".join(redact(text).split())
    return text if len(text) <= limit else text[:limit] + " …"
