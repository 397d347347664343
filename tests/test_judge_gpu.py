"""The judge on a CUDA device: IPC arenas, CUDA-graph timing, Triton kernels, corrupted contexts."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_tasks import LINEARS, MERGED, make_task, write_kernel

from autokernel.judge import Judge, TaskJudge, clock
from autokernel.judge.launch import Deadlines
from autokernel.judge.stages.timing import WorkerArm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NORM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, weight):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return h.type_as(x) * weight
"""

TRITON = """
import torch
import triton
import triton.language as tl
BACKEND = "triton"

@triton.jit
def rms(X, W, Y, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(X + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(x * x) / N + 1e-5)
    w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + row * N + cols, (x * r).to(Y.dtype.element_ty) * w.to(Y.dtype.element_ty), mask=mask)

def kernel_fn(x, weight):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms[(x.shape[0],)](x, weight, y, x.stride(0), x.shape[1], BLOCK=1024)
    return y
"""
LIBRARY = (
    "def kernel_fn(x, weight):\n    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)\n"
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge("cuda") as j:
        yield j


@pytest.fixture(scope="module")
def norm(judge: Judge, tmp_path_factory) -> Iterator[TaskJudge]:
    x = torch.randn(512, 768).half()
    weight = (1 + 0.1 * torch.randn(768)).half()
    task = make_task(
        tmp_path_factory.mktemp("norm"), NORM,
        {"x": (x, "activation"), "weight": (weight, "parameter")}, family="norm", device="cuda",
    )  # fmt: skip
    with judge.open(task) as tj:
        yield tj


def test_baselines_are_timed_in_cuda_graphs(norm: TaskJudge) -> None:
    print(f"ipc {norm.owner.ipc}, slots {norm.inputs.count}, {norm.baselines}, delta {norm.delta:.4f}")
    assert norm.baseline_failures == {} and norm.graph
    assert norm.inputs.count >= 20
    assert norm.baselines["compile"] < norm.baselines["eager"] < 200
    assert norm.delta < 0.05


@pytest.mark.parametrize("tier", ["screen", "promote"])
def test_a_triton_kernel(norm: TaskJudge, tmp_path: Path, tier) -> None:
    verdict = norm.judge(write_kernel(tmp_path, TRITON), tier=tier)
    print(verdict)
    assert verdict.correct, verdict
    assert verdict.vs_eager is not None and verdict.vs_eager.lower_bound > 1.5
    assert verdict.peak_vram_mb and 0.5 < verdict.peak_vram_mb < 50
    assert "flagged" not in verdict.stages["timing"][1]
    assert re.search(r"SM clock \d+( to \d+)? MHz, .* W, \d+", verdict.stages["timing"][1])
    assert re.match(
        r"rms: \d+ registers, none spilled, \d+ bytes shared, 4 warps", verdict.stages["resources"][1]
    )
    assert "spills" not in verdict.reason


def test_spilled_registers_are_in_the_reason(norm: TaskJudge, tmp_path: Path) -> None:
    """16 Ki elements in one warp's registers are more than it has."""
    kernel = TRITON.replace("BLOCK=1024", "BLOCK=16384, num_warps=1")
    verdict = norm.judge(write_kernel(tmp_path, kernel))
    print(verdict.stages["resources"], verdict.reason)
    assert verdict.correct and re.search(r"; rms spills \d+ registers", verdict.reason), verdict


BROKEN = {
    "wrong eps": (LIBRARY.replace("1e-5", "1e-1"), "incorrect", "eager's own"),
    "does not compile": (TRITON.replace("tl.sqrt", "tl.no_such"), "compile_error", "no_such"),
    "fp8 inside": (LIBRARY.replace("(x, (", "(x.to(torch.float8_e4m3fn).half(), ("), "incorrect", "own"),
    "on the cpu": (LIBRARY.replace("1e-5)", "1e-5).cpu()"), "incorrect", "not on cuda"),
    "illegal access": (TRITON.replace("Y + row * N", "Y + row * N + 2**40"), "crash", "illegal|error"),
    "changes its input": (LIBRARY.replace("return", "x.add_(1)\n    return"), "rejected", "input 'x'"),
    "tf32": ("torch.backends.cuda.matmul.allow_tf32 = True\n" + LIBRARY, "rejected", "precision"),
    "half of it": (TRITON.replace("(x.shape[0],)", "(x.shape[0] // 2,)"), "incorrect", ""),
    "hangs": (LIBRARY.replace("return", "while True: pass\n    return"), "timeout", "no answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_failures_leave_the_next_candidate_alone(norm: TaskJudge, tmp_path: Path, name) -> None:
    body, status, reason = BROKEN[name]
    norm.owner.launcher.deadlines = Deadlines(compile_s=20, run_s=20)
    verdict = norm.judge(write_kernel(tmp_path, body))
    norm.owner.launcher.deadlines = Deadlines()
    assert verdict.status == status, verdict
    assert re.search(reason, verdict.reason), verdict.reason
    assert norm.judge(write_kernel(tmp_path, LIBRARY, "good.py")).correct


def test_a_kernel_that_can_not_be_captured_is_timed_plainly(norm: TaskJudge, tmp_path: Path) -> None:
    body = LIBRARY.replace("return", "torch.cuda.synchronize()\n    return")
    verdict = norm.judge(write_kernel(tmp_path, body))
    assert verdict.correct and "plain launches" in verdict.stages["timing"][1], verdict
    assert "flagged" not in verdict.stages["timing"][1]


def test_the_judges_clock_bears_out_an_honest_claim(norm: TaskJudge, tmp_path: Path) -> None:
    """What an untrusted worker does inside the gate takes as long as what a trusted one does."""
    outputs = norm.candidate_outputs
    worker = norm.start_kernel(write_kernel(tmp_path, LIBRARY), outputs)
    norm.ready(worker, 0)
    candidate = WorkerArm("candidate", worker, 0, outputs=outputs)
    norm.launcher.settle()
    arms = [*norm.baseline_arms(collect=True), candidate]
    rounds = clock.interleave(arms, 40, buffers=norm.inputs.timed, device=norm.device)
    over = {
        name: 1e6 * statistics.median(s.gated_s - s.claimed_s for s in samples)
        for name, samples in rounds.samples.items()
    }
    print({name: f"{us:.0f} us" for name, us in over.items()})
    _, allowed_s = clock.ALLOWANCE["cuda"]  # an honest kernel must fit into it
    assert over["candidate"] < over["eager"] + 1e6 * allowed_s and max(over.values()) < 1500
    worker.close()


def test_equal_kernels_are_not_kept(norm: TaskJudge, tmp_path: Path) -> None:
    good = write_kernel(tmp_path, LIBRARY)
    verdicts = [norm.judge(good, parent=good) for _ in range(5)]
    print([(v.vs_parent.ratio, v.seconds) for v in verdicts if v.vs_parent], norm.delta)
    assert [v.status for v in verdicts].count("keep") == 0


def test_merged_linears(judge: Judge, tmp_path: Path) -> None:
    x, wa, wb = torch.randn(512, 128).half(), torch.randn(96, 128).half(), torch.randn(32, 128).half()
    inputs = {"x": (x, "activation"), "wa": (wa, "parameter"), "wb": (wb, "parameter")}
    task = make_task(tmp_path / "t", LINEARS, inputs, family="sibling_linears", device="cuda")  # type: ignore[arg-type]
    with judge.open(task) as tj:
        assert tj.judge(write_kernel(tmp_path, MERGED), tier="promote").correct
        strided = MERGED.replace("a.contiguous(), b.contiguous()", "a, b")
        verdict = tj.judge(write_kernel(tmp_path, strided, "strided.py"), tier="audit")
        print(verdict.stages["timing"], verdict.stages["audit"])
        assert verdict.correct and "by the kernel's" not in verdict.stages["timing"][1], verdict


def test_without_ipc_everything_goes_through_the_host(tmp_path: Path) -> None:
    x, weight = torch.randn(64, 128).half(), torch.ones(128).half()
    task = make_task(tmp_path, NORM, {"x": (x, "activation"), "weight": (weight, "parameter")}, device="cuda")
    with Judge("cuda", ipc=False) as judge, judge.open(task) as tj:
        assert tj.inputs.arena.kind == "file"
        assert tj.judge(write_kernel(tmp_path, LIBRARY)).correct


def test_short_work_is_timed_near_the_device_clock() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    timer = clock.make_timer([(lambda t: t * 2, (x,))], torch.device("cuda"))
    seconds = timer.sample(0) / timer.calls
    assert timer.mode == "graph" and 128e6 / seconds < 10e12


def free_without_pool(norm: TaskJudge) -> int:
    """Free device memory once the warm workers, of which there are more or fewer at a time, are gone."""
    norm.launcher.use(norm.launcher.guards)
    free = []
    for _ in range(10):
        time.sleep(0.2)
        free.append(torch.cuda.mem_get_info()[0])
    return max(free)


def test_memory_does_not_grow_with_candidates(norm: TaskJudge, tmp_path: Path) -> None:
    good = write_kernel(tmp_path, LIBRARY)
    norm.judge(good)
    before = free_without_pool(norm)
    for _ in range(3):
        norm.judge(good)
    assert before - free_without_pool(norm) < 256 << 20


def in_a_cuda_graph(args: dict[str, Any]) -> Any:
    from autokernel.integrate.cuda_graph import CudaGraph

    weight = torch.randn(1024, 1024, device="cuda")
    return CudaGraph(lambda x: torch.relu(x @ weight).repeat(8, 1), set())


def test_timing_a_captured_model_does_not_make_it_larger(judge: Judge) -> None:
    """While the judge holds a result, a replay would need a second recording, of 32 MiB and more."""
    x = torch.randn(1024, 1024, device="cuda")
    subject = {"kind": "factory", "module": __name__, "function": "in_a_cuda_graph", "args": {}}
    with judge.spawn(subject, [x]) as worker:
        worker.run([x])
        worker.run([x])
        before = worker.held_bytes
        worker.prepare(1e-3)
        for _ in range(3):
            worker.sample()
        worker.timed_outputs()
        worker.run()
        assert 0 < worker.held_bytes <= before + (4 << 20)


def test_calls_that_come_one_at_a_time_bear_out_an_honest_kernel(norm: TaskJudge, tmp_path: Path) -> None:
    verdict = norm.judge(write_kernel(tmp_path, TRITON), tier="audit")
    said = verdict.stages["audit"][1]
    print(verdict.latency_us, said)
    assert verdict.correct and re.match(r"[\d.]+ us one call at a time, and [\d.]+ us that eager", said), (
        verdict
    )
    assert "is what counts" not in said and "3 processes" in said


def test_every_capture_gets_memory_of_its_own() -> None:
    """Were it the last one's, a graph would be faster than its equals by 1 or 2 % in every capture."""
    device = torch.device("cuda")
    targets = [(torch.add, (torch.randn(64, 256, device=device), 1)) for _ in range(clock.MANY)]
    places = set()
    for _ in range(10):
        timer = clock.make_timer(targets, device, once=True)
        places.add(timer.outputs[0].data_ptr() >> 21)
        del timer
    assert len(places) >= 5, places
