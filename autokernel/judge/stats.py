"""Paired statistics: median log-ratio, sign-test bounds, and what "faster" must exceed.

Pairs cancel drift (clocks, temperature, neighbours) that would make independent means lie.  The sign
test needs no assumption about the shape of the noise.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from autokernel.records import Ratio

MIN_DELTA, MAX_DELTA = 0.005, 0.10
CONFIDENCE = 0.95
P95_OVER_MEDIAN = 1.960 / 0.6745


def order_index(n: int, alpha: float) -> int:
    """The largest k (0-based) whose order statistic lies below the median with probability >= 1 - alpha.

    -1 when ``n`` is too small for any bound. The k-th smallest of n values exceeds the true median only
    if at most k of them fall below it: P(Binomial(n, 1/2) <= k) <= alpha.
    """
    total, k = 0.0, -1
    for i in range(n):
        total += math.comb(n, i) * 0.5**n
        if total > alpha:
            break
        k = i
    return k


def paired_ratio(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> Ratio:
    """How many times faster the candidate is, pair by pair.

    Fewer than 5 pairs support no one-sided bound: then ``lower_bound`` and ``low`` are 0, ``high`` is inf.
    """
    if len(baseline_s) != len(candidate_s) or not baseline_s:
        raise ValueError("a paired ratio needs equally many samples of both, and at least one")
    logs = sorted(math.log(b / c) for b, c in zip(baseline_s, candidate_s, strict=True))
    n = len(logs)
    one, two = order_index(n, 1 - CONFIDENCE), order_index(n, (1 - CONFIDENCE) / 2)
    return Ratio(
        ratio=math.exp(statistics.median(logs)),
        low=math.exp(logs[two]) if two >= 0 else 0.0,
        high=math.exp(logs[n - 1 - two]) if two >= 0 else math.inf,
        lower_bound=math.exp(logs[one]) if one >= 0 else 0.0,
        pairs=n,
    )


def calibrate_delta(blocks: Sequence[Sequence[Sequence[float]]]) -> float:
    """delta from A/A blocks: the 95th percentile of how far equal arms stray here, between 0.5 % and 10 %.

    A block holds the times of arms that run the same code in different processes; each pair of arms is one
    A/A result, a median log-ratio. There are too few to take their 95th percentile as it is; for normal
    scatter it is 2.9 times the median of their absolute values. The quieter block counts, and the bound
    above: a burst from another program would otherwise forbid every improvement.
    """
    return min(MAX_DELTA, max(MIN_DELTA, min(math.expm1(_p95(block)) for block in blocks)))


def _p95(arms: Sequence[Sequence[float]]) -> float:
    strays = [
        abs(statistics.median(math.log(x / y) for x, y in zip(a, b, strict=True)))
        for a, b in itertools.combinations(arms, 2)
    ]
    return P95_OVER_MEDIAN * statistics.median(strays)


def faster(ratio: Ratio, delta: float) -> bool:
    return ratio.lower_bound > 1 + delta
