"""Points of a kernel's SPACE, judged quickly in a few workers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from judge_tasks import rms_task, write_kernel

from autokernel.judge import Judge, TaskError

POINT = """
BACKEND = "torch"
BLOCK = {block}

def kernel_fn(x, weight):
    if BLOCK == 3:
        raise RuntimeError("no such block")
    if BLOCK == 4:
        return torch.zeros_like(x)
    if BLOCK == 5:
        import os
        os._exit(0)
    for _ in range(BLOCK):
        x.exp()
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
"""

GOOD = """
def kernel_fn(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
"""


def stops(pid: int) -> bool:
    """Whether it is stopped, or will be as soon as a core has time for it: the signal is on its way."""
    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("width", [1, 3])
def test_every_point_has_a_verdict(
    tmp_path: Path, cpu_judge: Judge, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing points cost themselves only, and a slower point is seen to be slower."""
    monkeypatch.setattr("os.cpu_count", lambda: width)
    files = [write_kernel(tmp_path, POINT.format(block=b), f"p{b}.py") for b in (0, 3, 4, 5, 200)]
    with cpu_judge.open(rms_task(tmp_path / "task")) as task:
        fast, raised, wrong, gone, slow = task.sweep(files)
        assert task._sweep is not None
        left = [lane.worker for lane in task._sweep._lanes if lane.worker and not lane.worker.closed]
        assert left and all(stops(w.process.pid) for w in left)  # nothing of theirs runs while others do
    assert [v.status for v in (fast, raised, wrong, gone, slow)] == [
        "discard", "crash", "incorrect", "crash", "discard",
    ]  # fmt: skip
    assert fast.latency_us is not None and slow.latency_us is not None
    assert slow.latency_us > 3 * fast.latency_us
    assert "no such block" in raised.reason


def test_tasks_prepared_side_by_side(tmp_path: Path, cpu_judge: Judge) -> None:
    """They are the same judges that `open` makes one by one, and a broken reference costs only itself."""
    first, second = rms_task(tmp_path / "a"), rms_task(tmp_path / "b")
    second.fingerprint = "b" * 64
    broken = rms_task(tmp_path / "c")
    broken.fingerprint = "c" * 64
    (broken.dir / "reference.py").write_text("class Model: pass\n")
    good = write_kernel(tmp_path, GOOD, "good.py")
    baselines = cpu_judge.prepare([first, second, broken])
    assert set(baselines) == {first.fingerprint, second.fingerprint}
    assert all(b["eager"] > 0 for b in baselines.values())
    for task in (first, second):
        with cpu_judge.open(task) as opened:
            assert opened.baselines == baselines[task.fingerprint]
            assert opened.judge(good).correct
    with pytest.raises(TaskError):
        cpu_judge.open(broken)
