"""Every way a kernel can fail ends as a verdict with the right status and a reason that can be quoted."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from judge_tasks import MERGED, linears_task, make_task, rms_task, write_kernel

from autokernel.judge import Judge, TaskError, TaskJudge
from autokernel.judge.launch import LOG_HEAD, LOG_TAIL, Deadlines
from autokernel.judge.stages import STAGES

GOOD = """
def kernel_fn(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
"""


@pytest.fixture(scope="module")
def judge(cpu_judge: Judge) -> Judge:
    return cpu_judge


@pytest.fixture(scope="module")
def norm(judge: Judge, tmp_path_factory) -> Iterator[TaskJudge]:
    with judge.open(rms_task(tmp_path_factory.mktemp("norm"))) as tj:
        judge.launcher.deadlines = Deadlines(compile_s=4, run_s=4)
        yield tj
        judge.launcher.deadlines = Deadlines()


def wrap(body: str, first: str = "") -> str:
    """A correct kernel with ``body`` run at each call and ``first`` at import."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    call = "torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)"
    return f"{first}\ndef kernel_fn(x, weight):\n    y = {call}\n{lines}    return y\n"


FAILURES = {
    # could not be loaded
    "syntax": ("def kernel_fn(x:\n", "compile_error", r"line 3"),
    "no entry point": ("def other(x, weight): return x\n", "compile_error", "kernel_fn"),
    "missing name": ("from torch import nothing_here\n" + GOOD, "compile_error", "nothing_here"),
    "raises at import": ("raise ValueError('boom')\n" + GOOD, "compile_error", "ValueError: boom"),
    "exits at import": ("__import__('os')._exit(0)\n" + GOOD, "crash", "exit code 0.* while loading"),
    "unknown backend": ('BACKEND = "abacus"\n' + GOOD, "compile_error", "abacus"),
    "imports os": ("import os\n" + GOOD, "rejected", "imports os"),
    # could not be run
    "raises": (wrap("raise ValueError('boom')"), "crash", r"ValueError: boom[\s\S]*kernel"),
    "arity": ("def kernel_fn(x): return x\n", "crash", "TypeError"),
    "sys.exit": (wrap("raise SystemExit(0)"), "crash", "SystemExit"),
    "exit 0": (wrap("__import__('os')._exit(0)"), "crash", "exit code 0.* while running"),
    "segfault": (wrap("ctypes.string_at(0)", "import ctypes"), "crash", "SIGSEGV"),
    "hangs": (wrap("while True: pass"), "timeout", r"within 4 s while running \(in kernel_fn, \S+:\d+\)"),
    "hangs in native code": (wrap("ctypes.CDLL(None).sleep(600)", "import ctypes"), "timeout", "4 s"),
    # wrong form
    "returns nothing": (wrap("y = None"), "incorrect", "NoneType"),
    "returns a dict": (wrap("y = {'y': y}"), "incorrect", "dict"),
    "returns two": (wrap("y = (y, y)"), "incorrect", "returns 2 tensors, the reference returns 1"),
    "shape": (wrap("y = y.reshape(-1)"), "incorrect", r"shape \[16384\]"),
    "dtype": (wrap("y = y.double()"), "incorrect", "float64, the reference's is float32"),
    "stride order": (wrap("y = y.T.contiguous().T"), "incorrect", "order"),
    "broadcast": (wrap("y = y[:1].expand(64, 256)"), "incorrect", "broadcast"),
    "subclass": (
        wrap("y = y.as_subclass(Lazy)", "class Lazy(torch.Tensor): pass"), "incorrect", "Lazy, not a tensor",
    ),
    "returns its input": (wrap("y = x.copy_(y)"), "incorrect", "not freshly allocated"),
    "one static buffer": (
        wrap("y = OUT.copy_(y)", "OUT = torch.empty(64, 256)"), "incorrect", "kept by the kernel",
    ),
    # wrong values
    "zeros": (wrap("y = torch.zeros_like(y)"), "incorrect", "eager's own"),
    "bf16 inside": (wrap("y = y.bfloat16().float()"), "incorrect", "eager's own"),
    "no eps": (
        "def kernel_fn(x, w): return x * torch.rsqrt(x.square().mean(-1, True)) * w\n", "incorrect", "own",
    ),
    "no weight": (
        "def kernel_fn(x, w): return torch.nn.functional.rms_norm(x, (256,), None, 1e-5)\n",
        "incorrect", "own",
    ),
    "NaN": (wrap("y[3, 4] = float('nan')"), "incorrect", r"NaN; element \[3, 4\]"),
    "half unwritten": (wrap("z = torch.empty_like(y)\nz[:32] = y[:32]\ny = z"), "incorrect", "NaN|own"),
    "answer by address": (
        wrap("y = SEEN.setdefault(x.data_ptr(), y).clone()", "SEEN = {}"), "incorrect", "eager's own",
    ),
    "stale weights": (
        "W = []\ndef kernel_fn(x, w):\n    W.append(w.clone())\n"
        "    return torch.nn.functional.rms_norm(x, (256,), W[0], 1e-5)\n",
        "incorrect", "weights changed in place",
    ),
    "stale prepack": (
        "W = []\ndef prepack(w):\n    W.append(w.clone())\n    return (W[0],)\n" + GOOD,
        "incorrect", "weights changed in place",
    ),
    "prints without end": (wrap("print('x' * (1 << 20))"), "crash", "^prints more than 16 MB: BrokenPipe"),
    # cheats
    "changes its input": (wrap("x.add_(1)"), "rejected", "changes its input 'x'"),
    "changes a weight": (wrap("weight.mul_(1.001)"), "rejected", "changes its input 'weight'"),
    "threads": (wrap("torch.set_num_threads(1)"), "rejected", "torch.get_num_threads: 2 -> 1"),
    "random state": (wrap("torch.rand(1)"), "rejected", "random state"),
    "default dtype": (wrap("", "torch.set_default_dtype(torch.float64)"), "rejected", "get_default_dtype"),
    "forged reply": (wrap("__import__('os').write(4, b'x' * 32)"), "rejected", "channel"),
    "patched clock": (
        wrap("", "T = __import__('time')\nP = T.perf_counter\nT.perf_counter = lambda: P() / 4"),
        "rejected", "the judge's own clock saw",
    ),
    "stops working once timed": (
        wrap("N.append(0)\nif len(N) > 60: y = LAST[0].clone()\nLAST[:] = [y.clone()]", "N, LAST = [], []"),
        "incorrect", "in a timed call",
    ),
    "dies once timed": (
        wrap("N.append(0)\nif len(N) > 300: __import__('os').abort()", "N = []"),
        "crash", "SIGABRT.* while (being timed|warming up)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_failures(norm: TaskJudge, tmp_path: Path, name: str) -> None:
    body, status, reason = FAILURES[name]
    if name == "threads" and norm.owner.threads != 2:
        reason = "torch.get_num_threads"
    verdict = norm.judge(write_kernel(tmp_path, body))
    assert verdict.status == status, verdict
    assert re.search(reason, verdict.reason), verdict.reason
    assert verdict.latency_us is None and verdict.vs_eager is None
    assert not list(verdict.stages.values())[-1][0]
    assert "/autokernel/judge/" not in verdict.reason


def test_a_good_kernel_still_passes_after_all_of_them(norm: TaskJudge, tmp_path: Path) -> None:
    verdict = norm.judge(write_kernel(tmp_path, GOOD))
    assert verdict.status in ("keep", "discard"), verdict
    assert verdict.error_ratio is not None and 0 < verdict.error_ratio < 10
    assert verdict.latency_us and verdict.vs_eager and verdict.vs_eager.pairs == 30
    assert set(verdict.stages) == set(STAGES)
    assert verdict.vs_compile is not None or "compile" in norm.baseline_failures


def test_promotion_tries_more(norm: TaskJudge, tmp_path: Path) -> None:
    good = write_kernel(tmp_path, GOOD)
    verdict = norm.judge(good, parent=good, tier="promote")
    assert verdict.correct and verdict.vs_parent and verdict.vs_parent.pairs == 100, verdict
    assert verdict.stages["correctness"][1].startswith("26 cases")
    assert "the parent" in verdict.reason


@pytest.mark.parametrize(
    "body, reason",
    [
        (
            "def kernel_fn(x, w):\n    x = x.as_strided((64, 256), (256, 1))\n"
            "    return torch.nn.functional.rms_norm(x, (256,), w, 1e-5)\n",
            "padded rows",
        ),
        (
            "def kernel_fn(x, w):\n    x = x.as_strided(x.shape, x.stride(), x.storage_offset() // 64 * 64)\n"
            "    return torch.nn.functional.rms_norm(x, (256,), w, 1e-5)\n",
            "offset view",
        ),
        ("def kernel_fn(x, w):\n    return x / x.std(-1, keepdim=True, unbiased=False) * w\n", "inputs"),
    ],
)
def test_promotion_catches_what_the_screen_may_not(norm: TaskJudge, tmp_path: Path, body, reason) -> None:
    verdict = norm.judge(write_kernel(tmp_path, body), tier="promote")
    assert verdict.status == "incorrect" and reason in verdict.reason, verdict


def test_megabytes_of_output_are_bounded(norm: TaskJudge, tmp_path: Path) -> None:
    noisy = "N = []\n" + wrap("N.append(0)\nif len(N) < 40: print('noise ' * 20000)\n")
    verdict = norm.judge(write_kernel(tmp_path, noisy))
    assert verdict.correct, verdict
    assert "noise" in verdict.log and len(verdict.log) <= LOG_HEAD + LOG_TAIL


def test_no_secret_reaches_a_candidate(norm: TaskJudge, tmp_path: Path) -> None:
    body = wrap("raise RuntimeError(' '.join(sorted(__import__('os').environ)))")
    verdict = norm.judge(write_kernel(tmp_path, body))
    names = verdict.reason.split()
    assert "TMPDIR" in names and "PATH" in names
    assert not [n for n in names if "KEY" in n or "TOKEN" in n]


def test_a_slow_correct_kernel_is_discarded(norm: TaskJudge, tmp_path: Path) -> None:
    verdict = norm.judge(write_kernel(tmp_path, wrap("for _ in range(20): y = y + 0")))
    assert verdict.status == "discard" and "not above" in verdict.reason
    assert verdict.vs_eager is not None and verdict.vs_eager.ratio < 1


def test_a_kernel_with_a_bom_and_windows_line_ends(norm: TaskJudge, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    text = 'import torch\nBACKEND = "torch"\n' + GOOD
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert norm.judge(path).correct


@pytest.mark.parametrize("make", ["folder", "binary", "huge", "missing"])
def test_what_is_no_kernel_file(norm: TaskJudge, tmp_path: Path, make: str) -> None:
    path = tmp_path / "kernel.py"
    if make == "folder":
        path.mkdir()
    elif make == "binary":
        path.write_bytes(bytes(range(256)))
    elif make == "huge":
        path.write_bytes(b"#" * (2 << 20))
    verdict = norm.judge(path)
    assert verdict.status == "compile_error" and verdict.reason, verdict


def test_the_baseline_is_started_again_if_it_died(norm: TaskJudge, tmp_path: Path) -> None:
    norm.owner.launcher.deadlines = Deadlines()
    assert norm._baseline is not None
    os.killpg(norm._baseline.process.pid, signal.SIGKILL)
    while norm._baseline.alive:
        time.sleep(0.05)
    assert norm.judge(write_kernel(tmp_path, GOOD)).correct


def test_one_static_buffer_is_noticed_where_one_call_is_a_sample(judge: Judge, tmp_path: Path) -> None:
    body = wrap("y = OUT.copy_(y)", "OUT = torch.empty(4096, 1024)")
    with judge.open(rms_task(tmp_path / "task", 4096, 1024)) as long:
        assert (long.inputs.count, long.inputs.timed) == (2, 1)
        assert long.judge(write_kernel(tmp_path, GOOD)).correct
        verdict = long.judge(write_kernel(tmp_path, body, "static.py"))
    assert verdict.status == "incorrect" and "kept by the kernel" in verdict.reason, verdict


def test_merged_linears_with_prepack(judge: Judge, tmp_path: Path) -> None:
    with judge.open(linears_task(tmp_path / "task")) as tj:
        verdict = tj.judge(write_kernel(tmp_path, MERGED), tier="promote")
        assert verdict.correct, verdict
        assert verdict.stages["weights"] == (True, "")
        wrong = MERGED.replace("cat([wa, wb])", "cat([wb, wa])")
        assert tj.judge(write_kernel(tmp_path, wrong)).status == "incorrect"
        swapped = MERGED.replace("return a.contiguous()", "return b.contiguous()")
        assert "shape" in tj.judge(write_kernel(tmp_path, swapped)).reason


COMPLEX = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, freqs, index, mask):
        z = torch.view_as_complex(x.float().contiguous().reshape(*x.shape[:-1], -1, 2)) * freqs
        y = torch.view_as_real(z).flatten(-2).type_as(x)
        y = y[index].masked_fill(mask, float("-inf"))
        return y, z, y.argmax(-1), mask & (y > 0)
"""
COMPLEX_KERNEL = COMPLEX.split("class Model")[0].replace("from torch import nn", "") + (
    'BACKEND = "torch"\ndef kernel_fn(x, freqs, index, mask):\n'
    + COMPLEX.split("def forward(self, x, freqs, index, mask):\n")[1].replace("        ", "    ")
)


def test_complex_integer_and_boolean_tensors(judge: Judge, tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(0)
    inputs = {
        "x": (torch.randn(32, 16, generator=gen).half().T.contiguous().T, "activation"),
        "freqs": (torch.polar(torch.ones(8), torch.rand(8, generator=gen)), "buffer"),
        "index": (torch.randint(0, 32, (20,), generator=gen), "activation"),
        "mask": (torch.rand(20, 16, generator=gen) < 0.3, "constant"),
    }
    task = make_task(tmp_path / "t", COMPLEX, inputs, high={"index": 32})  # type: ignore[arg-type]
    with judge.open(task) as tj:
        verdict = tj.judge(write_kernel(tmp_path, COMPLEX_KERNEL), tier="promote")
        assert verdict.correct, verdict
        for old, new, reason in (
            ("* freqs", "* freqs.conj()", "output 0"),
            ("y.argmax(-1)", "y.argmin(-1)", "output 2"),
            ("mask & (y > 0)", "mask & (y < 0)", "output 3"),
            ('float("-inf")', "-1e4", "-inf"),
        ):
            broken = tj.judge(write_kernel(tmp_path, COMPLEX_KERNEL.replace(old, new)))
            assert broken.status == "incorrect" and reason in broken.reason, broken


def test_a_task_that_can_not_be_judged_says_why(judge: Judge, tmp_path: Path) -> None:
    task = rms_task(tmp_path / "a")
    (task.dir / "reference.py").write_text("class Model: pass\n")
    with pytest.raises(TaskError, match="does not run"):
        judge.open(task)
    task = rms_task(tmp_path / "b")
    task.outputs[0] = task.inputs[1]
    with pytest.raises(TaskError, match=r"task\.json"):
        judge.open(task)


def test_below_the_roofline_is_flagged_on_a_cpu(judge: Judge, tmp_path: Path) -> None:
    task = rms_task(tmp_path / "a")
    task.roofline_us = 1e6
    with judge.open(task) as tj:
        verdict = tj.judge(write_kernel(tmp_path, GOOD))
        assert verdict.correct and "below the roofline" in verdict.stages["timing"][1]


def test_everything_is_gone_after_close(tmp_path: Path) -> None:
    with Judge("cpu", scratch=tmp_path) as judge:
        with judge.open(rms_task(tmp_path / "task")) as tj:
            assert tj._baseline is not None
            pid, shared = tj._baseline.process.pid, Path("/dev/shm") / judge.scratch.name
        scratch = judge.scratch
    assert not scratch.exists() and not shared.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_reason_is_the_kernels_own_trace(norm: TaskJudge, tmp_path: Path) -> None:
    body = "def helper(x):\n    return x.nothing\n\ndef kernel_fn(x, weight):\n    return helper(x)\n"
    reason = norm.judge(write_kernel(tmp_path, body)).reason
    assert reason.startswith("AttributeError") and "in helper" in reason and "x.nothing" in reason
    for body in ("kernel_fn = 3\n", "from torch import nothing as kernel_fn\n"):
        verdict = norm.judge(write_kernel(tmp_path, body))
        assert verdict.status == "compile_error"
        assert "load_kernel" not in verdict.reason and "importlib" not in verdict.reason, verdict.reason
