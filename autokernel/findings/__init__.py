"""Why a model is slow, in plain words: what the captured graph and the measured times of one profile show.

Each finder looks for one kind of cause and gives `Finding` records; none of them guesses.  A time is that of
the ops concerned in one forward pass, as measured; where only a part of it can go away it is called a bound
("up to").  Findings of equal layers are one.  What takes less than half a per cent of the pass is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autokernel.findings.attention import attention_backend
from autokernel.findings.evidence import Evidence
from autokernel.findings.products import float32_products, sibling_linears, small_products
from autokernel.findings.traffic import casts, chains, copies, static_work
from autokernel.findings.whole import graph_breaks, launch_bound
from autokernel.profile_records import Finding

__all__ = ["FINDERS", "Evidence", "find"]

FINDERS: dict[str, Callable[[Evidence], Iterator[Finding]]] = {
    "graph break": graph_breaks,
    "launch-bound": launch_bound,
    "attention backend": attention_backend,
    "copy": copies,
    "cast": casts,
    "static work": static_work,
    "unfused ops": chains,
    "small products": small_products,
    "sibling linears": sibling_linears,
    "float32": float32_products,
}

LEAST_SHARE = 0.005


def find(evidence: Evidence) -> list[Finding]:
    """All findings, the most time first."""
    merged = _merged(one for finder in FINDERS.values() for one in finder(evidence))
    whole = max(evidence.total_us, evidence.wall_us if evidence.device.kind == "cuda" else 0.0)
    worth = [one for one in merged if one.time_us > 0 and one.time_us >= LEAST_SHARE * whole]
    return sorted(worth, key=lambda one: one.time_us, reverse=True)


def _merged(found: Iterable[Finding]) -> list[Finding]:
    """The same cause at the same line is one finding, with all its modules."""
    groups: dict[tuple[str, ...], Finding] = {}
    for one in found:
        key = (one.kind, one.cause, one.source, one.remedy)
        first = groups.setdefault(key, one)
        if first is not one:
            first.time_us += one.time_us
            first.count += one.count
            first.modules += [m for m in one.modules if m not in first.modules]
    return list(groups.values())
