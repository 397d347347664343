"""Fresh contents for every round, and which outputs are too far from eager's to be rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judge_tasks import rms_task
from torch import Tensor

from autokernel.judge.buffers import InputBuffers, OutputBuffers
from autokernel.judge.cases import CaseMaker
from autokernel.judge.compare import Measures, error_of
from autokernel.judge.contents import SUSPECTS, Contents, suspects
from autokernel.judge.inputs import InputSource, spec_of
from autokernel.judge.layout import TensorSpec
from autokernel.judge.subjects import load_reference

CPU = torch.device("cpu")


@pytest.fixture
def contents(tmp_path: Path) -> Contents:
    task = rms_task(tmp_path / "task")
    maker = CaseMaker(InputSource(task, CPU), load_reference(task.dir / "reference.py", CPU))
    inputs = InputBuffers(task, [spec_of(p) for p in task.inputs], (5, 5), CPU, tmp_path, ipc=False)
    bases = [maker.make("normal").inputs for _ in range(2)]
    inputs.write_statics(bases[0])
    return Contents(inputs, maker, bases)


def test_no_call_sees_what_another_has_seen(contents: Contents) -> None:
    seen: list[Tensor] = [base[0] for base in contents.bases]
    for _ in range(4):
        contents.deal()
        for slot in range(5):
            x, weight = (contents.inputs.arena.view(s) for s in contents.inputs.slots[slot])
            assert torch.equal(weight, contents.bases[0][1])
            assert torch.equal(x, contents.values[slot][0]) and abs(float(x.std()) - 1) < 0.1
            assert not any(torch.equal(x, old) for old in seen)
            seen.append(x.clone())


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
