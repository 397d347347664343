"""What a candidate can't do, tried from inside a candidate. A guard that this system lacks is skipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge_tasks import rms_task, write_kernel
from platformdirs import user_cache_path

from autokernel.judge import Judge, TaskJudge, sandbox
from autokernel.judge.judge import LEFT_OUT_ON_A_GPU
from autokernel.judge.launch import Deadlines, guards_here

pytestmark = pytest.mark.usefixtures("few_rounds")

MISSING = {guard: why_not for guard, why_not in guards_here().items() if why_not}
SECRET = "sk-secret-of-the-user"


def needs(*guards: str) -> pytest.MarkDecorator:
    lacking = [f"{g}: {MISSING[g]}" for g in guards if g in MISSING]
    return pytest.mark.skipif(bool(lacking), reason="; ".join(lacking))


@pytest.fixture(scope="module")
def norm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskJudge]:
    home = tmp_path_factory.mktemp("home")
    (home / "token").write_text(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(user_cache_path()))  # what has been compiled is not compiled anew
        patch.setenv("HOME", str(home))
        patch.setenv("OPENAI_API_KEY", SECRET)
        with (
            Judge("cpu", deadlines=Deadlines(compile_s=20, run_s=20)) as judge,
            judge.open(rms_task(tmp_path_factory.mktemp("task"))) as task,
        ):
            yield task


def attempt(norm: TaskJudge, folder: Path, body: str) -> str:
    """What ``body``, run in a candidate, leaves in ``found``, or the error that it ends with."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    end = "    raise RuntimeError(f'found {found}')\n"
    source = f"os = __import__('os')\ndef kernel_fn(x, weight):\n{lines}{end}"
    return norm.judge(write_kernel(folder, source)).reason.splitlines()[0]


