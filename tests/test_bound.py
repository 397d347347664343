"""What bounds a kernel, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autokernel.bound import Performance, bound_of, least_times_us, performance
from autokernel.hardware import Ceilings
from autokernel.proposers.proposal import Proposal
from autokernel.records import Port, Ratio, Task, Verdict
from autokernel.rows import baseline_row, verdict_row

# 1 TB/s is 1 MB per us; 100 TFLOP/s is 100 MFLOP per us; an empty call takes 2 us.
CEILINGS = Ceilings(1e12, {"float16": 1e14, "float32": 1e13, "tf32": 5e13}, 2.0)


def task_of(flops: float | None, moved: float | None, dtype: str = "float16", **fields: object) -> Task:
    tokens = Port("tokens", (4,), "int64", (1,))
    port = Port("x", (4, 8), dtype, (8, 1))
    return Task(
        1, "linear", "f" * 32, "cpu", 1, [], [tokens, port], [port], flops=flops, bytes=moved, **fields
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("latency", "memory", "compute", "launch", "bound"),
    [
        (12.0, 10.0, 1.0, 2.0, "dram"),
        (20.0, 10.0, 1.0, 2.0, "dram"),  # just accounted for
        (20.1, 10.0, 1.0, 2.0, "mixed"),  # twice the roofline and more: it waits for something else
        (12.0, 1.0, 10.0, 2.0, "compute"),
        (12.0, 10.0, 9.0, 2.0, "mixed"),  # near the ridge point
        (4.0, 3.0, 0.0, 2.0, "launch"),
        (4.1, 3.0, 0.0, 2.0, "dram"),
        (10.0, 21.0, 0.0, 2.0, "mixed"),  # faster than memory allows: the bytes came from a cache
        (10.0, 21.0, 8.0, 2.0, "compute"),
        (10.0, 12.0, 0.0, 2.0, "dram"),  # copy bandwidth is no law for what mostly reads
        (12.0, 10.0, 1.0, None, "dram"),
        (12.0, None, 1.0, 2.0, None),
        (12.0, 10.0, None, 2.0, None),
        (3.0, None, None, 2.0, "launch"),  # needs no other ceiling
    ],
)
def test_bound(
    latency: float, memory: float | None, compute: float | None, launch: float | None, bound: str | None
) -> None:
    assert bound_of(latency, memory, compute, launch) == bound


def test_least_times() -> None:
    assert least_times_us(task_of(2e9, 4e6), CEILINGS) == pytest.approx((4.0, 20.0))
    assert least_times_us(task_of(2e9, 4e6, "float32"), CEILINGS) == pytest.approx((4.0, 200.0))
    assert least_times_us(task_of(2e9, 4e6, "complex64"), CEILINGS) == pytest.approx((4.0, 200.0))
    tf32 = task_of(2e9, 4e6, "float32", allow_tf32=True)
    assert least_times_us(tf32, CEILINGS) == pytest.approx((4.0, 40.0))
    assert least_times_us(task_of(None, 4e6), CEILINGS) == (4.0, 0.0), "no contraction is no work to count"
    assert least_times_us(task_of(2e9, 4e6, "bfloat16"), CEILINGS) == (4.0, None), "never measured"
    assert least_times_us(task_of(2e9, None), CEILINGS) == (None, None)
    assert least_times_us(task_of(2e9, 4e6), Ceilings(None)) == (None, None)


def test_performance() -> None:
    linear = task_of(2e9, 4e6)
    assert performance(linear, 25.0, CEILINGS) == Performance("compute", 80.0, pytest.approx(80.0))
    norm = task_of(None, 40e6)
    assert performance(norm, 50.0, CEILINGS) == Performance("dram", pytest.approx(80.0), None)
    assert performance(norm, 500.0, CEILINGS) == Performance("mixed", pytest.approx(8.0), None)
    small = performance(task_of(None, 1e5), 3.0, CEILINGS)
    assert small == Performance("launch", pytest.approx(100 * 0.1 / 3), None)


def test_the_floor_in_the_task_comes_first() -> None:
    causal = replace(task_of(2e9, 4e6), roofline_us=10.0)
    assert performance(causal, 25.0, CEILINGS).pct_peak == pytest.approx(40.0)
    assert performance(causal, 25.0) == Performance(None, 40.0, pytest.approx(80.0))


def test_what_is_unknown_stays_empty() -> None:
    assert performance(task_of(2e9, 4e6), None, CEILINGS) == Performance()
    assert performance(task_of(None, None), 25.0, CEILINGS) == Performance()
    assert performance(task_of(None, 4e6), 25.0) == Performance()
    assert performance(task_of(2e9, 4e6, "bfloat16"), 25.0, CEILINGS).pct_peak is None


KERNEL = Proposal("", "", "", "torch", proposer="hand")


def row_of(verdict: Verdict, ceilings: Ceilings | None = CEILINGS):
    return verdict_row(
        task_of(2e9, 4e6), KERNEL, verdict, tag="t", device="d", candidate="c", ceilings=ceilings
    )


def test_rows_carry_the_bound() -> None:
    kept = Verdict("keep", latency_us=25.0, vs_eager=Ratio(2.0, 1.9, 2.1, 1.9, 30))
    row = row_of(kept)
    assert (row.bound, row.pct_peak) == ("compute", 80.0)
    assert row.throughput_tflops == pytest.approx(80.0)
    assert row_of(kept, None).bound == ""
    assert row_of(Verdict("incorrect", "zeros")).bound == ""
    kept.bound = "occupancy"
    assert row_of(kept).bound == "occupancy", "counters know better"
    base = baseline_row(task_of(2e9, 4e6), "eager", 100.0, tag="t", device="d", ceilings=CEILINGS)
    assert (base.bound, base.pct_peak) == ("mixed", 20.0)
    assert baseline_row(task_of(2e9, 4e6), "eager", 100.0, tag="t", device="d").bound == ""
