"""What every provider takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

from autokernel.errors import AutokernelError

Finish = Literal["stop", "length", "refused"]

ErrorKind = Literal[
    "auth", "model", "overflow", "quota", "rate", "server", "connection", "bad_answer", "other"
]
"""Why there is no reply.

auth        no key, a wrong one, or one that may not do this       final
model       the API does not know the model, or the address        final
overflow    the prompt is too long for the model: trim and ask again
quota       credit or quota used up: it may come back, with time
rate        too many requests, still after the SDK's own retries
server      5xx, or overloaded, still after the SDK's own retries
connection  unreachable, cut off in the middle, or too slow
bad_answer  an answer that isn't the API's: a proxy's page, broken JSON, nothing in it
other       any other refusal of the request
"""

FINAL_KINDS = frozenset({"auth", "model"})


class Message(TypedDict):
    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One question.

    ``system`` is the same in every request of a run and ``task`` in every request on one task: providers that
    cache are told to cache both.  ``turns`` is what differs: messages that alternate, the first and the last
    of them the user's.  ``task`` is sent as the first part of the first user message.  ``max_output_tokens``
    limits the reply, thinking included where the API counts it so.
    """

    system: str
    task: str
    turns: Sequence[Message]
    max_output_tokens: int


@dataclass(slots=True)
class Reply:
    """One completion.  What the provider doesn't report is None.

    ``tokens_in`` counts cached tokens too, ``tokens_cached`` those of them that were read from a cache;
    ``tokens_out`` counts thinking too.  ``cost_usd`` is the provider's own figure, else the price list's.
    ``estimated``: the server reported no tokens, and the counts are upper estimates from the texts.
    """

    text: str
    finish: Finish = "stop"
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    cost_usd: float | None = None
    model: str = ""
    estimated: bool = False


class ProviderError(AutokernelError):
    """The API could not be asked or did not answer; the text is one line, without keys.

    ``final``: asking again won't help, by default for the kinds in `FINAL_KINDS`.  ``lost`` is what came of
    an answer that broke off: nobody says what that cost, so its counts are estimates, but it is paid for.
    """

    def __init__(
        self,
        reason: str,
        *,
        kind: ErrorKind = "other",
        final: bool | None = None,
        lost: Reply | None = None,
    ) -> None:
        super().__init__(reason)
        self.kind: ErrorKind = kind
        self.final = kind in FINAL_KINDS if final is None else final
        self.lost = lost


class Provider(Protocol):
    name: str
    model: str

    def complete(self, request: Request) -> Reply | None:
        """Ask once.  None: this provider has nothing more to say (the end of a recording).

        Raises ProviderError.
        """
        ...
