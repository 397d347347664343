"""What the two APIs have in common: one streamed answer, with its waits, retries and errors.

begin      one HTTP client; `Patience` says how long anything may take             _clock.Clock
ask        the SDK sends, and repeats what was refused for a while (429, 5xx)      the SDK
adapt      once per parameter, without what this server does not take (a 400)      Streaming._ask
read       the chunks, into a `Heard`                                              each provider
repeat     once, when the answer broke off in its middle                           Streaming.complete
explain    whatever went wrong, as one ProviderError                               Streaming._explained
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from autokernel.errors import UsageError
from autokernel.proposers.keys import redact
from autokernel.proposers.prices import Price
from autokernel.proposers.provider import ErrorKind, Finish, ProviderError, Reply, Request
from autokernel.proposers.providers._clock import Clock, Patience
from autokernel.proposers.providers._errors import facts, kind_of, one_line
from autokernel.proposers.spending import worst_input_tokens

MAX_CHARS_PER_TOKEN = 16
"""More text than that per token of the limit: the server ignores the limit, and isn't listened to any
longer."""
MAX_ADAPTIONS = 4
LEAST_ROOM = 1024
"""Tokens.  A prompt that leaves the reply less of the model's context counts as too long."""

_LIMIT = re.compile(r"max_tokens|max_completion_tokens|max_output_tokens")
_MAXIMUM = re.compile(
    r"> (\d+), which is the maximum|at most (\d+)|less than or equal to `?(\d+)|\[\d+, (\d+)\]"
)
_ROOM = re.compile(r"maximum context length is (\d+) tokens and your request has (\d+) input tokens")


@dataclass
class Heard:
    """An answer as far as it has come: ``opened`` with a good status, its message ``began``, and ``ended``
    as the API ends one.  ``hidden`` counts the characters of thinking."""

    text: list[str] = field(default_factory=list)
    hidden: int = 0
    opened: bool = False
    began: bool = False
    ended: bool = False
    finish: Finish = "stop"
    model: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    tokens_written: int | None = None
    cost_usd: float | None = None

    def chars(self) -> int:
        return self.hidden + sum(map(len, self.text))


