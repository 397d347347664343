"""Paired statistics and the stopwatch."""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from autokernel.judge import clock
from autokernel.judge.clock import Sample
from autokernel.judge.stats import MAX_DELTA, MIN_DELTA, calibrate_delta, faster, order_index, paired_ratio


def test_order_index_is_the_binomial_bound() -> None:
    for n in (5, 30, 100):
        k = order_index(n, 0.05)
        tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
        assert tail <= 0.05 < tail + math.comb(n, k + 1) / 2**n
    assert order_index(4, 0.05) == -1


def test_ratio_and_bounds() -> None:
    rng = random.Random(1)
    base = [rng.lognormvariate(0, 0.1) for _ in range(100)]
    ours = [b / 1.2 * rng.lognormvariate(0, 0.02) for b in base]
    r = paired_ratio(base, ours)
    assert r.low <= r.lower_bound <= r.ratio <= r.high and r.pairs == 100
    assert r.ratio == pytest.approx(1.2, rel=0.02) and faster(r, 0.005)


def test_too_few_pairs_prove_nothing() -> None:
    r = paired_ratio([2.0] * 4, [1.0] * 4)
    assert (r.ratio, r.lower_bound, r.high) == (2.0, 0.0, math.inf)
    with pytest.raises(ValueError):
        paired_ratio([1.0], [])


def false_accepts(trials: int, seed: int) -> float:
    """Share of equal kernels kept, with drift and outliers that both arms share."""
    rng, kept = random.Random(seed), 0
    for _ in range(trials):
        level, a, b = 0.0, [], []
        for _ in range(30):
            level += rng.gauss(0, 0.02)
            for side in (a, b):
                spike = 0.5 if rng.random() < 0.05 else 0.0
                side.append(math.exp(level + rng.gauss(0, 0.004) + spike))
        kept += faster(paired_ratio(a, b), MIN_DELTA)
    return kept / trials


def test_equal_kernels_are_not_kept() -> None:
    assert false_accepts(2000, 0) <= 0.01


def test_delta_grows_with_what_equal_arms_differ_by() -> None:
    rng = random.Random(0)

    def arm(bias: float) -> list[float]:
        return [math.exp(rng.gauss(0, 0.001)) * bias for _ in range(30)]

    assert calibrate_delta([[arm(1.0), arm(1.0), arm(1.0)]]) == MIN_DELTA
    biased = [arm(1.0), arm(1.01), arm(0.99), arm(1.0)]
    delta = calibrate_delta([biased])
    assert delta == pytest.approx(2.9 * 0.01, rel=0.2)
    burst = [arm(1.0), arm(2.0), arm(5.0), arm(9.0)]
    assert calibrate_delta([burst, biased]) == delta
    assert calibrate_delta([burst]) == MAX_DELTA


