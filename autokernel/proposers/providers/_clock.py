"""How long a provider waits: limits on one answer, hooked into the SDK's HTTP client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from autokernel.errors import UsageError
from autokernel.proposers.providers._errors import one_line


@dataclass(frozen=True)
class Patience:
    """How long an answer may take.

    ``chunk_s`` may pass without a byte (models that think unseen are silent for minutes); ``total_s`` may
    pass in all, also while the server sends signs of life.  ``retries`` are the SDK's, for 429, 408, 409,
    5xx (529 too) and connections that could not be made, after half a second, one, two …, or what
    ``retry-after`` asks for, if that is at most ``max_wait_s``.  ``pause_s`` is waited before an answer
    that broke off is asked for again.
    """

    connect_s: float = 10.0
    chunk_s: float = 600.0
    total_s: float = 3600.0
    retries: int = 4
    max_wait_s: float = 60.0
    pause_s: float = 2.0


class Clock:
    """Hooks into the HTTP client: no waiting beyond `Patience`, whoever asks for it."""

    def __init__(self, patience: Patience) -> None:
        self._patience, self._begun = patience, 0.0

    def begin(self) -> None:
        self._begun = time.monotonic()

    def over(self) -> bool:
        return time.monotonic() - self._begun > self._patience.total_s

    def options(self, sdk: Any) -> dict[str, Any]:
        """Arguments of either SDK's client.  Proxies are those of the environment."""
        import httpx2

        timeout = httpx2.Timeout(self._patience.chunk_s, connect=self._patience.connect_s)
        hooks: dict[str, list[Callable[[Any], Any]]] = {
            "request": [self._sending],
            "response": [self._answered],
        }
        try:
            client = sdk.DefaultHttpxClient(event_hooks=hooks, timeout=timeout)
        except (ValueError, ImportError, httpx2.InvalidURL) as error:  # a proxy variable that can't be used
            raise UsageError(f"the proxy of the environment can't be used: {one_line(str(error))}") from None
        return {"http_client": client, "timeout": timeout, "max_retries": self._patience.retries}

    def _sending(self, request: Any) -> None:
        """No retry is begun after one whole ``chunk_s``: a server that hangs would hang once per retry."""
        import httpx2

        if time.monotonic() - self._begun > self._patience.chunk_s:
            raise httpx2.ReadTimeout("no time is left for another try", request=request)

    def _answered(self, response: Any) -> None:
        if not response.is_success:
            if _retry_after_s(response.headers) > self._patience.max_wait_s:
                response.headers["x-should-retry"] = "false"  # both SDKs obey it
        else:
            response.stream = _timed(response.stream, self)


def _timed(stream: Any, clock: Clock) -> Any:
    """``stream``, but it ends with a timeout when the clock is over: signs of life reset a read timeout."""
    import httpx2

    class Timed(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for chunk in stream:
                if clock.over():
                    raise httpx2.ReadTimeout("the whole answer takes too long")
                yield chunk

        def close(self) -> None:
            stream.close()

    return Timed()


def _retry_after_s(headers: Any) -> float:
    """Seconds that a refusal asks to wait, as the SDKs read it; 0 when it doesn't say."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            return float(headers[name]) / unit
    with contextlib.suppress(KeyError, ValueError):
        return parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time()
    return 0.0
