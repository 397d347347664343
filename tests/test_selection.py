"""Which kernels stay in the model, on models that are made of numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autokernel.integrate.arms import Arm, KeptKernel
from autokernel.integrate.endtoend import EndToEnd, Selection, _sides
from autokernel.integrate.executors import executors_for
from autokernel.integrate.model_rows import ModelRows
from autokernel.integrate.selection import Selector
from autokernel.integrate.whole_model import Agreement
from autokernel.judge.handle import WorkerFault
from autokernel.records import Experiment

EXECUTORS = ["inductor", "plain"]


class FakeArms:
    """``cost(names of kernels, executor)`` is the model's time in µs; None: such a variant does not start."""

    def __init__(self, cost: Callable[[set[str], str], float | None]) -> None:
        self.cost, self.rng = cost, random.Random(1)
        self.names: dict[str, str] = {}
        self.open = 0

    def variant(self, kernels: list[KeptKernel], executor: str) -> dict[str, Any]:
        return {"kernels": {k.source.stem for k in kernels}, "executor": executor}

    def start(self, variants: dict[str, dict[str, Any]]) -> dict[str, Arm]:
        return {name: self._arm(name, variant) for name, variant in variants.items()}

    def _arm(self, name: str, variant: dict[str, Any]) -> Arm:
        us = self.cost(variant["kernels"], variant["executor"])
        if us is None:
            return Arm(name, fault=WorkerFault("crash", "it does not start"))
        self.open += 1
        worker = SimpleNamespace(held_bytes=0.0, us=us, close=self._closed)
        return Arm(name, worker=worker, agreement=Agreement(True, "", 1.0))  # type: ignore[arg-type]

    def _closed(self) -> None:
        self.open -= 1

    def rounds(self, arms: list[Arm], rounds: int) -> dict[str, list[float]]:
        return {a.name: [a.worker.us * self.rng.gauss(1, 0.002) * 1e-6 for _ in range(rounds)] for a in arms}  # type: ignore[union-attr]


def kernel(folder: Path, name: str, gain_us: float = 10.0, instead: tuple[str, ...] = ()) -> KeptKernel:
    def file(stem: str) -> Path:
        path = folder / f"{stem}.py"
        path.write_text(f"# {stem}\n")
        return path

    task = SimpleNamespace(name=f"task-{name}", device_time_us=2 * gain_us)
    return KeptKernel(task, file(name), 2.0, tuple(file(i) for i in instead))  # type: ignore[arg-type]


def select(
    kernels: list[KeptKernel], cost: Callable[[set[str], str], float | None]
) -> tuple[set[str], str, list[Experiment]]:
    arms, rows = FakeArms(cost), list[Experiment]()
    baseline = arms._arm("compile-default", {"kernels": set(), "executor": "baseline"})

    def journal(row: Experiment) -> Experiment:
        rows.append(row)
        return row

    selector = Selector(arms, baseline, ModelRows("run", "cpu"), journal)  # type: ignore[arg-type]
    chosen = selector.run(kernels, EXECUTORS)
    assert arms.open == 1  # every process but the baseline's has been closed
    return {k.source.stem for k in chosen}, selector.executor, rows


def test_a_selection_that_takes_too_much_memory_is_measured_again_without_its_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = {"a": 30, "b": 200, "c": 20}
    arms, asked, limits = FakeArms(additive(dict.fromkeys(mib, 10.0))), list[str](), [300]
    arms.kind, arms.close, start_one = "cpu", lambda: None, arms._arm  # type: ignore[attr-defined]

    def with_memory(name: str, variant: dict[str, Any]) -> Arm:
        arm = start_one(name, {"kernels": set(), "executor": "inductor"} | variant)
        arm.worker.held_bytes = float(sum(mib[n] for n in variant.get("kernels", ())))  # type: ignore[union-attr]
        return arm

    def finish(self: EndToEnd, best: str, selector: Selector, chosen: list[KeptKernel]) -> Selection:
        asked.append("".join(sorted(k.source.stem for k in chosen)))
        too_large = sum(mib[n] for n in asked[-1]) > limits[-1]
        return Selection(chosen, "inductor", improved=not too_large, why="memory", too_large=too_large)

    monkeypatch.setattr(arms, "_arm", with_memory)
    monkeypatch.setattr(EndToEnd, "_current_baselines", lambda self: {"compile-default": 100.0})
    monkeypatch.setattr(EndToEnd, "_finish", finish)
    whole = object.__new__(EndToEnd)
    whole.arms, whole.make, whole._say = arms, ModelRows("run", "cpu"), lambda text: None  # type: ignore[assignment]
    whole._journal, whole.loaded = lambda row: row, SimpleNamespace(spec=SimpleNamespace(device="cpu"))  # type: ignore[assignment]
    kernels = [kernel(tmp_path, n) for n in mib]
    assert whole.select(kernels).improved and asked == ["abc"]
    limits.append(60)
    assert whole.select(kernels).improved and asked == ["abc", "abc", "ac"]
    limits.append(-1)
    assert not whole.select(kernels).improved and [len(names) for names in asked[3:]] == [3, 2, 1, 0]


