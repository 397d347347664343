"""What tokens cost, from the price list that the genai-prices package carries; nothing is downloaded.

The list is as old as the installed package.  ``--price IN,OUT`` or ``--price IN,OUT,CACHED`` in dollars per
million tokens, or ``price`` in the settings file, goes before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from autokernel.errors import UsageError


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens.

    ``cached`` is for input tokens read from a cache, ``written`` for those written to one.  ``longer`` are
    other prices, for *all* tokens of a request with more input tokens than the number: ``((200_000,
    Price(...)),)``.
    """

    input: float
    output: float
    cached: float | None = None
    written: float | None = None
    longer: tuple[tuple[int, Price], ...] = ()

    def cost(
        self,
        tokens_in: int | None,
        tokens_cached: int | None,
        tokens_out: int | None,
        tokens_written: int | None = None,
    ) -> float:
        """Dollars for one request.  ``tokens_in`` counts the cached and the written ones too; None is 0."""
        price = self._for(tokens_in or 0)
        cached, written = tokens_cached or 0, tokens_written or 0
        plain = max((tokens_in or 0) - cached - written, 0)
        dollars = plain * price.input + (tokens_out or 0) * price.output
        dollars += cached * (price.input if price.cached is None else price.cached)
        dollars += written * (price.input if price.written is None else price.written)
        return dollars / 1e6

    def worst(self, tokens_in: int, tokens_out: int) -> float:
        """Dollars for one request if every input token costs as much as one can."""
        price = self._for(tokens_in)
        dearest = max(price.input, price.written or 0.0, price.cached or 0.0)
        return (tokens_in * dearest + tokens_out * price.output) / 1e6

    def _for(self, tokens_in: int) -> Price:
        over = [price for limit, price in self.longer if tokens_in > limit]
        return over[-1] if over else self

    def __str__(self) -> str:
        cached = "" if self.cached is None else f", ${self.cached:g} cached"
        return f"${self.input:g} in, ${self.output:g} out{cached} per million tokens"


def parse_price(text: str) -> Price:
    """``3,15`` or ``3,15,0.3``.  Raises UsageError."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise UsageError(
            f"--price {text}: write IN,OUT or IN,OUT,CACHED in dollars per million tokens, such as 3,15"
        )
    return Price(numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else None)


def price_of(provider_name: str, model: str, base_url: str | None = None) -> Price | None:
    """The listed price, or None.  With ``base_url`` it is looked up for whoever runs that address, if
    known."""
    from genai_prices.data_snapshot import get_snapshot

    snapshot = get_snapshot()
    try:
        if base_url:
            _, info = snapshot.find_provider_model(model, None, None, base_url)
        else:
            _, info = snapshot.find_provider_model(model, None, provider_name, None)
    except LookupError:
        return None
    listed = info.get_prices(datetime.now(tz=UTC))
    return _flat(listed)


_FIELDS = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cached": "cache_read_mtok",
    "written": "cache_write_mtok",
}


def _flat(listed: Any) -> Price | None:
    """The package's price record as ours; None where it has no price for text in and out."""
    values = {ours: getattr(listed, theirs, None) for ours, theirs in _FIELDS.items()}
    if values["input"] is None or values["output"] is None:
        return None
    starts = sorted({tier.start for v in values.values() for tier in getattr(v, "tiers", ())})

    def at(tokens: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in values.items():
            tiers = [t.price for t in getattr(value, "tiers", ()) if tokens >= t.start]
            amount = tiers[-1] if tiers else getattr(value, "base", value)
            found[name] = None if amount is None else float(amount)
        return found

    return Price(**at(-1), longer=tuple((start, Price(**at(start))) for start in starts))
