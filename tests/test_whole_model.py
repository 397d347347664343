"""What a variant of the whole model may differ by, and CUDA graphs that never overwrite a result."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import small
from torch import Tensor, nn

from autokernel.integrate.arms import Arm, Arms
from autokernel.integrate.cuda_graph import CudaGraph
from autokernel.integrate.whole_model import Answer, WholeModelOracle, agree
from autokernel.judge.handle import WorkerFault


def answer(noise: float = 1e-3) -> Answer:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1, 64, 100, dtype=torch.float64, generator=generator)
    eager = (exact + noise * torch.randn(exact.shape, generator=generator)).float()
    return Answer([], [exact], [eager])


def test_as_good_as_eager_passes() -> None:
    a = answer()
    found = agree([a], [[a.eager[0].clone()]])
    assert found.ok and found.error_ratio == pytest.approx(1.0)


def test_the_limit_is_in_units_of_eagers_error() -> None:
    a = answer()
    error = a.eager[0].double() - a.exact[0]
    for factor, ok in ((1.4, True), (1.6, False)):
        found = agree([a], [[(a.exact[0] + factor * error).float()]])
        assert found.ok is ok
        assert found.error_ratio == pytest.approx(factor, rel=1e-3)
    half = answer(0.02)
    half.eager = [half.eager[0].half()]
    error = half.eager[0].double() - half.exact[0]
    for factor, ok in ((1.4, True), (1.6, False)):
        assert agree([half], [[(half.exact[0] + factor * error).half()]]).ok is ok


def test_structure_and_numbers() -> None:
    a = answer()
    mine = a.eager[0]
    assert "2 outputs instead of 1" in agree([a], [[mine, mine]]).reason
    assert "torch.float16" in agree([a], [[mine.half()]]).reason
    assert not agree([a], [[mine[:, :32]]]).ok
    broken = mine.clone()
    broken[0, 3, 7] = float("nan")
    assert "NaN or Inf" in agree([a], [[broken]]).reason


def test_infinity_where_eager_overflowed_too_is_no_fault() -> None:
    a = answer()
    a.eager[0][0, 0, 0] = float("inf")
    assert agree([a], [[a.eager[0].clone()]]).ok


def test_flipped_choices_are_counted() -> None:
    """Swapping the top two scores of many rows hardly moves the error of large logits, but the choices."""
    exact = torch.zeros(1, 64, 100, dtype=torch.float64)
    exact[..., 0], exact[..., 1] = 100.0, 99.999
    exact += torch.randn(exact.shape, dtype=torch.float64) * 1e-6
    eager = exact.float() + 1e-3 * torch.randn(exact.shape)
    eager[..., 0], eager[..., 1] = 100.0, 99.99
    a = Answer([], [exact], [eager])
    swapped = eager.clone()
    swapped[:, :40, 0], swapped[:, :40, 1] = 99.99, 100.0
    found = agree([a], [[swapped]])
    assert not found.ok and "top-1" in found.reason


def test_the_oracle_is_float64(tmp_path) -> None:
    oracle = WholeModelOracle(small("llama", tmp_path))
    first, second = oracle.answer(1), oracle.answer(2)
    assert first.exact[0].dtype == torch.float64 and first.flagged == ""
    assert 1e-9 < first.eager_error < 1e-4
    assert not torch.equal(first.inputs[0], second.inputs[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_held_results_survive_the_next_replay() -> None:
    model = nn.Linear(64, 64).cuda()
    fn = CudaGraph(lambda x: model(x), set())
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(6)]
    with torch.no_grad():
        held: list[Tensor] = [fn(x) for x in inputs]  # more than there are recordings
        views = [fn(x)[:4] for x in inputs]
        for x, y, v in zip(inputs, held, views, strict=True):
            torch.testing.assert_close(y, model(x))
            torch.testing.assert_close(v, model(x)[:4])
    assert fn.failure is None and len(fn._recordings) <= CudaGraph.MAX_RECORDINGS
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(fn(x), model(x))
        other = torch.randn(3, 64, device="cuda")  # another shape is recorded by itself
        torch.testing.assert_close(fn(other), model(other))


def test_a_variant_that_hangs_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines have all the time that the judge gives; they are what a variant's time is measured by."""
    arms = object.__new__(Arms)
    arms.loaded = SimpleNamespace(spec=SimpleNamespace(to_json=dict))  # pyright: ignore[reportAttributeAccessIssue]
    arms.judge = SimpleNamespace(ipc=False)  # pyright: ignore[reportAttributeAccessIssue]
    arms._answers, arms._weights, arms._baseline_s = [SimpleNamespace(inputs=[])], tmp_path, 0.0  # pyright: ignore
    started: list[str] = []

    def start_one(name: str, args: dict[str, Any], inputs: object) -> Arm:
        started.append(name)
        hangs = name != "good" and started.count(name) <= {"hung once": 1}.get(name, 9)
        status = "crash" if name == "crashes" else "timeout"
        fault = WorkerFault(status, "no answer") if hangs else None
        return Arm(name, fault=fault)

    monkeypatch.setattr(arms, "_start_one", start_one)
    variants = {"good": {}, "hung once": {}, "hangs": {}, "crashes": {}, "eager": {"baseline": "eager"}}
    with pytest.warns(UserWarning, match="no answer; starting it once more"):
        found = arms.start(variants)
    assert {n: started.count(n) for n in found} == {
        "good": 1, "hung once": 2, "hangs": 2, "crashes": 1, "eager": 1,
    }  # fmt: skip
    assert [n for n, arm in found.items() if arm.fault is None] == ["good", "hung once"]


def test_a_model_of_which_there_is_no_copy_is_compared_with_eager() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.lock = nn.Linear(4, 4), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    loaded: Any = SimpleNamespace(model=Held(), fresh_inputs=lambda seed: ((torch.ones(2, 4),), {}))
    found = WholeModelOracle(loaded).answer(0)
    assert "the model can't be copied" in found.flagged and "compared with eager" in found.flagged
    assert agree([found], [found.eager]).ok