class Streaming:
    """Base of the providers.  A subclass opens a stream and reads it; the rest is here.

    ``price`` is for answers whose cost the API does not report.  ``may_repeat(request, lost)`` is asked
    before an answer that broke off is asked for again, as that costs once more.
    """

    name = ""
    key_variable = ""
    default_address = ""

    def __init__(
        self,
        model: str,
        base_url: str | None,
        *,
        effort: str | None = None,
        price: Price | None = None,
        patience: Patience | None = None,
        may_repeat: Callable[[Request, Reply], bool] = lambda request, lost: True,
    ) -> None:
        self.model, self.effort, self.price, self._may_repeat = model, effort, price, may_repeat
        self.patience = patience or Patience()
        self.address = checked_address(base_url) if base_url else self.default_address
        self._clock = Clock(self.patience)
        self._limit: int | None = None  # the model's own
        self._room: int | None = None  # what this prompt leaves of its context

    # What a provider does its own way.
    def _open(self, request: Request) -> Any:
        """Send the request; returns the SDK's stream."""
        raise NotImplementedError

    def _read(self, stream: Any, heard: Heard) -> None:
        """Take in the answer, chunk by chunk."""
        raise NotImplementedError

    def _drop(self, message: str) -> bool:
        """Stop sending what this server, by its ``message``, does not take; False when it isn't about
        that."""
        raise NotImplementedError

    def complete(self, request: Request) -> Reply | None:
        self._room = None
        try:
            return self._ask(request)
        except ProviderError as error:
            lost = error.lost
            worth_it = error.kind in ("connection", "server") and not isinstance(error, _TooSlow)
            if lost is None or not worth_it or not self._may_repeat(request, lost):
                raise
        time.sleep(self.patience.pause_s)
        try:
            reply = self._ask(request)
        except ProviderError as error:
            error.lost = lost if error.lost is None else _both(error.lost, lost)
            raise
        return _both(reply, lost)

    def _ask(self, request: Request) -> Reply:
        for _ in range(MAX_ADAPTIONS):
            try:
                return self._once(request)
            except _Unsuitable as refusal:
                message = refusal.message
                named = self._lower_limit(message, request)
                if not named and not (refusal.kind == "other" and self._drop(message.lower())):
                    raise ProviderError(str(refusal), kind=refusal.kind) from None
        return self._once(request)

    def _once(self, request: Request) -> Reply:
        import httpx2

        heard = Heard()
        self._clock.begin()
        try:
            with self._open(request) as stream:
                heard.opened = True
                self._read(_bounded(stream, heard, self._limit_of(request)), heard)
                if not heard.began and not heard.ended:
                    raise self._nothing(stream)
        except (*self._sdk_errors(), httpx2.HTTPError, httpx2.StreamError, ValueError) as error:
            raise self._explained(error, heard, request) from None
        if not heard.ended:
            raise ProviderError(
                f"the answer of {self._place()} broke off",
                kind="connection",
                lost=self._reply(heard, request),
            )
        return self._reply(heard, request)

    def _sdk_errors(self) -> tuple[type[Exception], ...]:
        raise NotImplementedError

    def _limit_of(self, request: Request) -> int:
        """The reply's limit, or less where the server has said so."""
        return min(n for n in (request.max_output_tokens, self._limit, self._room) if n)

    def _lower_limit(self, message: str, request: Request) -> bool:
        """Take the limit that a refusal names; False when it names none that is lower than what was asked."""
        asked = self._limit_of(request)
        if room := _ROOM.search(message):
            left = int(room[1]) - int(room[2])
            if LEAST_ROOM <= left < asked:
                self._room = left
                return True
        named = _MAXIMUM.search(message) if _LIMIT.search(message) else None
        number = int(next(group for group in named.groups() if group)) if named else 0
        if not 0 < number < asked:
            return False
        self._limit = number
        return True

    def _reply(self, heard: Heard, request: Request) -> Reply:
        text = "".join(heard.text)
        thought = re.match(r"\s*<think>.*?</think>\s*", text, re.DOTALL)  # local servers leave it in the text
        estimated = heard.tokens_in is None or heard.tokens_out is None
        tokens_in = worst_input_tokens(request) if heard.tokens_in is None else heard.tokens_in
        tokens_out = heard.tokens_out
        if tokens_out is None:
            tokens_out = min(len(text.encode("utf-8", "replace")) + heard.hidden, request.max_output_tokens)
        cost = heard.cost_usd
        if cost is None and self.price is not None:
            cost = self.price.cost(tokens_in, heard.tokens_cached, tokens_out, heard.tokens_written)
        return Reply(
            text[thought.end() :] if thought else text,
            heard.finish,
            tokens_in,
            tokens_out,
            heard.tokens_cached,
            cost,
            heard.model or self.model,
            estimated,
        )

    # What went wrong.
    def _place(self) -> str:
        return redact(self.address)

    def _nothing(self, stream: Any) -> ProviderError:
        """The answer held nothing of the API's; a web page is the usual cause."""
        kind = stream.response.headers.get("content-type", "").partition(";")[0]
        what = "a web page" if "html" in kind else "an answer with no message in it"
        hint = ": is that the API, and is a proxy in between?" if "html" in kind else ""
        return ProviderError(
            f"{self._place()} sent {what} ({kind or 'no content type'}){hint}", kind="bad_answer"
        )

    def _explained(self, error: Exception, heard: Heard, request: Request) -> ProviderError:
        if isinstance(error, ProviderError):
            return error
        status, message, text = facts(error)
        lost = self._reply(heard, request) if heard.opened else None
        cause = error.__cause__ or error
        names = {cls.__name__ for e in (error, cause) for cls in type(e).__mro__}
        if status is None and names & {
            "APIConnectionError",
            "APITimeoutError",
            "TransportError",
            "StreamError",
        }:
            return self._unreached(names, cause, lost)
        if isinstance(error, ValueError) and not hasattr(error, "body"):
            line = f"{self._place()} sent an answer that is no valid JSON ({type(error).__name__})"
            return ProviderError(line, kind="bad_answer", lost=lost)
        kind = kind_of(status, text)
        line = self._line(kind, status, one_line(message))
        if status in (400, 422):
            return _Unsuitable(line, message, kind)
        return ProviderError(line, kind=kind, lost=lost)

    def _unreached(self, names: set[str], cause: BaseException, lost: Reply | None) -> ProviderError:
        proxy = _proxy_for(self.address)
        place = self._place() + (f" through the proxy {proxy}" if proxy else "")
        reason = one_line(str(cause)) or type(cause).__name__
        if names & {"ConnectError", "ProxyError", "ConnectTimeout", "UnsupportedProtocol"}:
            hint = "" if proxy else ": is a server running there?"
            return ProviderError(f"can't reach {place} ({reason}){hint}", kind="connection")
        if "TimeoutException" in names:
            limit = f"nothing for {self.patience.chunk_s:g} s"
            if self._clock.over():
                limit = f"no whole answer in {self.patience.total_s:g} s"
            return _TooSlow(f"{place} is too slow: {limit}", kind="connection", lost=lost)
        what = "broke off" if lost else "failed"
        return ProviderError(f"the connection to {place} {what} ({reason})", kind="connection", lost=lost)

    def _line(self, kind: ErrorKind, status: int | None, message: str) -> str:
        number = f" ({status})" if status else ""
        heads: dict[str, str] = {
            "auth": f"{self._place()} refuses the key{number}, see {self.key_variable}",
            "model": f"{self._place()} doesn't know {self.model}, or has no such API{number}",
            "overflow": f"the prompt is too long for {self.model}{number}",
            "quota": f"the credit at {self._place()} is used up{number}",
            "rate": f"{self._place()} is asked too often{number}",
            "server": f"{self._place()} fails{number}",
            "connection": f"the connection to {self._place()} is refused{number}",
            "bad_answer": f"{self._place()} gave no answer of the API's{number}",
        }
        return f"{heads.get(kind, f'{self._place()} refuses the request{number}')}: {message}"


