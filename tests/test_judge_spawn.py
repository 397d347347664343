"""Workers for whole-model subjects: running, timing in pairs, failing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from judge_tasks import RMS_NORM

from autokernel.errors import DeviceMissing
from autokernel.judge import Judge, TensorSpec, WorkerFault
from autokernel.judge.handle import Worker


@pytest.fixture(scope="module")
def judge(cpu_judge: Judge) -> Judge:
    return cpu_judge


def factory(function: str, **args) -> dict:
    return {"kind": "factory", "module": __name__, "function": function, "args": args}


# -- what the workers import from this file ---------------------------------------------------------


def reads_a_file(args):
    """By a relative path, as a user's model does; and tries to change it."""
    number = float(Path(args["path"]).read_text())
    with contextlib.suppress(OSError):
        Path(args["path"]).write_text("0")
    return lambda x: x + number


def nested(args):
    def call(x, index):
        return {"sum": x + args["add"], "parts": [x[:, :3].T, (index * 2, None, "text")], "z": x[0, 0] > 0}

    return call


def slow(args):
    def call(x):
        time.sleep(args["ms"] / 1e3)
        return x * 2

    return call


def counts_the_held(args):
    """Returns how many of its earlier results are still held at the time of the call."""
    made: list[weakref.ref] = []

    def call(x):
        held = sum(ref() is not None for ref in made)
        result = torch.full_like(x, held)
        made.append(weakref.ref(result))
        return result

    return call


def growing(args):
    sizes = iter(range(1, 100))
    return lambda x: x[: next(sizes)].clone()


def random_walk(args):
    return lambda x: x + torch.rand(())


def dies(args):
    return lambda x: os._exit(3)


def tells_flags(args):
    return lambda x: torch.tensor([torch.get_num_threads(), int(torch.is_grad_enabled())])


# ----------------------------------------------------------------------------------------------------


def test_nested_outputs_are_flattened_and_laid_out(judge: Judge) -> None:
    x, index = torch.randn(5, 4).T, torch.arange(6)
    with judge.spawn(factory("nested", add=1.5), [x, index]) as worker:
        for _ in range(2):
            x = torch.randn(5, 4).T
            total, part, doubled, flag = worker.run([x, index])
            assert torch.equal(total, x + 1.5) and torch.equal(part, x[:, :3].T)
            assert torch.equal(doubled, index * 2) and flag.item() == bool(x[0, 0] > 0)
        with pytest.raises(ValueError, match="1 inputs"):
            worker.run([x])


def test_held_copies_and_views(judge: Judge) -> None:
    x = torch.ones(8)
    with judge.spawn(factory("slow", ms=0), [TensorSpec.of(x)], [TensorSpec.of(x)]) as worker:
        held, view = worker.run([x]), worker.run([x], copy=False)
        worker.run([x * 5], copy=False)
        assert held[0][0] == 2 and view[0][0] == 10


def test_no_result_of_an_earlier_call_is_held(judge: Judge) -> None:
    """A model in a CUDA graph makes room anew for a result while the last one is held, and that room would
    count as the model's own memory."""
    x = torch.ones(8)
    with judge.spawn(factory("counts_the_held"), [x]) as worker:
        assert worker.run([x])[0][0] == 0
        worker.prepare(1e-5)
        for _ in range(3):
            worker.sample()
            assert worker.timed_outputs()[0][0] == 0
            assert worker.run()[0][0] == 0


def test_reference_and_compiled_reference_agree(judge: Judge, tmp_path: Path) -> None:
    path = tmp_path / "reference.py"
    path.write_text(RMS_NORM)
    x, w = torch.randn(64, 256), torch.randn(256)
    with (
        judge.spawn({"kind": "reference", "path": str(path)}, [x, w]) as eager,
        judge.spawn({"kind": "reference-compiled", "path": str(path)}, [x, w]) as compiled,
    ):
        a, b = eager.run([x, w])[0], compiled.run([x, w])[0]
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
    assert torch.equal(a, h) and torch.allclose(b, h, rtol=1e-5)


