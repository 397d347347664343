"""What tasks are tried on: distributions, static inputs, shrinking scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judge_tasks import LINEARS, RMS_NORM, make_task, rms_task

from autokernel.judge.buffers import InputBuffers, slot_counts
from autokernel.judge.cases import CaseMaker, fresh_seed, worst_e0
from autokernel.judge.inputs import DISTRIBUTIONS, POKED, InputSource, distributions_for
from autokernel.judge.layout import TensorSpec, stride_order
from autokernel.judge.subjects import load_reference

CPU = torch.device("cpu")


def maker(task) -> CaseMaker:
    return CaseMaker(InputSource(task, CPU), load_reference(task.dir / "reference.py", CPU))


def test_distributions_look_as_named(tmp_path: Path) -> None:
    source = InputSource(rms_task(tmp_path, 256, 256), CPU)
    x = {kind: source.draw(kind, 7, DISTRIBUTIONS[kind].scales[0])[0] for kind in DISTRIBUTIONS}
    assert abs(float(x["normal"].std()) - 1) < 0.02
    assert 900 < float(x["large"].std()) < 1100
    assert abs(float(x["offset"].mean()) - 100) < 0.1
    hit = x["outliers"].abs() > 10
    assert 0.0005 < float(hit.float().mean()) < 0.005
    assert set(x["integers"].unique().tolist()) == {-3, -2, -1, 0, 1, 2, 3}
    assert 1 <= int(x["nan"].isnan().sum()) <= POKED
    poked = source.draw("nan", 7, 1.0, poke=10.0)[0]
    assert torch.equal(poked == 10.0, x["nan"].isnan()) and not poked.isnan().any()
    assert not torch.equal(source.draw("normal", 8, 1.0)[0], x["normal"])
    assert torch.equal(source.draw("normal", 7, 1.0)[0], x["normal"])
    assert len({fresh_seed() for _ in range(50)}) == 50


def test_statics_keep_the_models_values_or_stay_near_them(tmp_path: Path) -> None:
    values = {
        "x": (torch.randn(8, 16), "activation"),
        "weight": (torch.randn(16) * 5, "parameter"),
        "bias": (torch.zeros(16), "parameter"),
        "var": (torch.rand(16), "buffer"),
        "mask": (torch.randn(16), "constant"),
    }
    reference = RMS_NORM.replace("x, weight", "x, weight, bias, var, mask")
    source = InputSource(make_task(tmp_path, reference, values), CPU)
    kept = source.draw("normal", 1, 1.0)
    assert all(torch.equal(kept[i], values[n][0]) for i, n in enumerate(values) if i > 0)
    _, weight, bias, var, mask = source.draw("normal", 1, 1.0, fresh_statics=True)
    assert not torch.equal(weight, values["weight"][0]) and 3 < float(weight.std()) < 8
    assert float(bias.abs().min()) > 0  # a bias of zeros would hide a kernel that forgets it
    assert float(var.min()) > 0
    assert torch.equal(mask, values["mask"][0])


def test_integers_stay_in_range_and_missing_captures_are_made_up_once(tmp_path: Path) -> None:
    reference = """
import torch
class Model(torch.nn.Module):
    def forward(self, index, table): return table[index]
"""
    values = {"index": (torch.randint(0, 7, (50,)), "activation"), "table": (torch.randn(7, 4), "parameter")}
    for high in ({"index": 7}, {}):
        source = InputSource(make_task(tmp_path, reference, values, high=high), CPU)
        index = source.draw("normal", fresh_seed(), 1.0)[0]
        assert index.dtype == torch.int64 and 0 <= int(index.min()) <= int(index.max()) < 7
    source = InputSource(make_task(tmp_path / "b", reference, values, high={"index": 7}, captured=()), CPU)
    assert not source.has_captured
    tables = [source.draw("normal", seed, 1.0)[1] for seed in (1, 2)]
    assert torch.equal(*tables) and float(tables[0].abs().sum()) > 0


def test_complex_captures_come_back(tmp_path: Path) -> None:
    reference = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x * 2\n"
    value = torch.randn(4, 4, dtype=torch.complex64)
    source = InputSource(make_task(tmp_path, reference, {"x": (value, "activation")}), CPU)
    assert torch.equal(source.draw("captured", 1, 1.0)[0], value)
    assert source.draw("normal", 1, 1.0)[0].dtype == torch.complex64


def test_only_linear_families_get_integers(tmp_path: Path) -> None:
    task = rms_task(tmp_path)
    assert "integers" not in distributions_for(task, "promote")
    task.family = "linear"
    assert "integers" in distributions_for(task, "promote")
    assert distributions_for(task, "screen") == ["normal", "outliers"]


def test_the_scale_shrinks_until_eager_is_finite(tmp_path: Path) -> None:
    reference = """
