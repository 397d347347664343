"""Which model is asked, at what price and under which limits: flags, environment and settings file put
together.

Nobody is asked unless one of ``--llm``, AUTOKERNEL_LLM and the ``llm`` of the settings file says who, in
that order; a key alone chooses nothing, and ``--llm none`` overrides the other two.  Everything that can be
wrong with a choice is found here, before anything is measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from autokernel.errors import UsageError
from autokernel.proposers.keys import LLM_VARIABLE, read_config, redact
from autokernel.proposers.prices import Price, parse_price, price_of
from autokernel.proposers.provider import Provider
from autokernel.proposers.providers import PROVIDERS
from autokernel.proposers.spending import Spending, limited

EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ADDRESS_VARIABLES = {"anthropic": "ANTHROPIC_BASE_URL", "openai": "OPENAI_BASE_URL"}


@dataclass(frozen=True)
class Choice:
    """A model to ask.  ``name`` is the provider's, ``origin`` what chose it; ``spending`` has the limits, and
    the run counts into it."""

    name: str
    model: str
    base_url: str | None
    effort: str | None
    price: Price | None
    spending: Spending
    origin: str

    @cached_property
    def provider(self) -> Provider:
        """Raises UsageError without a key; nothing is sent yet."""
        return PROVIDERS[self.name].create(
            self.model,
            self.base_url,
            effort=self.effort,
            price=self.price,
            may_repeat=self.spending.allows_again,
        )

    def describe(self) -> str:
        """One line for the start of a run."""
        where = f" at {redact(self.base_url)}" if self.base_url else ""
        replayed = self.name == "replay"
        price = "" if self.price is None or replayed else f" ({self.price})"
        limits = "" if replayed else f"; {self.spending.describe()}"
        return f"{self.name}:{self.model}{where} is asked, by {self.origin}{price}{limits}"


def choose(
    llm: str | None = None,
    base_url: str | None = None,
    *,
    price: str | None = None,
    effort: str | None = None,
    max_usd: float | None = None,
    max_tokens: int | None = None,
) -> Choice | None:
    """The model to ask, or None.  Raises UsageError for a choice that can't be followed."""
    config = read_config()
    text, origin = llm, "--llm"
    if text is None:
        text, origin = os.environ.get(LLM_VARIABLE, "").strip(), LLM_VARIABLE
    if not text:
        text, origin = config.llm, str(config.place)
    if text in ("", "none"):
        return None
    name, model = split(text, origin)
    if text == config.llm:  # an address and a price are those of one model
        base_url, price = base_url or config.base_url or None, price or config.price or None
    base_url = base_url or os.environ.get(_ADDRESS_VARIABLES.get(name, "")) or None
    if effort is not None and effort not in EFFORTS:
        raise UsageError(f"--effort {effort}: there are {', '.join(EFFORTS)}")
    known = Price(0.0, 0.0) if name == "replay" else price_of(name, model, base_url)
    if price:
        known = parse_price(price)
    spending = limited(max_usd, max_tokens, known)
    if name == "replay" and max_usd is None and max_tokens is None:
        spending = Spending(price=known)  # nothing is sent
    return Choice(name, model, base_url, effort, known, spending, origin)


def split(text: str, origin: str = "--llm") -> tuple[str, str]:
    """``NAME:MODEL`` -> (NAME, MODEL).  Raises UsageError for a name or form that doesn't exist."""
    name, colon, model = text.partition(":")
    said = f"{origin} {text}"
    if name not in PROVIDERS:
        raise UsageError(f"{said}: no provider {name!r}; there are {', '.join(sorted(PROVIDERS))}")
    if not colon or not model:
        raise UsageError(f"{said}: expected {name}:{'FILE.jsonl' if name == 'replay' else 'MODEL'}")
    return name, model


def make_provider(text: str, base_url: str | None = None) -> Provider:
    """The provider of ``--llm NAME:MODEL``, at the listed price and without limits."""
    name, model = split(text)
    price = None if name == "replay" else price_of(name, model, base_url)
    return PROVIDERS[name].create(model, base_url, price=price)