def test_the_plain_graph_is_tried_where_inductor_does_not_beat_eager_by_far() -> None:
    assert executors_for("cpu", False, {"eager": 100.0}) == ["plain"]
    assert executors_for("cpu", True, {"eager": 100.0}) == ["inductor", "plain"]
    assert executors_for("cpu", True, {"eager": 100.0, "compile-default": 90.0}) == ["inductor", "plain"]
    assert executors_for("cpu", True, {"eager": 100.0, "compile-default": 50.0}) == ["inductor"]
    assert "plain-cudagraph" in executors_for("cuda", True, {"eager": 100.0, "compile-default": 50.0})


def additive(gains: dict[str, float]) -> Callable[[set[str], str], float]:
    def cost(names: set[str], executor: str) -> float:
        return 100.0 - sum(gains.get(n, 0.0) for n in names) + (5.0 if executor == "plain" else 0.0)

    return cost


def test_what_helps_stays_and_what_does_not_goes(tmp_path: Path) -> None:
    kernels = [kernel(tmp_path, n, g) for n, g in (("a", 30), ("b", 20), ("c", 10))]
    chosen, executor, rows = select(kernels, additive({"a": 10, "b": -5, "c": 4}))
    assert chosen == {"a", "c"} and executor == "inductor"
    evicted = [r for r in rows if r.candidate == kernels[1].id]
    assert evicted[0].status == "discard" and "not faster with it" in evicted[0].reason
    left_out = {r.parent: r.speedup_vs_parent for r in rows if r.parent}
    assert left_out[kernels[0].id] == pytest.approx(86 / 96, abs=0.01)


def test_a_kernel_that_another_makes_useless_is_evicted(tmp_path: Path) -> None:
    """Each helped when it came, but with the last one in, the first no longer does."""

    def cost(names: set[str], executor: str) -> float:
        return 100.0 - (0 if "b" in names else 10 * ("a" in names)) - 20 * ("b" in names)

    chosen, _, rows = select([kernel(tmp_path, "a", 30), kernel(tmp_path, "b", 20)], cost)
    assert chosen == {"b"}
    assert any("not slower without it" in r.reason for r in rows if r.parent)


@pytest.mark.parametrize(("weak", "steps"), [(15.0, 1), (1.2, 2)])
def test_the_rest_is_asked_again_only_where_it_is_in_doubt(tmp_path: Path, weak: float, steps: int) -> None:
    kernels = [kernel(tmp_path, name) for name in ("a", "b", "c")]

    def cost(names: set[str], executor: str) -> float:
        gains = {"a": 20.0, "b": weak, "c": 1.0 if "a" not in names or "b" not in names else 0.0}
        return 100.0 - sum(gains[n] for n in names)

    chosen, _, rows = select([kernels[2], *kernels[:2]], cost)
    assert chosen == {"a", "b"}
    left_out = [r.description for r in rows if r.description.startswith("leave out")]
    assert left_out.count("leave out task-a") == steps and left_out.count("leave out task-c") == 1


def test_the_only_one_is_measured_once(tmp_path: Path) -> None:
    kernels = [kernel(tmp_path, n, g) for n, g in (("a", 30), ("b", 20))]
    chosen, _, rows = select(kernels, additive({"a": 10}))
    assert chosen == {"a"} and not any(r.parent for r in rows)
    chosen, _, rows = select(kernels[::-1], additive({"b": 1.2}))
    assert chosen == {"b"} and any(r.parent == kernels[1].id for r in rows)  # not added to nothing