import torch
class Model(torch.nn.Module):
    def forward(self, q, k): return (q @ k.T).softmax(-1)
"""
    values = {n: (torch.randn(32, 64).half(), "activation") for n in ("q", "k")}
    case = maker(make_task(tmp_path, reference, values)).make("large")
    assert case.flags and case.flags[0].startswith("scale ")
    assert all(bool(t.isfinite().all()) for t in (*case.eager, *case.exact))


def test_case_knows_eagers_error_and_what_is_exact(tmp_path: Path) -> None:
    norm = maker(rms_task(tmp_path / "a", dtype=torch.float16))
    cases = [norm.make("normal") for _ in range(3)]
    assert 1e-4 < cases[0].e0[0].frobenius < 1e-3 and norm.exact_outputs == [False]
    assert worst_e0(cases)[0].frobenius == max(c.e0[0].frobenius for c in cases)
    reference = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x.T + 0\n"
    moved = maker(make_task(tmp_path / "b", reference, {"x": (torch.randn(8, 4), "activation")}))
    case = moved.make("normal")
    assert moved.exact_outputs == [True] and case.e0[0].zero
    assert moved.check(case, case.eager).ok
    assert "must be exact" in moved.check(case, [case.eager[0] * (1 + 1e-6)]).reason


def test_what_has_no_float64_form_is_compared_with_eager_and_flagged(tmp_path: Path) -> None:
    reference = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return (x.view(torch.int16) & -4).view(torch.float16) * 3
"""
    task = make_task(tmp_path, reference, {"x": (torch.randn(64, 64).half(), "activation")})
    m = maker(task)
    case = m.make("normal")
    assert "no float64 form" in case.label
    assert m.check(case, [case.eager[0].clone()]).ok
    assert not m.check(case, [case.eager[0] * 1.01]).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax_may_only_differ_on_ties(tmp_path: Path, dtype) -> None:
    reference = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x.argmax(-1)\n"
    m = maker(make_task(tmp_path, reference, {"x": (torch.randn(64, 64).to(dtype), "activation")}))
    case = m.make("normal")
    wrong = case.eager[0].clone()
    wrong[5] = (wrong[5] + 1) % 64
    assert m.check(case, [case.eager[0].clone()]).ok and not m.check(case, [wrong]).ok


def test_input_buffers_hold_strided_values_and_see_changes(tmp_path: Path) -> None:
    values = {
        "x": (torch.randn(64, 128).T.contiguous().T, "activation"),
        "wa": (torch.randn(96, 128), "parameter"),
        "wb": (torch.randn(32, 128), "parameter"),
    }
    task = make_task(tmp_path, LINEARS, values)
    specs = [TensorSpec.of(v) for v, _ in values.values()]
    buffers = InputBuffers(task, specs, (3, 2), CPU, tmp_path, ipc=False)
    inputs = [v for v, _ in values.values()]
    buffers.write_statics(inputs)
    assert set(buffers.views) == {"as an offset view", "with padded rows"}
    for slot in range(5):
        buffers.write(slot, inputs)
        assert buffers.changed_input(slot, inputs) == ""
        x = buffers.arena.view(buffers.slots[slot][0])
        assert torch.equal(x, inputs[0]) and stride_order(x.shape, x.stride()) == [1, 0]
    assert buffers.slots[3][0].offset % 256 == 16 and buffers.slots[4][0].stride[1] > 64
    buffers.arena.view(buffers.slots[1][2])[3, 3] += 1
    assert buffers.changed_input(1, inputs) == "wb"
    buffers.close()


def test_slots_fit_the_budget() -> None:
    assert slot_counts(CPU, 1 << 10, 30e-6) == (50, 50)  # 1.5 ms of calls, each on a buffer of its own
    assert slot_counts(CPU, 1 << 10, 1e-6) == (512, 512)
    assert slot_counts(CPU, 1 << 10, 5e-3) == (2, 1)
    assert slot_counts(CPU, 200 << 20, 1e-6) == (2, 2)
    assert slot_counts(CPU, 8 << 30, 0.0) == (1, 1)


def test_nan_by_arithmetic_alone_is_excused(tmp_path: Path) -> None:
    """``0 * NaN`` is NaN whatever the number would have been; a NaN that is read is one to be shown."""
    reference = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x * {}\n"
    values = {"x": (torch.randn(16, 16), "activation")}
    for factor, excused in (("0.0", True), ("2.0", False), ("(x == x)", False)):
        task = make_task(tmp_path / factor, reference.format(factor), values)
        made = maker(task)
        case = made.make("nan")
        nan = case.exact[0].isnan()
        assert nan.any() and torch.equal(case.excused[0], nan & excused)
        dropped = torch.where(nan, 0.0, case.eager[0])
        assert made.check(case, case.eager).ok and made.check(case, [dropped]).ok == excused
    assert maker(task).make("normal").excused == []
