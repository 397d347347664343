"""The whole command on a small model on the CPU, with the real judge: a run, a resumed run, a stopped run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from autokernel.results import read_results

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow

MODEL = """\
import math

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


def build():
    return nn.Sequential(Block(), Block()).eval()


def example_inputs(model):
    return (torch.randn(1, 256, 64),)
"""


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "autokernel", *arguments, "--run", str(folder / "run")]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def optimize(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = command(folder, "optimize", str(folder / "model.py"), "--device", "cpu", "--top", "2", *arguments)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment(), timeout=900)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_optimize_and_go_on(model: Path) -> None:
    first = optimize(model, "--max-experiments", "2", "--json")
    assert first.returncode == 0, first.stderr
    data = json.loads(first.stdout)
    rows = read_results(model / "run")
    assert {"eager"} <= {r.backend for r in rows if r.task == "model" and r.status == "baseline"}
    kernels = [r for r in rows if r.candidate and r.task != "model"]
    assert len(kernels) == 2
    assert any("final" in r.strategy for r in rows if r.backend == "autokernel")
    assert data["run"] == str(model / "run") and data["baselines"]
    assert {p.name for p in (model / "run").iterdir()} >= {
        "run.json",
        "results.tsv",
        "profile.json",
        "tasks",
        "report.md",
    }

    again = optimize(model, "--max-experiments", "4")
    assert again.returncode == 0, again.stderr
    assert again.stdout.rstrip().endswith(str(model / "run")), "the last line is the run folder"
    more = read_results(model / "run")
    assert more[: len(rows)] == rows, "nothing that was there is touched"
    assert len({r.candidate for r in more if r.candidate and r.task != "model"}) > 2
    known = {(r.task, r.backend) for r in rows if r.status == "baseline" and r.task != "model"}
    fresh = [r for r in more[len(rows) :] if r.status == "baseline"]
    assert not [r for r in fresh if (r.task, r.backend) in known], "a region's baselines are measured once"
    # The whole model's are measured again: the best of them has to be the best beside the result.
    assert "eager" in {r.backend for r in fresh if r.task == "model"}

    other = optimize(model, "--dtype", "float64")
    assert other.returncode == 2 and "--dtype none, not float64" in other.stderr

    report = subprocess.run(
        [sys.executable, "-m", "autokernel", "report", str(model / "run")],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert report.returncode == 0 and "Whole model" in report.stdout


def test_ctrl_c_finishes_the_row_and_says_how_to_go_on(model: Path) -> None:
    words = command(model, "optimize", str(model / "model.py"), "--device", "cpu", "--top", "2")
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    journal = model / "run" / "results.tsv"
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and child.poll() is None:
        if journal.exists() and journal.read_text().count("\n") > 4:
            break
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130, err
    assert "Traceback" not in err and "to go on:" in err
    assert f"--run {model / 'run'}" in err.rstrip().splitlines()[-1]
    rows = read_results(model / "run")
    assert journal.read_bytes().endswith(b"\n")
    assert not [r for r in rows if r.status in ("crash", "infra_error")], "the workers were not interrupted"