class _Unsuitable(ProviderError):
    """A request that was refused for its form: perhaps for a parameter that can be left out."""

    def __init__(self, line: str, message: str, kind: ErrorKind) -> None:
        super().__init__(line, kind=kind)
        self.message = message


class _TooSlow(ProviderError):
    """It would be as slow the second time."""


class _bounded:
    """A stream whose items stop when far more has come than the limit allows."""

    def __init__(self, stream: Any, heard: Heard, limit: int) -> None:
        self.response, self._stream, self._heard, self._limit = stream.response, stream, heard, limit

    def __iter__(self) -> Iterator[Any]:
        for count, item in enumerate(self._stream):
            yield item
            if count % 64 == 0 and self._heard.chars() > self._limit * MAX_CHARS_PER_TOKEN:
                self._heard.finish, self._heard.ended = "length", True
                return


def checked_address(text: str) -> str:
    """A base URL, or UsageError."""
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fine = False
    if not fine or any(c.isspace() for c in text):
        raise UsageError(f"--base-url {redact(text)} is no address: write http://HOST:PORT/v1")
    return text


def _proxy_for(address: str) -> str:
    """The environment's proxy for this address, without its password; "" for none."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    return redact(proxy) if proxy and not proxy_bypass(parts.netloc.rpartition("@")[2]) else ""


def _both(reply: Reply, lost: Reply) -> Reply:
    """``reply`` with the tokens and dollars of the part that was lost before it."""

    def total(one: Any, other: Any) -> Any:
        return None if one is None and other is None else (one or 0) + (other or 0)

    reply.tokens_in = total(reply.tokens_in, lost.tokens_in)
    reply.tokens_out = total(reply.tokens_out, lost.tokens_out)
    reply.tokens_cached = total(reply.tokens_cached, lost.tokens_cached)
    reply.cost_usd = total(reply.cost_usd, lost.cost_usd)
    reply.estimated = True
    return reply


def whole(value: Any) -> int | None:
    """A count as servers send it; None for anything that isn't one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def note(text: str) -> None:
    logging.getLogger("autokernel").warning("%s", text)