def test_paired_ratio_of_known_times(judge: Judge) -> None:
    x = torch.ones(4)
    with judge.spawn(factory("slow", ms=30), [x]) as a, judge.spawn(factory("slow", ms=20), [x]) as b:
        result = judge.paired(a, b, pairs=20, inputs=[x])
        assert result.ratio.pairs == 20 and 1.2 < result.ratio.ratio < 1.9, result
        assert result.ratio.lower_bound > 1.1 and not result.gate_fault
        assert result.a_us >= 30_000 and result.b_us >= 20_000
        assert (result.drift_a, result.drift_b) == (0.0, 0.0)
        assert 20_000 <= judge.measure(b) < 40_000


def test_outputs_of_timed_calls_that_drift_are_reported(judge: Judge) -> None:
    x = torch.ones(1000)
    with judge.spawn(factory("random_walk"), [x]) as a, judge.spawn(factory("slow", ms=1), [x]) as b:
        result = judge.paired(a, b, pairs=5, inputs=[x])
    assert result.drift_a > 1e-3 and result.drift_b == 0


def test_workers_share_flags(judge: Judge) -> None:
    x = torch.ones(1)
    with judge.spawn(factory("tells_flags"), [x]) as worker:
        assert worker.run([x])[0].tolist() == [judge.threads, 0]


@pytest.mark.parametrize(
    "subject, status, reason",
    [
        (factory("missing"), "compile_error", "missing"),
        (factory("nested"), "crash", "KeyError"),
        (factory("dies"), "crash", "exit code 3"),
        (factory("growing"), "incorrect", "another structure"),
        ({"kind": "reference", "path": "/nowhere.py"}, "compile_error", "nowhere"),
        ({"kind": "abacus"}, "compile_error", "abacus"),
    ],
)
def test_faults(judge: Judge, subject, status, reason) -> None:
    inputs = [torch.ones(200, 4), torch.ones(1)] if subject.get("function") == "nested" else [torch.ones(200)]
    with pytest.raises(WorkerFault, match=reason) as fault:
        judge.spawn(subject, inputs).run(inputs)
    assert fault.value.status == status


def test_deadline_and_a_dead_worker(judge: Judge) -> None:
    x = torch.ones(1)
    worker = judge.spawn(factory("slow", ms=60_000), [x], deadline_s=1.0)
    start = time.monotonic()
    with pytest.raises(WorkerFault) as fault:
        worker.run([x])
    assert fault.value.status == "timeout" and time.monotonic() - start < 5
    assert re.search(r"most recent call first\):\n  File .*test_judge_spawn.py", fault.value.log), (
        fault.value.log
    )
    with pytest.raises(WorkerFault, match="closed"):
        worker.run([x])


def test_a_lost_zygote_takes_its_workers_along_and_is_replaced(judge: Judge) -> None:
    x = torch.ones(1)
    old = judge.spawn(factory("slow", ms=0), [x])
    old.run([x])
    assert judge.launcher._zygote is not None
    judge.launcher._zygote.kill()
    judge.launcher._zygote.wait()
    with pytest.raises(WorkerFault, match="ended"):
        old.run([x])
    with judge.spawn(factory("slow", ms=0), [x]) as worker:
        assert worker.run([x])[0].item() == 2


def test_a_warm_worker_that_died_is_nobodys_fault(judge: Judge) -> None:
    judge.launcher.refill()
    judge.launcher.settle()
    for process in judge.launcher._warming:
        process.send_signal(signal.SIGKILL)
        process.end.wait_closed(10.0)  # whoever its zygote was, and whether that can still tell
    worker = Worker(judge.launcher, kind="kernel")
    assert worker.alive
    worker.close()


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_a_missing_device(device) -> None:
    with pytest.raises((DeviceMissing, RuntimeError)):
        Judge(device)


def test_a_users_model_is_found_by_its_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked in as it is with kernels in it, it may read what the user's own process could, but not write."""
    monkeypatch.chdir(tmp_path)
    Path("number.txt").write_text("2.5")
    x = torch.ones(3)
    with (
        Judge("cpu") as judge,
        judge.spawn(factory("reads_a_file", path="number.txt"), [x], kind="model") as worker,
    ):
        (result,) = worker.run([x])
        guards = judge.launcher.guards
    assert result.tolist() == [3.5, 3.5, 3.5]
    if "files" in guards:
        assert Path("number.txt").read_text() == "2.5"