JUDGE = os.getpid()
CALL = "ctypes = __import__('ctypes'); libc = ctypes.CDLL(None, use_errno=True)\n"
DENIED: dict[str, tuple[str, str, str]] = {
    "internet socket": ("system calls", "found = __import__('socket').socket()", "PermissionError"),
    "packet socket": ("system calls", "found = __import__('socket').socket(17, 3)", "PermissionError"),
    "network": (
        "network", "found = [l.split()[0] for l in open('/proc/net/dev') if ':' in l]", r"found \['lo:'\]",
    ),
    "system file": ("files", "found = open('/etc/autokernel-was-here', 'w')", "Read-only"),
    "our own code": ("files", f"found = open({sandbox.__file__!r}, 'a')", "Read-only"),
    "kernel setting": (
        "files", "found = open('/proc/sys/kernel/hostname', 'w').write('x')", "Read-only|Permission",
    ),
    "memory of the process above": (
        "processes", "found = open('/proc/1/mem', 'r+b')", "Permission|Read-only",
    ),
    "the system's bus": (
        "processes", "found = open('/proc/bus/input/devices', 'a')", "Read-only|Permission|No such",
    ),
    "disks": (
        "files", "found = [d for d in os.listdir('/dev') if d[:2] in ('sd', 'vd', 'xv')]", r"found \[\]",
    ),
    "remount": (
        "system calls", CALL + "libc.mount(0, b'/', 0, 32 | 4096, 0); found = ctypes.get_errno()", "found 1$",
    ),
    "namespace": (
        "system calls", CALL + "libc.unshare(0x10000000); found = ctypes.get_errno()", "found 1$",
    ),
    "trace": (
        "system calls", CALL + f"libc.ptrace(16, {JUDGE}, 0, 0); found = ctypes.get_errno()", "found 1$",
    ),
    "a call by its second number": (  # getpid, which nobody minds by its first
        "system calls", CALL + "libc.syscall(0x40000000 + 39); found = ctypes.get_errno()", "found 1$",
    ),
    "signal": ("processes", f"os.kill({JUDGE}, 0); found = 'the judge'", "ProcessLookupError"),
    "environment": ("processes", f"found = open('/proc/{JUDGE}/environ').read()", "FileNotFound"),
    "processes": ("processes", "found = len([p for p in os.listdir('/proc') if p.isdigit()])", "found 2$"),
    "setuid": ("capabilities", "os.setuid(12345); found = os.getuid()", "PermissionError"),
    "capabilities": (
        "capabilities",
        "found = [l for l in open('/proc/self/status') if l.startswith('CapEff')]",
        "0000000000000000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENIED)
def test_what_a_candidate_can_not_do(norm: TaskJudge, tmp_path: Path, name: str) -> None:
    guard, body, answer = DENIED[name]
    if guard in MISSING:
        pytest.skip(f"{guard}: {MISSING[guard]}")
    reason = attempt(norm, tmp_path, body)
    assert re.search(answer, reason), reason


@needs("home", "files")
def test_the_home_folder_is_empty_and_no_key_is_in_the_environment(norm: TaskJudge, tmp_path: Path) -> None:
    home = os.path.realpath(norm.owner.launcher.scratch.parent)
    found = attempt(norm, tmp_path, "found = [v for v in os.environ.values() if 'secret' in v]")
    assert "found []" in found
    body = f"import glob\nfound = [p for p in glob.glob({home!r} + '/**/token', recursive=True)]"
    assert "found []" in attempt(norm, tmp_path, body.replace("import glob", "glob = __import__('glob')"))


@needs("files")
def test_it_sees_its_own_arenas_only(norm: TaskJudge, tmp_path: Path) -> None:
    reason = attempt(norm, tmp_path, "found = [len(f) for _, d, f in os.walk('/dev/shm') if f]")
    assert "found [2]" in reason or "found []" in reason, reason  # inputs and outputs


@needs("processes", "files")
def test_its_own_entries_in_proc_can_be_written(norm: TaskJudge, tmp_path: Path) -> None:
    """As CUDA does when it starts."""
    found = attempt(norm, tmp_path, "found = open('/proc/self/comm', 'w').write('worker')")
    assert found.endswith("found 6"), found


@needs("process limit", "processes")
def test_a_fork_bomb_is_contained(norm: TaskJudge, tmp_path: Path) -> None:
    body = (
        "found = 0\n"
        "try:\n"
        "    while found < 2000:\n"
        "        if os.fork() == 0:\n"
        "            __import__('time').sleep(60); os._exit(0)\n"
        "        found += 1\n"
        "except OSError: pass"
    )
    before = len(list(Path("/proc").iterdir()))
    reason = attempt(norm, tmp_path, body)
    count = int(reason.rpartition("found ")[2])
    assert 0 < count < sandbox.MAX_PROCESSES, reason
    deadline = time.monotonic() + 20
    while len(list(Path("/proc").iterdir())) > before + 100 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list(Path("/proc").iterdir())) < before + 100  # they went with their namespace


@needs("memory limit")
def test_memory_is_bounded(norm: TaskJudge, tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    reason = attempt(norm, tmp_path, f"found = len(bytearray({int(total * 0.8)}))")
    assert "MemoryError" in reason, reason


@needs("disk limit", "files")
@pytest.mark.parametrize("folder", [".", "/tmp", "/dev/shm"])
def test_disk_is_bounded(norm: TaskJudge, tmp_path: Path, folder: str) -> None:
    body = (
        "found = 0\n"
        f"with open('{folder}/filler', 'wb') as file:\n"
        "    while found < 40:\n"
        "        file.truncate(found << 28); file.seek(0, 2); file.write(b'x')\n"
        "        found += 1"
    )
    reason = attempt(norm, tmp_path, body)
    assert "File too large" in reason or "No space" in reason, reason


def test_how_it_ends_is_told_as_it_was(norm: TaskJudge, tmp_path: Path) -> None:
    """Through the processes between a locked-in worker and the zygote, too."""
    for body, text in {
        "os._exit(0); found = 0": "exit code 0",
        "os._exit(7); found = 0": "exit code 7",
        "os.abort(); found = 0": "SIGABRT",
        CALL + "ctypes.string_at(8); found = 0": "SIGSEGV",
    }.items():
        verdict = norm.judge(write_kernel(tmp_path, _kernel(body)))
        assert verdict.status == "crash" and text in verdict.reason, verdict


def _kernel(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"os = __import__('os')\ndef kernel_fn(x, weight):\n{lines}    return x\n"


def test_compilers_work_inside(norm: TaskJudge, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source = (
        "import torch\nCOMPILE = True\nBACKEND = 'torch'\n"
        "def kernel_fn(x, weight):\n"
        "    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)\n"
    )
    norm.owner.launcher.deadlines = Deadlines()
    verdict = norm.judge(write_kernel(tmp_path, source))
    assert verdict.correct, verdict


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with Judge("cpu", scratch=tmp_path) as judge, judge.open(rms_task(tmp_path / "task")) as task:
        assert task.judge(write_kernel(tmp_path, _kernel("x = x + 0"))).status == "incorrect"
        name, launcher = judge.scratch.name, id(judge.launcher)
    assert not (Path("/dev/shm") / name).exists() and not list(tmp_path.glob("autokernel-*"))
    groups = [str(p) for p in Path("/sys/fs/cgroup").rglob(f"autokernel-*-{launcher}-*")]
    assert groups == []


def test_the_probe_answers_without_torch() -> None:
    code = f"import sys, runpy; sys.argv = ['x']; runpy.run_path({sandbox.__file__!r}, run_name='__main__'); "
    code += "assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(run.stdout)) == set(sandbox.GUARDS)


SETS = [{guard} for guard in sandbox.GUARDS] + [set(s) for s in LEFT_OUT_ON_A_GPU]


@pytest.mark.parametrize("left_out", SETS, ids=lambda s: "without " + ", ".join(sorted(s)))
def test_guards_work_without_one_another(tmp_path: Path, left_out: set[str]) -> None:
    """Any may be missing on a system; none may then reach outside (a mount over the system's /proc)."""
    guards = [g for g in sandbox.GUARDS if g not in {*left_out, *MISSING, "process limit"}]
    spec = {
        "guards": guards, "scratch": str(tmp_path), "shared": [], "keep": [], "groups": [],
        "private_tmp": True,
    }  # fmt: skip
    code = (
        f"import sys; sys.path.insert(0, {str(Path(sandbox.__file__).parent)!r}); import os, sandbox\n"
        f"sandbox.enter({spec!r})\nprint('inside', os.path.exists(f'/proc/{{os.getpid()}}'))"
    )
    before = Path("/proc/mounts").read_text()
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.stdout, run.returncode) == ("inside True\n", 0), run.stderr
    assert Path("/proc/mounts").read_text() == before


@needs("files", "home")
def test_a_scratch_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with TMPDIR=~/tmp."""
    (tmp_path / "home" / "tmp").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache_path()))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    task = rms_task(tmp_path / "task")
    with Judge("cpu", scratch=tmp_path / "home" / "tmp") as judge, judge.open(task) as opened:
        good = "import torch\ndef kernel_fn(x, weight):\n"
        good += "    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)\n"
        assert opened.judge(write_kernel(tmp_path, good)).correct


@needs("files")
def test_a_package_in_tmp_is_found_and_can_not_be_written(tmp_path: Path) -> None:
    """/tmp is private, but this package, or Python, may be installed in it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        (folder / "lazily.py").write_text("")
        (folder / "scratch").mkdir()
        guards = [g for g in sandbox.GUARDS if g not in {*MISSING, "process limit"}]
        spec = {
            "guards": guards, "scratch": str(folder / "scratch"), "shared": [], "keep": [], "groups": [],
            "private_tmp": True,
        }  # fmt: skip
        code = (
            f"import sys; sys.path[:0] = [{str(Path(sandbox.__file__).parent)!r}, {str(folder)!r}]\n"
            f"import os, sandbox\nsandbox.enter({spec!r})\nimport lazily\n"
            f"print(sorted(os.listdir('/tmp')))\nopen('/tmp/own', 'w').close()\n"
            f"open({str(folder / 'other')!r}, 'w')"
        )
        run = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert run.stdout == f"['{folder.name}']\n" and "Read-only" in run.stderr, run.stderr
        assert not Path("/tmp/own").exists()
    finally:
        shutil.rmtree(folder)
