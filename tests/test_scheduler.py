"""Which kernels get their chance in the whole model."""

from __future__ import annotations

from autokernel.records import Experiment
from autokernel.scheduler import alternatives, model_candidate


def row(
    number: int, status: str, speed: float, backend: str = "torch", strategy: str = "s", **more
) -> Experiment:
    return Experiment(
        number, "t", "norm", status=status, candidate=f"c{number}", backend=backend, strategy=strategy,
        latency_us=10 / speed, speedup_vs_best_baseline=speed, ci_high=speed * 1.01,
        proposer=more.pop("proposer", "playbook"), **more,
    )  # fmt: skip


def test_a_starter_that_is_the_reference_never_enters() -> None:
    rows = [row(1, "keep", 1.05, proposer="starter")]
    assert model_candidate(rows) is None
    rows.append(row(2, "keep", 1.02))
    chosen = model_candidate(rows)
    assert chosen is rows[1] and alternatives(rows, chosen) == []


def test_alternatives_are_of_another_kind_and_nearly_as_fast() -> None:
    rows = [
        row(1, "keep", 1.5, "triton", "starter"),
        row(2, "discard", 1.4, "torch", "sdpa,cudnn"),
        row(3, "discard", 1.45, "torch", "sdpa,flash"),
        row(4, "discard", 0.5, "torch", "slow"),
        row(5, "keep", 2.0, "triton", "starter,tuned"),
        Experiment(6, "t", "norm", status="incorrect", candidate="c6", backend="torch"),
    ]
    chosen = model_candidate(rows)
    assert chosen is rows[4]
    assert alternatives(rows, chosen) == [rows[2]]
    rows[4].speedup_vs_best_baseline = 3.0  # more than twice as fast: no edge makes up for that
    assert alternatives(rows, chosen) == []
