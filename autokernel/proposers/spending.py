"""What a run may spend on language models, checked before anything is sent.

A request's worst case is all of its bytes as tokens, plus the longest reply allowed.  No tokenizer in use
makes more tokens than there are UTF-8 bytes, and kernels with prose take one for three to four bytes: the
input side of the worst case is three to four times what comes.  The reply's side is its limit, of which a
usual answer takes a tenth to a half.  What is counted afterwards is what the API reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autokernel.errors import UsageError
from autokernel.proposers.prices import Price
from autokernel.proposers.provider import Reply, Request

DEFAULT_MAX_USD = 5.0
DEFAULT_MAX_TOKENS = 2_000_000
TYPICAL_BYTES_PER_TOKEN = 3.5
TYPICAL_OUTPUT = 6_000
_FRAME = 64
"""Tokens around the texts: roles, and what a server's chat template adds."""


def worst_input_tokens(request: Request) -> int:
    return _bytes(request) + _FRAME * (2 + len(request.turns))


def typical_input_tokens(request: Request) -> int:
    return round(_bytes(request) / TYPICAL_BYTES_PER_TOKEN)


def typical_output_tokens(request: Request) -> int:
    return min(request.max_output_tokens, TYPICAL_OUTPUT)


def _bytes(request: Request) -> int:
    texts = [request.system, request.task, *(turn["content"] for turn in request.turns)]
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


@dataclass
class Spending:
    """Tokens and dollars of a run so far, with their limits; None is no limit.

    ``price`` is that of the model that is asked.  Without it the dollars are those that the provider reports,
    and ``max_usd`` can be kept only together with ``max_tokens``.
    """

    max_tokens: int | None = None
    max_usd: float | None = None
    price: Price | None = None
    tokens: int = 0
    tokens_cached: int = 0
    usd: float = 0.0
    unpriced: bool = False

    def add(
        self,
        tokens_in: int | None,
        tokens_out: int | None,
        cost_usd: float | None,
        tokens_cached: int | None = None,
    ) -> None:
        """Count one exchange, or one row of the journal.  A cost that nobody reported is worked out."""
        self.tokens += (tokens_in or 0) + (tokens_out or 0)
        self.tokens_cached += tokens_cached or 0
        if cost_usd is None and (tokens_in or tokens_out):
            if self.price is None:
                self.unpriced = True
            else:
                cost_usd = self.price.cost(tokens_in, tokens_cached, tokens_out)
        self.usd += cost_usd or 0.0

    def worst(self, request: Request) -> tuple[int, float | None]:
        """Tokens and dollars that ``request`` can cost at most; dollars None without a price."""
        tokens_in, tokens_out = worst_input_tokens(request), request.max_output_tokens
        dollars = None if self.price is None else self.price.worst(tokens_in, tokens_out)
        return tokens_in + tokens_out, dollars

    def typical(self, request: Request) -> tuple[int, float | None]:
        """Tokens and dollars of ``request`` as they usually come, with nothing cached."""
        tokens_in, tokens_out = typical_input_tokens(request), typical_output_tokens(request)
        dollars = None if self.price is None else self.price.cost(tokens_in, 0, tokens_out)
        return tokens_in + tokens_out, dollars

    def refuses(self, request: Request) -> str:
        """Why ``request`` may not be sent: its worst case does not fit; empty when it may."""
        if spent := self.exhausted():
            return spent
        tokens, dollars = self.worst(request)
        if self.max_tokens is not None and self.tokens + tokens > self.max_tokens:
            return (
                f"--max-tokens {self.max_tokens} leaves {self.max_tokens - self.tokens} tokens, "
                f"and the next request may take {tokens}"
            )
        if self.max_usd is not None and dollars is not None and self.usd + dollars > self.max_usd:
            return (
                f"--max-usd {self.max_usd:g} leaves ${self.max_usd - self.usd:.2f}, "
                f"and the next request may cost ${dollars:.2f}"
            )
        return ""

    def allows_again(self, request: Request, lost: Reply) -> bool:
        """Whether ``request`` may be sent a second time, on top of ``lost``, which isn't counted here yet."""
        ahead = replace(self)
        ahead.add(lost.tokens_in, lost.tokens_out, lost.cost_usd, lost.tokens_cached)
        return not ahead.refuses(request)

    def exhausted(self) -> str:
        """Why no request at all may be sent any more; empty when one may."""
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return f"--max-tokens {self.max_tokens} is spent ({self.tokens} used)"
        if self.max_usd is not None and self.usd >= self.max_usd:
            return f"--max-usd {self.max_usd:g} is spent (${self.usd:.2f} used)"
        if self.max_usd is not None and self.max_tokens is None and self.price is None:
            return "no price is known for the model, so --max-usd can't be kept: add --price or --max-tokens"
        return ""

    def describe(self) -> str:
        """The limits and what is used of them, in a few words."""
        parts = []
        if self.max_usd is not None:
            parts.append(f"${self.max_usd:g} at most" + (f", ${self.usd:.2f} spent" if self.usd else ""))
        if self.max_tokens is not None:
            used = f", {self.tokens} used" if self.tokens else ""
            parts.append(f"{self.max_tokens} tokens at most{used}")
        return "; ".join(parts) or "no limit"


def limited(max_usd: float | None, max_tokens: int | None, price: Price | None) -> Spending:
    """The spending of a run with the limits given, or with the default one when none is.

    Raises UsageError for a limit that lets nothing through, and for one that can't be kept.
    """
    if max_usd is not None and not max_usd > 0:
        raise UsageError(f"--max-usd {max_usd:g} lets nothing be sent: raise it, or leave --llm out")
    if max_tokens is not None and max_tokens <= 0:
        raise UsageError(f"--max-tokens {max_tokens} lets nothing be sent: raise it, or leave --llm out")
    if max_usd is not None and max_tokens is None and price is None:
        raise UsageError(
            "no price is known for this model, so --max-usd can't be kept: "
            "add --price IN,OUT (dollars per million tokens) or --max-tokens"
        )
    if max_usd is None and max_tokens is None:
        if price is None:
            max_tokens = DEFAULT_MAX_TOKENS
        else:
            max_usd = DEFAULT_MAX_USD
    return Spending(max_tokens, max_usd, price)
