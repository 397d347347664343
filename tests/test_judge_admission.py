"""Tasks that prove nothing are refused before a kernel is tried; what models hold is admitted."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from judge_tasks import LINEARS, RMS_NORM, linears_task, make_task, rms_task
from small_models import SMALL, graphs_of, small

from autokernel.extraction import extract
from autokernel.hardware import Ceilings
from autokernel.judge import Judge, TaskError, admission
from autokernel.judge.cases import CaseMaker
from autokernel.judge.inputs import InputSource
from autokernel.judge.subjects import load_reference
from autokernel.profiling import profile
from autokernel.records import Task

CPU = torch.device("cpu")
Inputs = dict[str, tuple[torch.Tensor, str]]


def maker_of(task: Task) -> CaseMaker:
    return CaseMaker(InputSource(task, CPU), load_reference(task.dir / "reference.py", CPU))


def refusal(folder: Path, body: str, inputs: Inputs, **fields: object) -> str:
    """What admission says of ``forward(self, <inputs>): <body>``."""
    text = f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\nclass Model(nn.Module):\n    def forward(self, {', '.join(inputs)}):\n        {body}\n"  # noqa: E501
    return admission.refusal(maker_of(make_task(folder, text, inputs, **fields)))  # type: ignore[arg-type]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def activation(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, str]:
    return normal(*shape, dtype=dtype), "activation"


def parameter(value: torch.Tensor) -> tuple[torch.Tensor, str]:
    return value, "parameter"


# --- admitted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_what_is_cut_out_of_the_shipped_models_is_admitted(name: str, tmp_path: Path) -> None:
    loaded = small(name, tmp_path)
    found = profile(loaded, graphs_of(loaded), ceilings=Ceilings(1e11, {"float32": 1e12}))
    tasks = extract(found, tmp_path / "run", starter=lambda task, gm: None)
    assert {"attention", "linear", "norm", "embedding"} <= {t.family for t in tasks}
    assert {t.name: admission.refusal(maker_of(t)) for t in tasks} == {t.name: "" for t in tasks}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_judges_own_tasks_are_admitted(tmp_path: Path, dtype: torch.dtype) -> None:
    assert admission.refusal(maker_of(rms_task(tmp_path / "norm", dtype=dtype))) == ""
    assert admission.refusal(maker_of(linears_task(tmp_path / "linears"))) == ""


X, Y = activation(8, 64), (normal(8, 64) * 0.5 + 1, "activation")
TOKENS = (torch.arange(12).reshape(1, 12) % 7, "activation")
SCORES, VALUES = activation(2, 16, 16), activation(2, 16, 64)
CAUSAL = (torch.ones(16, 16, dtype=torch.bool).tril(), "constant")
KEPT = (torch.ones(2, 16, 16, dtype=torch.bool).tril(), "activation")
ADMITTED: dict[str, tuple[str, Inputs]] = {
    # pure data movement: a copy is the honest kernel, or has its elements elsewhere
    "contiguous": ("return x.T.contiguous()", {"x": X}),
    "same order": ("return x.clone()", {"x": X}),
    "reshape": ("return x.reshape(4, -1)", {"x": X}),
    "expand": ("return x.expand(3, 8, 64).contiguous()", {"x": X}),
    "cat": ("return torch.cat([x, y], 1)", {"x": X, "y": Y}),
    "slice": ("return x[:, 3:19].contiguous()", {"x": X}),
    "cast": ("return x.half()", {"x": X}),
    "look-up": ("return F.embedding(tokens, w)", {"tokens": TOKENS, "w": parameter(normal(7, 32))}),
    # a residual that is handed on, beside something that is computed
    "residual": ("return x, F.layer_norm(x, (64,), w)", {"x": X, "w": parameter(torch.ones(64))}),
    # parts of an input without influence
    "causal mask": (
        "return torch.softmax(s.masked_fill(~m, -torch.inf), -1) @ v",
        {"s": SCORES, "v": VALUES, "m": CAUSAL},
    ),
    "mask as an activation": (
        "return torch.softmax(s.masked_fill(~m, -torch.inf), -1) @ v", {"s": SCORES, "v": VALUES, "m": KEPT},
    ),
    "rows that are not looked up": (
        "return F.embedding(tokens, w) * 2", {"tokens": TOKENS, "w": parameter(normal(500, 32))},
    ),
    "index buffer": (
        "return x + w[i]", {"x": X, "w": parameter(normal(9, 64)), "i": (torch.arange(8), "buffer")},
    ),
    # small, but seen
    "zero bias": (
        "return F.linear(x, w, b)",
        {"x": X, "w": parameter(normal(32, 64)), "b": parameter(torch.zeros(32))},
    ),
    "scalar loss": (
        "return F.cross_entropy(x, t)", {"x": activation(64, 50), "t": (torch.arange(64) % 50, "activation")},
    ),
    "batch norm": (
        "return F.batch_norm(x, m, v, w)",
        {"x": X, "m": (normal(64), "buffer"), "v": (normal(64).abs() + 0.1, "buffer"),
         "w": parameter(torch.ones(64))},
    ),
    "integers": ("return x.argmax(-1)", {"x": X}),
    "complex": (
        "return torch.view_as_real(torch.view_as_complex(x.reshape(8, 32, 2)) * c).flatten(1)",
        {"x": X, "c": (torch.polar(torch.ones(8, 32), normal(8, 32)), "buffer")},
    ),
    "one possible value": ("return F.embedding(t, w) + x", {
        "x": X, "t": (torch.zeros(8, dtype=torch.int64), "activation"), "w": parameter(normal(1, 64)),
    }),
    "hardly ever true on normal data": ("return x > 6", {"x": activation(256, 256)}),
}  # fmt: skip


@pytest.mark.parametrize("name", ADMITTED)
def test_admitted(name: str, tmp_path: Path) -> None:
    body, inputs = ADMITTED[name]
    high = {"tokens": 7, "t": 1 if name == "one possible value" else 50}
    assert refusal(tmp_path, body, inputs, high=high) == ""


# --- refused ----------------------------------------------------------------------------------------------

ZEROS = parameter(torch.zeros(32, 64))
REFUSED: dict[str, tuple[str, Inputs, str]] = {
    "zeros": ("return (x - x)[:, :4].contiguous()", {"x": X}, "zeros would pass as the output"),
    "a constant": ("return x[:, :4] * 0 + 3", {"x": X}, "a constant would pass as the output"),
    "constant for softmax": ("return torch.softmax(x * 1e-9, -1)", {"x": X}, "a constant would pass"),
    "all true": ("return x < 1e9", {"x": X}, "a constant would pass"),
    "NaN": ("return x * float('nan')", {"x": X}, "the answer to other inputs would pass"),
    "zero weights": (
        "return F.linear(x, w)", {"x": X, "w": ZEROS},
        r"zeros would pass as the output \('w' is all zero\)",
    ),
    "zero weights and a bias": (
        "return F.linear(x, w, b)", {"x": X, "w": ZEROS, "b": parameter(normal(32))},
        r"the answer to other inputs would pass as the output \('w' is all zero\)",
    ),
    "almost a copy": ("return x + 1e-8 * w", {"x": X, "w": Y}, "a copy of 'x' would pass as the output"),
    "almost a broadcast": ("return x + 1e-8 * w", {"x": activation(64), "w": Y}, "a copy of 'x' would pass"),
    "two trivial outputs": (
        "return x * 0, x + 1e-8 * w", {"x": X, "w": Y},
        "zeros would pass as output 0 and a copy of 'x' would pass as output 1",
    ),
    "a quantized copy": (
        "return x.to(torch.float8_e4m3fn).to(x.dtype)", {"x": X}, "would pass as the output",
    ),
    "empty": ("return x[:0]", {"x": X}, "its outputs are empty"),
    "activation without influence": (
        "return torch.relu(x) * 2 + 0 * w", {"x": X, "w": Y}, "the output does not depend on 'w'",
    ),
    "copy beside an input without influence": (
        "return x + 0 * w", {"x": X, "w": Y}, "the output does not depend on 'w'",
    ),
    "parameter without influence": (
        "return torch.relu(x) * 2 + 0 * w, x.exp()", {"x": X, "w": parameter(normal(64))},
        "no output depends on 'w'",
    ),
    "too small to be seen": (
        "return torch.relu(x) * 2 + 1e-12 * w", {"x": X, "w": Y}, "the output does not depend on 'w'",
    ),
    "only its shape": ("return torch.relu(x).expand_as(w) * 2", {"x": X, "w": Y}, "does not depend on 'w'"),
    "two of them": (
        "return torch.relu(x) * 2", {"x": X, "w": Y, "b": parameter(normal(64))}, "on 'w' and 'b'",
    ),
    "whole numbers": (
        "return torch.relu(x) * 2 + 0 * t", {"x": X, "t": (torch.arange(64), "activation")}, "on 't'",
    ),
    "a mask that leaves all": (
        "return torch.where(m | True, x, 0) * 2", {"x": X, "m": (normal(8, 64) > 0, "activation")}, "on 'm'",
    ),
    "an index buffer": (
        "return torch.relu(x) * 2 + 0 * i", {"x": X, "i": (torch.arange(64), "buffer")}, "on 'i'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    body, inputs, reason = REFUSED[name]
    assert re.search(reason, refusal(tmp_path, body, inputs))


def test_a_constant_needs_no_influence(tmp_path: Path) -> None:
    inputs: Inputs = {"x": X, "c": (normal(64), "constant")}
    assert refusal(tmp_path, "return torch.relu(x) * 2 + 0 * c", inputs) == ""


def test_slow_references_are_admitted_by_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SLOW_S", 0.0)
    exact = []
    monkeypatch.setattr(
        admission.oracle, "exact", lambda *a, f=admission.oracle.exact: exact.append(0) or f(*a)
    )
    assert admission.refusal(maker_of(linears_task(tmp_path / "linears"))) == ""
    assert len(exact) == 2, "the two cases, and none per input"
    body = "return torch.relu(x) * 2 + 0 * w"
    assert "'w'" in refusal(tmp_path / "idle", body, {"x": X, "w": Y})


def test_it_costs_little(tmp_path: Path) -> None:
    maker = maker_of(rms_task(tmp_path / "norm"))
    admission.refusal(maker)
    times = [9.0]
    while min(times) >= 0.3 and len(times) <= 20:  # a busy machine may take a few goes
        begin = time.perf_counter()
        assert admission.refusal(maker) == ""
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3


def test_the_judge_refuses_before_it_starts_a_baseline(tmp_path: Path, cpu_judge: Judge) -> None:
    task = make_task(tmp_path, LINEARS, {
        "x": activation(16, 64), "wa": parameter(torch.zeros(8, 64)), "wb": parameter(torch.zeros(4, 64)),
    })  # fmt: skip
    with pytest.raises(TaskError, match="proves nothing: zeros would pass as output 0"):
        cpu_judge.open(task)


def test_reasons_are_one_sentence(tmp_path: Path) -> None:
    task = make_task(tmp_path, RMS_NORM, {"x": X, "weight": parameter(torch.zeros(64))})
    assert admission.refusal(maker_of(task)) == (
        "it proves nothing: zeros would pass as the output ('weight' is all zero)"
    )