def test_host_timer_is_right_and_keeps_each_buffers_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, now = [], [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work(i):
        calls.append(i)
        now[0] += 0.001
        return i * 10

    targets = [(work, (i,)) for i in range(3)]
    timer = clock.make_timer(targets, torch.device("cpu"), min_sample_s=0.004)
    calls.clear()
    seconds = timer.sample(1)
    assert timer.calls in (4, 5)  # 4 ms of 1 ms each, and what adding them up rounds off
    assert calls == [(1 + i) % 3 for i in range(timer.calls)]
    assert seconds == pytest.approx(0.001 * timer.calls)
    assert timer.estimate_s == pytest.approx(0.001)
    assert timer.outputs == {0: 0, 1: 10, 2: 20}


def test_short_calls_are_repeated_well_above_the_clocks_resolution() -> None:
    timer = clock.make_timer([(lambda x: x, (1,))], torch.device("cpu"))
    assert timer.calls > 1000
    assert timer.sample(0) > 1e-4


class FakeArm:
    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def sample(self, start: int) -> Sample:
        self.log.append((self.name, start))
        return Sample(1e-3, 2e-3, 10)


def test_interleave_pairs_every_round_in_random_order() -> None:
    log: list = []
    arms, checked, dealt = [FakeArm(n, log) for n in "abc"], [], []
    rounds = clock.interleave(
        arms, 20, buffers=4,
        before_round=lambda: dealt.append(len(log)),
        after_round=lambda: checked.append(len(log)),
        pause_s=0, rng=random.Random(0),
    )  # fmt: skip
    assert all(len(rounds.samples[n]) == 20 for n in "abc")
    assert dealt == [3 * i for i in range(21)] and checked == [3 * i for i in range(1, 22)]  # one to warm up
    per_round = [log[i : i + 3] for i in range(0, 63, 3)]
    assert all({n for n, _ in r} == set("abc") and len({s for _, s in r}) == 1 for r in per_round)
    assert len({tuple(n for n, _ in r) for r in per_round}) > 3
    assert rounds.median_us("a") == pytest.approx(100)


def samples(rng: random.Random, claimed: float, seen: float, n: int = 30) -> list[Sample]:
    return [Sample(claimed, seen + abs(rng.gauss(5e-5, 2e-5)), 1) for _ in range(n)]


def test_the_gate_believes_honest_claims_and_not_others() -> None:
    rng = random.Random(0)
    trusted = samples(rng, 2e-3, 2e-3)
    assert clock.gate_fault(samples(rng, 1.5e-3, 1.5e-3), trusted) == ""
    assert "judge's own clock" in clock.gate_fault(samples(rng, 1e-3, 2e-3), trusted)
    assert "at all" in clock.gate_fault([Sample(0.0, 1e-3, 1)] * 30, trusted)
    assert "more time" in clock.gate_fault([Sample(5e-3, 1e-3, 1)] * 30, trusted)


def test_what_the_gate_can_not_convict_it_does_not_reward() -> None:
    """Noise may hide a fourfold lie from the conviction, but the slower account is the one that counts."""
    rng = random.Random(0)

    def noisy(claimed_s: float, true_s: float) -> list[Sample]:
        return [Sample(claimed_s, true_s + rng.expovariate(1 / 1.5e-3), 1) for _ in range(30)]

    rewarded = convicted = 0
    for _ in range(200):
        liar, trusted = noisy(0.5e-3, 2e-3), noisy(2e-3, 2e-3)
        fault = clock.gate_fault(liar, trusted)
        convicted += bool(fault)
        rewarded += not fault and statistics.median(clock.confirmed_s(liar, trusted)) < 1e-3
    assert rewarded <= 2 and 20 < convicted < 180


def test_the_slower_account_counts() -> None:
    """A claim that is a tenth too low is corrected; an honest one moves by no more than the gate's noise."""
    rng = random.Random(0)
    quiet, gpu = samples(rng, 2e-3, 2e-3), torch.device("cuda")
    for claimed_s, true_s in (
        (1.5e-3, 1.5e-3),
        (0.96 * 1.5e-3, 1.5e-3),
        (0.9 * 1.5e-3, 1.5e-3),
        (1e-3, 1.5e-3),
    ):
        told = samples(rng, claimed_s, true_s)
        per_call_s = true_s / told[0].calls
        assert statistics.median(clock.confirmed_s(told, quiet)) == pytest.approx(per_call_s, rel=0.01)
        on_gpu = statistics.median(clock.confirmed_s(told, quiet, gpu))
        forgiven = claimed_s / true_s >= 0.95
        assert on_gpu == pytest.approx(claimed_s / told[0].calls if forgiven else per_call_s, rel=0.01)
    late = samples(rng, 1.6e-3, 1.5e-3)
    assert clock.confirmed_s(late, quiet) == [s.per_call_s for s in late], "the claim, where that is slower"


def test_the_gate_forgives_late_wake_ups_on_a_busy_machine() -> None:
    rng = random.Random(0)

    def noisy() -> list[Sample]:
        return [Sample(2e-3, 2e-3 + (4e-3 if rng.random() < 0.4 else 5e-5), 1) for _ in range(30)]

    assert sum(bool(clock.gate_fault(noisy(), noisy())) for _ in range(300)) <= 3
