"""What a proposer hands to the loop.  Plain data; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Proposal:
    """A whole kernel.py.  ``strategy`` holds short tags joined by commas, ``description`` one sentence.

    ``tokens_in``, ``tokens_out`` and ``cost_usd`` are what this one proposal took; None where no model
    was asked, or where the provider doesn't say.
    """

    source: str
    strategy: str
    description: str
    backend: str
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None
    model: str = ""
    proposer: str = "playbook"
    seconds: float = 0.0


@dataclass(slots=True)
class Failure:
    """A proposer that was asked and has no kernel to show for it: a dead API, a refusal, a cut-off reply.

    It becomes an ``infra_error`` row, which counts against no strategy.  ``final`` says that asking again
    is pointless (a rejected key, say).
    """

    reason: str
    strategy: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None
    model: str = ""
    proposer: str = ""
    final: bool = False
    seconds: float = 0.0
