"""Whose code a candidate's time is spent in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from judge_tasks import RMS_NORM, make_task, write_kernel

from autokernel.backends import cpp_backend
from autokernel.judge import Judge
from autokernel.judge.trace import _undisturbed, classify, record

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRITON = "@triton.jit\ndef rms_norm(X):\n    pass\n\ndef kernel_fn(x):\n    rms_norm[(1,)](x)\n"
CUDA_CPP = "__global__ void __launch_bounds__(256)\n  my_softmax(float* x) {}\n"


def told(parts: dict[str, float], time_us: float = 0.0, ops: int = 1) -> str:
    return json.dumps({"time_us": time_us or sum(parts.values()), "parts": parts, "ops": ops})


@pytest.mark.parametrize(
    ("parts", "source", "label"),
    [
        ({"rms_norm": 10.0}, TRITON, "custom"),
        ({"rms_norm_0d1d": 10.0}, TRITON, "custom"),
        ({"void my_softmax<128>(float*)": 10.0}, CUDA_CPP, "custom"),
        ({"rms_norm": 10.0, "nvjet_hsh_128x64": 5.0}, TRITON, "mixed"),
        ({"sm90_xmma_gemm_f16f16": 10.0}, TRITON, "library"),
        ({"void at::native::rms_norm<float>(int)": 10.0}, TRITON, "library"),  # a name that it has, too
        ({"triton_poi_fused_add_0": 10.0}, TRITON, "library"),
        ({"rms_norm": 100.0, "Memset (Device)": 1.0}, TRITON, "custom"),
    ],
)  # fmt: skip
def test_device_kernels_are_told_apart_by_name(parts: dict[str, float], source: str, label: str) -> None:
    assert classify(told(parts), source, CUDA)[0] == label


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"time_us": 1, "parts": {"a": "b"}, "ops": 1}',
     '{"time_us": NaN, "parts": {}, "ops": 0}',
     '{"time_us": 1, "parts": {"a": -1}, "ops": 1}', '{"time_us": 1, "parts": {}, "ops": 1e400}',
     '{"time_us": 0, "parts": {}, "ops": 0}'],
)  # fmt: skip
def test_an_account_that_makes_no_sense_is_no_label(text: str) -> None:
    assert classify(text, TRITON, CUDA)[0] is None


def test_on_a_cpu_what_is_in_no_torch_op_is_its_own() -> None:
    x = torch.randn(512, 512)
    own = cpp_backend.load_source(
        'extern "C" void burn(float* x) { for (int r = 0; r < 40; ++r)'
        " for (int i = 0; i < 262144; ++i) x[i] = x[i] * 0.5f + 1.0f; }"
    ).function("burn", pointers=1)

    def library(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    def custom(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        own(y.data_ptr())
        return y

    def mixed(x: torch.Tensor) -> torch.Tensor:
        custom(x)
        return x @ x

    for fn in (library, custom, mixed):
        fn(x)
        told = []
        for _ in range(8):  # a busy machine may spoil some; a wrong rule, all of them
            told.append(classify(record(fn, (x,), CPU), "", CPU))
            if told[-1][0] == fn.__name__:
                break
        assert told[-1][0] == fn.__name__, told


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_what_disturbs_a_call_is_nobodys(disturbed: int) -> None:
    """Ten calls of a custom kernel that allocates its output; in each a pause of 5 ms somewhere else."""
    calls = []
    for number in range(10):
        op, own = 1.0, 5000.0
        if number != disturbed:
            op, own = (op + 5000.0, own) if number % 2 else (op, own + 5000.0)
        calls.append((op + own, [("aten::empty_like", op)]))
    calls[disturbed] = (12000.0, [("aten::empty_like", 1.0)])
    assert classify(_undisturbed(calls), "", CPU)[0] == "custom"


def test_only_a_promoted_kernel_is_labelled(tmp_path: Path, cpu_judge: Judge) -> None:
    x, w = torch.randn(256, 1024), torch.randn(1024)
    task = make_task(tmp_path, RMS_NORM, {"x": (x, "activation"), "w": (w, "parameter")})
    source = "def kernel_fn(x, w):\n    return torch.nn.functional.rms_norm(x, (1024,), w, 1e-5)\n"
    with cpu_judge.open(task) as judge:
        kernel = write_kernel(tmp_path, source)
        assert judge.judge(kernel).provenance is None
        verdict = judge.judge(kernel, tier="promote")
    assert verdict.correct and verdict.provenance == "library", verdict
