"""The user's own TF32 flags go wherever their model is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from judge_tasks import RMS_NORM

from autokernel.judge import Judge
from autokernel.reference_task import make_task
from autokernel.torch_flags import BY_DEFAULT, Tf32, set_tf32, tf32


@pytest.fixture(autouse=True)
def restored():
    yield
    set_tf32(BY_DEFAULT)


def tells_tf32(args):
    def call(x):
        now = tf32()
        return torch.tensor([now.products, now.convolutions])

    return call


def test_the_defaults_are_torchs() -> None:
    code = "from autokernel.torch_flags import *; assert tf32() == BY_DEFAULT, tf32()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.parametrize("wanted", [Tf32(a, b) for a in (False, True) for b in (False, True)])
def test_set_and_read(wanted: Tf32) -> None:
    set_tf32(wanted)
    assert tf32() == wanted
    assert torch.backends.cuda.matmul.allow_tf32 is wanted.products
    assert torch.backends.cudnn.allow_tf32 is wanted.convolutions
    assert wanted.allows("conv") is wanted.convolutions and wanted.allows("linear") is wanted.products


@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_flags_that_were_set_the_new_way_can_be_read(setting: str) -> None:
    code = (
        "import torch\nfrom autokernel.torch_flags import *\n"
        f"torch.backends.fp32_precision = {setting!r}\n"
        # torch 2.11 lets its default for convolutions stand against the setting above.
        f"torch.backends.cudnn.conv.fp32_precision = {setting!r}\nfound = tf32()\n"
        f"assert found == Tf32({setting == 'tf32'}, {setting == 'tf32'}), found\nset_tf32(found)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_workers_have_the_flags_of_the_task(cpu_judge: Judge) -> None:
    x = torch.ones(4)
    subject = {"kind": "factory", "module": __name__, "function": "tells_tf32", "args": {}}
    for wanted in (BY_DEFAULT, Tf32(True, False)):
        with cpu_judge.spawn(subject, [x], tf32=wanted) as worker:
            assert worker.run([x])[0].tolist() == [wanted.products, wanted.convolutions]


def test_a_reference_is_judged_under_the_flags_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "reference.py"
    flags = "import torch\ntorch.backends.cudnn.allow_tf32 = False\n"
    path.write_text(
        flags + RMS_NORM + "\ndef get_inputs():\n    return [torch.randn(8, 64), torch.randn(64)]\n"
    )
    task = make_task(path, tmp_path / "task", "cpu")
    assert task.tf32 == Tf32(False, False)