def test_two_that_stand_in_for_each_other_are_not_both_evicted(tmp_path: Path) -> None:
    """With c in, a or b alone would do: leaving out either costs nothing, leaving out both does."""

    def cost(names: set[str], executor: str) -> float:
        pair = {"a", "b"} & names
        if "c" in names:
            return 90.0 - 20 * bool(pair)
        return 100.0 - 20 * bool(pair) - 2 * (len(pair) == 2)

    chosen, _, rows = select([kernel(tmp_path, n, g) for n, g in (("a", 30), ("b", 20), ("c", 10))], cost)
    assert "c" in chosen and len({"a", "b"} & chosen) == 1
    assert sum("leave out" in r.description for r in rows) >= 5  # a second round found out


def test_an_alternative_takes_the_place(tmp_path: Path) -> None:
    kernels = [kernel(tmp_path, "a", 30, ("a2", "a3")), kernel(tmp_path, "b", 20)]
    chosen, _, rows = select(kernels, additive({"a": 5, "a2": 9, "a3": 14, "b": 6}))
    assert chosen == {"a3", "b"}
    assert {r.status for r in rows if "another kernel" in r.description} == {"keep"}


def test_the_faster_executor_is_chosen_with_all_kernels_in(tmp_path: Path) -> None:
    def cost(names: set[str], executor: str) -> float:
        return (60.0 if executor == "plain" and names else 100.0) - 5 * len(names)

    chosen, executor, _ = select([kernel(tmp_path, "a")], cost)
    assert executor == "plain" and chosen == {"a"}


def test_an_executor_that_fails_is_not_chosen(tmp_path: Path) -> None:
    def cost(names: set[str], executor: str) -> float | None:
        return None if executor == "inductor" else 100.0 - 10 * len(names)

    kernels = [kernel(tmp_path, "a"), kernel(tmp_path, "b")]
    chosen, executor, rows = select(kernels, cost)
    assert executor == "plain" and chosen == {"a", "b"}
    carriers = {r.strategy: r.status for r in rows if r.description.startswith("all 2 kernels")}
    assert carriers["inductor"] == "crash" and carriers["plain"] in ("keep", "discard")


@pytest.mark.parametrize(("gain", "stays"), [(-5.0, False), (5.0, True)])
def test_an_alternative_has_to_beat_none_at_all(tmp_path: Path, gain: float, stays: bool) -> None:
    kernels = [kernel(tmp_path, "a", 30), kernel(tmp_path, "b", 20, ("b2",))]
    chosen, _, rows = select(kernels, additive({"a": 10, "b": -20, "b2": gain}))
    assert chosen == ({"a", "b2"} if stays else {"a"})
    (swap,) = [r for r in rows if r.description == "another kernel for task-b"]
    assert swap.status == ("keep" if stays else "discard") and ("worse than neither" in swap.reason) != stays


def test_a_kernel_that_breaks_the_model_costs_only_itself(tmp_path: Path) -> None:
    def cost(names: set[str], executor: str) -> float | None:
        return None if "bad" in names else 100.0 - 10 * ("a" in names)

    chosen, _, rows = select([kernel(tmp_path, "bad", 30), kernel(tmp_path, "a", 20)], cost)
    assert chosen == {"a"}
    assert any(r.status == "crash" and r.candidate for r in rows)


def test_nothing_that_helps(tmp_path: Path) -> None:
    chosen, _, _ = select([kernel(tmp_path, "a"), kernel(tmp_path, "b")], additive({"a": -1, "b": 0}))
    assert chosen == set()


def test_a_side_is_all_its_processes() -> None:
    samples = {
        "compile-default": [10e-6, 11e-6], "eager": [50e-6, 40e-6], "ours": [5e-6, 5e-6],
        "ours 2": [7e-6, 8e-6], "compile-default 2": [12e-6, 12e-6],
    }  # fmt: skip
    rounds, spread = _sides(samples, "compile-default")
    assert rounds == {
        "ours": [5e-6, 5e-6, 7e-6, 8e-6],
        "compile-default": [10e-6, 11e-6, 12e-6, 12e-6],
        "eager": [50e-6, 40e-6, 50e-6, 40e-6],
    }
    assert spread == "; 2 processes: 5, 8 µs"


def test_a_process_that_died_takes_its_pair_along() -> None:
    samples = {"eager": [4e-6], "ours": [2e-6], "ours 2": [3e-6], "eager 2": [5e-6], "ours 3": [1e-6]}
    rounds, _ = _sides(samples, "eager")
    assert rounds == {"ours": [2e-6, 3e-6], "eager": [4e-6, 5e-6]}
