"""What every provider takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

from autokernel.errors import AutokernelError

Finish = Literal["stop", "length", "refused"]


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(slots=True)
class Reply:
    """One completion.  Token counts and cost are None where the provider doesn't report them."""

    text: str
    finish: Finish = "stop"
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None
    model: str = ""


class ProviderError(AutokernelError):
    """The API could not be asked or did not answer.  ``final``: asking again won't help (a bad key)."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Provider(Protocol):
    name: str
    model: str

    def complete(self, messages: Sequence[Message]) -> Reply | None:
        """Ask once.  None: this provider has nothing more to say (the end of a recording).

        Raises ProviderError.
        """
        ...
