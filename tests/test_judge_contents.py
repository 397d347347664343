"""Fresh contents for every round, and which outputs are too far from eager's to be rounding."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from judge_tasks import make_task, rms_task
from torch import Tensor

from autokernel.judge.buffers import InputBuffers, OutputBuffers
from autokernel.judge.cases import CaseMaker
from autokernel.judge.compare import Measures, error_of
from autokernel.judge.contents import SUSPECTS, Contents, suspects
from autokernel.judge.inputs import InputSource, spec_of
from autokernel.judge.layout import TensorSpec, raw
from autokernel.judge.subjects import load_reference

CPU = torch.device("cpu")


@pytest.fixture
def contents(tmp_path: Path) -> Contents:
    task = rms_task(tmp_path / "task")
    maker = CaseMaker(InputSource(task, CPU), load_reference(task.dir / "reference.py", CPU))
    inputs = InputBuffers(task, [spec_of(p) for p in task.inputs], (5, 5), CPU, tmp_path, ipc=False)
    statics = maker.make("normal").inputs
    inputs.write_statics(statics)
    return Contents(inputs, maker, statics)


def test_no_call_sees_what_another_has_seen(contents: Contents) -> None:
    """Not in another order either: hardly an element is to be found in what has been there before."""
    statics = contents.values[0][1].clone()
    seen: list[Tensor] = [contents.maker.make("normal").inputs[0]]
    for _ in range(4):
        contents.deal()
        for slot in range(5):
            x, weight = (contents.inputs.arena.view(s) for s in contents.inputs.slots[slot])
            assert torch.equal(weight, statics)
            assert torch.equal(x, contents.values[slot][0])
            assert abs(float(x.std()) - 1) < 0.1 and abs(float(x.mean())) < 0.1
            assert not any(float(torch.isin(x, old).float().mean()) > 0.01 for old in seen)
            seen.append(x.clone())


KINDS: dict[str, Tensor] = {
    "float32": torch.zeros(40, 200), "bfloat16": torch.zeros(40, 200, dtype=torch.bfloat16),
    "float64": torch.zeros(40, 200, dtype=torch.float64),
    "float16": torch.zeros(300, 999, dtype=torch.float16),
    "complex64": torch.zeros(30, 200, dtype=torch.complex64), "empty": torch.zeros(0, 3),
    "float8_e4m3fn": torch.zeros(40, 200).to(torch.float8_e4m3fn), "transposed": torch.zeros(200, 40).t(),
    "broadcast": torch.zeros(1, 200).expand(40, 200), "scalar": torch.zeros(()),
    "booleans": torch.zeros(90, 90, dtype=torch.bool), "few integers": torch.arange(6).view(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_is_dealt_with(kind: str, tmp_path: Path) -> None:
    like = KINDS[kind]
    reference = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.clone()\n"
    )
    high: dict[str, int] = {} if like.dtype.is_floating_point or like.dtype.is_complex else {"x": 50}
    task = make_task(tmp_path / "task", reference, {"x": (like, "activation")}, captured=(), high=high)
    maker = CaseMaker(InputSource(task, CPU), load_reference(task.dir / "reference.py", CPU))
    inputs = InputBuffers(task, [spec_of(p) for p in task.inputs], (3, 3), CPU, tmp_path, ipc=False)
    contents = Contents(inputs, maker, maker.make("normal").inputs)
    rounds = []
    for _ in range(2):
        contents.deal()
        assert contents.changed() == ""
        rounds.append([contents.values[slot][0].clone() for slot in range(3)])
    assert all((v.shape, v.stride()) == (like.shape, like.stride()) for (v,) in contents.values)
    for values in (rounds[0], rounds[1], [a[0] for a in rounds]):
        if like.numel() > 6:
            assert not any(torch.equal(raw(a), raw(b)) for a, b in itertools.pairwise(values))
    if like.numel() > 6 and not high:
        number = torch.stack([v.to(torch.complex64) for v in rounds[0]])
        assert 0.85 < float(number.abs().square().mean().sqrt()) < 1.15


def test_the_answer_for_a_slot_is_that_of_its_contents(contents: Contents) -> None:
    contents.deal()
    case = contents.case(3)
    x, weight = contents.values[3]
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(case.exact[0], exact, rtol=1e-12, atol=1e-12)


def test_a_changed_input_is_named(contents: Contents) -> None:
    contents.deal()
    assert contents.changed() == "" and contents.changed(statics=True) == ""
    x, weight = (contents.inputs.arena.view(s) for s in contents.inputs.slots[4])
    before = weight.clone()
    weight[0] += 1
    assert contents.changed() == "" and contents.changed(statics=True) == "weight"
    weight.copy_(before)
    x[1, 2] = float("nan")
    assert contents.changed() == "x"


SLOTS = 6


def rows(tmp_path: Path, *values: Tensor) -> tuple[OutputBuffers, Tensor]:
    """Output areas with ``values`` (one tensor per output) in every slot, and their bytes."""
    buffers = OutputBuffers([TensorSpec.of(v) for v in values], SLOTS, CPU, tmp_path, ipc=False)
    for slot in range(SLOTS):
        for view, value in zip(buffers.outputs(slot), values, strict=True):
            view.copy_(value)
    return buffers, buffers.rows().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_rounding_is_no_suspect_and_a_mistake_is(dtype: torch.dtype, tmp_path: Path) -> None:
    exact = torch.randn(33, 47, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    e0 = error_of(exact.to(dtype), exact)
    buffers, eager = rows(tmp_path, exact.to(dtype))
    assert suspects(buffers, eager, eager, SLOTS, [e0]) == []
    for slot in range(SLOTS):
        noise = 1 + 0.5 * e0.frobenius * torch.randn(33, 47, dtype=torch.float64)
        buffers.outputs(slot)[0].copy_((exact * noise).to(dtype))
    assert suspects(buffers, buffers.rows().clone(), eager, SLOTS, [e0]) == []
    buffers.outputs(2)[0][7, 9] += 1.0
    buffers.outputs(4)[0].mul_(1.5)
    assert suspects(buffers, buffers.rows().clone(), eager, SLOTS, [e0]) == [4, 2]
    assert suspects(buffers, buffers.rows().clone(), eager, 3, [e0]) == [2]


def test_what_is_not_a_number_is_a_suspect_unless_eager_has_it_too(tmp_path: Path) -> None:
    value = torch.randn(8, 16)
    value[3, 3] = float("nan")
    buffers, eager = rows(tmp_path, value)
    e0 = [Measures(1e-7, 1e-7, 1e-7)]
    assert suspects(buffers, eager, eager, SLOTS, e0) == []
    buffers.outputs(1)[0][0, 0] = float("inf")
    buffers.outputs(5)[0][3, 3] = 0.0
    assert sorted(suspects(buffers, buffers.rows().clone(), eager, SLOTS, e0)) == [1, 5]


def test_where_eager_is_exact_every_difference_is_a_suspect(tmp_path: Path) -> None:
    moved, index = torch.randn(4, 4), torch.arange(6)
    buffers, eager = rows(tmp_path, moved, index, torch.zeros(3, dtype=torch.bool))
    zero = [Measures()] * 3
    assert suspects(buffers, eager, eager, SLOTS, zero) == []
    buffers.outputs(0)[0][0, 0] *= 1 + 2e-7
    buffers.outputs(1)[1][5] = 4
    buffers.outputs(2)[2][1] = True
    assert sorted(suspects(buffers, buffers.rows().clone(), eager, SLOTS, zero)) == [0, 1, 2]
    for slot in range(SLOTS):
        buffers.outputs(slot)[1][: slot + 1] = -1
    found = suspects(buffers, buffers.rows().clone(), eager, SLOTS, zero)
    assert len([s for s in found if s >= SLOTS - SUSPECTS]) == SUSPECTS  # the worst ones at least
