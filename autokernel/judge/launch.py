"""Starting workers: a zygote that has imported torch forks them, each into its own process group.

Importing torch costs seconds; a fork costs a few milliseconds.  The zygote never initialises CUDA (a
forked child could not use it); on a GPU a forked child does that itself, so there a small pool of warm
children is kept, and `Launcher.settle` waits for those that are still warming up before anything is timed.

What a worker inherits (environment, descriptors, folders, guards) is decided here and in `worker.enter`.
There are four kinds: ``kernel`` is locked in (see `sandbox`), ``baseline`` is trusted but locked in just the
same, so that the guards cost all that is compared with a kernel the same, ``model`` may read what a model may
need, and ``trusted`` is not locked in: whole models, with kernels that have passed, too (for the sake of the
compilers' caches).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autokernel.judge import compilers, sandbox
from autokernel.judge.protocol import ChannelClosed, DeadlineExpired, JudgeEnd, ProtocolError

ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CC", "CXX",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "TRITON_PTXAS_PATH", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "TORCH_HOME",
)  # fmt: skip
"""All that a worker's environment may hold. API keys are not on it, under any name."""

OPENMP = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_SPINCOUNT": "5000"}
"""For all CPU workers.  Unbound, the threads of a short parallel region now and then share a core for a
worker's whole life, which makes equal kernels differ tenfold.  And by default threads spin for up to 30 ms
after a region, in one arm's process, while the next arm is already being timed; this is about 0.5 ms."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds a worker may take: to load or for a first call, for a later call, for our own requests."""

    compile_s: float = 300.0
    run_s: float = 120.0
    own_s: float = 60.0


WARM_DEADLINE_S = 120.0
TOP_UP = 2
"""Workers that are warm by the time a kernel is compiled (on an H200, one alone takes 0.4 s, eight 1.3 s)."""
LOG_HEAD, LOG_TAIL = 16_384, 49_152


Kind = Literal["trusted", "baseline", "kernel", "model"]


class LaunchError(Exception):
    """The zygote or a worker did not start: our own or the machine's fault, never a candidate's."""


def scrubbed_environment(device: str) -> dict[str, str]:
    """The allow-listed part of this process's environment, plus where to import from."""
    env = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    roots = [str(Path(__file__).resolve().parents[2])]
    for entry in sys.path:
        entry = entry or str(Path.cwd())
        if (
            Path(entry).is_dir()
            and not entry.startswith((sys.prefix, sys.base_prefix))
            and entry not in roots
        ):
            roots.append(entry)
    env["PYTHONPATH"] = os.pathsep.join(roots)
    if not device.startswith("cuda"):
        env |= OPENMP
    else:
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # "is there a GPU?" must not initialise CUDA in the zygote
    # A pool of compilers in every worker would linger while we time; and where several workers compile at
    # once, each gains less from a pool than it costs to start one.
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env["TORCHINDUCTOR_CACHE_DIR"] = str(trusted_cache() / "inductor")  # the zygote's; see `cache_folders`
    return env | compilers.bytecode(trusted_cache())


class BoundedLog:
    """Drains a worker's stdout and stderr, keeping the first and the last part of it.

    Past ``limit`` bytes nothing is read any more, and whoever writes gets an error: `overrun`.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._head, self._tail, self._dropped = fd, b"", b"", 0
        self.limit: int | None = None
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._fd, 65_536):
                room = LOG_HEAD - len(self._head)
                self._head += chunk[:room]
                tail = self._tail + chunk[room:] if room < len(chunk) else self._tail
                self._dropped += max(0, len(tail) - LOG_TAIL)
                self._tail = tail[-LOG_TAIL:]
                if self.overrun:
                    break
        os.close(self._fd)

    @property
    def overrun(self) -> bool:
        written = len(self._head) + self._dropped + len(self._tail)
        return self.limit is not None and written > self.limit

    def text(self, wait_s: float = 0.0) -> str:
        if wait_s:
            self._thread.join(wait_s)
        middle = f"\n[... {self._dropped} bytes dropped ...]\n".encode() if self._dropped else b""
        return (self._head + middle + self._tail).decode("utf-8", "replace")


@dataclass(slots=True)
class WorkerProcess:
    """A forked worker: its pid, the judge's end of its pipes, its captured output, and its folders.

    ``shared`` are the folders in which it sees arenas; ``groups`` the control groups made for it.
    """

    pid: int
    end: JudgeEnd
    log: BoundedLog
    exit_fd: int
    scratch: Path
    shared: list[Path]
    groups: list[str]
    warm: bool = False
    exit_status: int | None = None
    closed: bool = False

    def wait_warm(self, deadline_s: float = WARM_DEADLINE_S) -> None:
        if self.warm:
            return
        try:
            reply = self.end.expect_hello(deadline_s)
        except (ChannelClosed, DeadlineExpired, ProtocolError) as error:
            text = self.log.text(0.5).strip()[-2000:]
            self.kill()
            raise LaunchError(f"a worker did not start ({type(error).__name__}): {text}") from error
        if reply.status:
            self.kill()
            raise LaunchError(f"a worker did not start: {reply.text}")
        self.warm = True

    def exit_text(self, wait_s: float = 1.0) -> str:
        """How it ended: ``exit code 0``, ``signal 11 (SIGSEGV)``, or ``still running``."""
        if self.exit_status is None and not self.closed:
            ready, _, _ = select.select([self.exit_fd], [], [], wait_s)
            data = os.read(self.exit_fd, 4) if ready else b""
            if len(data) == 4:
                self.exit_status = struct.unpack("<i", data)[0]
        if self.exit_status is None:
            return "still running"
        if os.WIFSIGNALED(self.exit_status):
            number = os.WTERMSIG(self.exit_status)
            with contextlib.suppress(ValueError):
                return f"signal {number} ({signal.Signals(number).name})"
            return f"signal {number}"
        return f"exit code {os.WEXITSTATUS(self.exit_status)}"

    def send_signal(self, number: int) -> None:
        """Send a signal to its whole process group; nothing if it is gone."""
        if not self.closed and self.exit_status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """End its whole process group and close the pipes. Safe to call twice."""
        if self.closed:
            return
        # The zygote reaps it, so the pid can't have been reused while exit_fd has not reported.
        if self.exit_text(0.0) == "still running":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.exit_text(2.0)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # children it left in its group
        self.closed = True
        self.end.wait_closed(2.0)  # what it forked in its namespace is gone only then
        self.end.close()
        os.close(self.exit_fd)
        for folder in (self.scratch, *self.shared):
            shutil.rmtree(folder, ignore_errors=True)
        sandbox.drop_control_groups(self.groups)


class Launcher:
    """Owns the zygote and the pool of warm workers for one device."""

    def __init__(
        self,
        device: str,
        scratch: Path,
        *,
        threads: int,
        pool: int | None = None,
        deadlines: Deadlines = Deadlines(),
    ) -> None:
        self.deadlines = deadlines
        self.device, self.scratch, self.threads = device, scratch, threads
        # A device context takes 0.4 seconds on an H200, eight of them at once 1.3 (and seven and ten on a
        # machine that has just begun): so they are made while a candidate compiles, or else in bulk, when the
        # last one is gone, and a candidate pays an eighth of that.
        self.pool_size = pool if pool is not None else (8 if device.startswith("cuda") else 1)
        self._lock = threading.RLock()
        self._warming: list[WorkerProcess] = []
        self._zygote: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._zygote_log: BoundedLog | None = None
        self._closed, self._forked = False, False
        self._numbers = itertools.count()
        self._grouped: list[WorkerProcess] = []
        self.guards: list[str] = []
        """Those that work here; found out when the zygote is started."""

    def _start_zygote(self) -> socket.socket:
        sandbox.drop_stale_control_groups()
        self.guards = [guard for guard, why_not in guards_here().items() if not why_not]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log_r, log_w = os.pipe()
        try:
            self._zygote = subprocess.Popen(
                [sys.executable, "-P", "-m", "autokernel.judge.zygote", str(theirs.fileno()), self.device],
                env=scrubbed_environment(self.device), pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log_w, stderr=log_w,
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(log_w)
        self._zygote_log, self._forked = BoundedLog(log_r), False
        ours.settimeout(WARM_DEADLINE_S)
        return ours

    def _fork(self, kind: Kind) -> WorkerProcess:
        """Ask the zygote for one worker; does not wait for it to be warm."""
        if self._closed:
            raise LaunchError("the judge has been closed")
        if self._zygote is None or self._zygote.poll() is not None or self._socket is None:
            if self._socket is not None:
                self._socket.close()
            self._socket = self._start_zygote()
            if self._closed:  # meanwhile, by another thread that found no zygote to stop
                self._stop_zygote()
                raise LaunchError("the judge has been closed")
        command_r, command_w = os.pipe()
        reply_r, reply_w = os.pipe()
        log_r, log_w = os.pipe()
        exit_r, exit_w = os.pipe()
        theirs = [command_r, reply_w, log_w, exit_w]
        control = self._socket
        scratch, shared, locked = self._folders(kind)
        request = {"device": self.device, "threads": self.threads, "sandbox": locked}
        try:
            socket.send_fds(control, [json.dumps(request).encode()], theirs)
            answer = control.recv(64)
            if len(answer) != 8:
                raise OSError("no answer")
        except OSError as error:
            for fd in (command_w, reply_r, log_r, exit_r):
                os.close(fd)
            sandbox.drop_control_groups(locked["groups"] if locked else [])
            text = self._zygote_log.text(0.5).strip()[-2000:] if self._zygote_log else ""
            self._stop_zygote()
            raise LaunchError(f"the zygote is gone: {text or error}") from error
        finally:
            for fd in theirs:
                os.close(fd)
        (pid,) = struct.unpack("<q", answer)
        self._forked = True
        groups = locked["groups"] if locked else []
        process = WorkerProcess(
            pid, JudgeEnd(command_w, reply_r), BoundedLog(log_r), exit_r, scratch, shared, groups
        )
        if groups:
            self._grouped.append(process)
        return process

    def _drop_groups(self) -> None:
        """Delete the control groups of workers that are gone. One that is empty may yet be joined."""
        for process in [p for p in self._grouped if p.closed]:
            sandbox.drop_control_groups(process.groups)
            if not any(Path(g).exists() for g in process.groups):  # else its last process is still going
                self._grouped.remove(process)

    def _folders(self, kind: Kind) -> tuple[Path, list[Path], dict[str, Any] | None]:
        """Fresh folders for one worker, and what it is locked into."""
        name = f"w{next(self._numbers)}"
        scratch = self.scratch / name
        roots = [self.scratch / "shared", Path("/dev/shm") / self.scratch.name]
        if not os.access("/dev/shm", os.W_OK):
            roots.pop()
        shared = [root / name for root in roots]
        for folder in (scratch, *shared):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if kind == "trusted" or not self.guards:
            return scratch, shared, None
        own, groups = kind != "model", list[str]()
        caches = [str(trusted_cache())] if kind == "baseline" else []
        for folder in caches:
            Path(folder).mkdir(parents=True, exist_ok=True)
        if "process limit" in self.guards:
            groups = sandbox.control_groups(f"autokernel-{os.getpid()}-{id(self)}-{name}")
            self._drop_groups()
        return scratch, shared, {
            "guards": [g for g in self.guards if own or g != "home"],
            "scratch": str(scratch),
            "shared": [*(str(s) for s in shared), *caches],
            "keep": [str(trusted_cache() / "triton"), *caches],
            "groups": groups,
            "private_tmp": own,
        }  # fmt: skip

    def take(self, kind: Kind = "kernel") -> WorkerProcess:
        """A warm worker; those for kernels come from the pool.  May be called from several threads."""
        with self._lock:
            if kind == "kernel":
                self.refill()
                process = self._warming.pop(0)
            else:
                process = self._fork(kind)
        try:
            process.wait_warm()
        except LaunchError:
            with self._lock:
                process = self._fork(kind)  # it may have died for want of memory; try once more
            process.wait_warm()
        return process

    def refill(self) -> None:
        """Fill the pool if it is empty.  Call it only when nothing is being timed."""
        with self._lock:
            if not self._warming:
                self._warming += [self._fork("kernel") for _ in range(max(1, self.pool_size))]

    def top_up(self) -> None:
        """Start a few of the workers that are missing.  Call it while a candidate compiles, so that their
        warming up costs nothing; before anything is timed, `settle`."""
        with self._lock:
            missing = self.pool_size - len(self._warming)
            self._warming += [self._fork("kernel") for _ in range(min(missing, TOP_UP))]

    def start(self) -> None:
        """Start the zygote and the first workers, in the background."""

        def fill() -> None:
            with contextlib.suppress(LaunchError, OSError):  # whoever takes a worker will hear of it
                self.refill()

        threading.Thread(target=fill, daemon=True).start()

    def use(self, guards: list[str]) -> None:
        """Lock workers into these guards from now on."""
        with self._lock:
            for process in self._warming:
                process.kill()
            self._warming.clear()
            self.guards = guards

    def settle(self) -> None:
        """Wait until no worker is warming up, so that the machine is quiet for a measurement."""
        for process in list(self._warming):
            try:
                process.wait_warm()
            except LaunchError:
                self._warming.remove(process)

    def _stop_zygote(self) -> None:
        control, self._socket = self._socket, None
        zygote, self._zygote = self._zygote, None
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)  # wakes a thread of ours that waits for an answer
            control.close()
        if zygote is not None:
            try:
                zygote.wait(2.0 if self._forked else 0.0)  # before its first answer it hears nothing
            except subprocess.TimeoutExpired:
                zygote.kill()
                zygote.wait()

    def close(self) -> None:
        self._closed = True
        self._stop_zygote()  # before the lock: whoever waits for its answer holds that
        with self._lock:
            for process in self._warming:
                process.kill()
            self._warming.clear()
        deadline = time.monotonic() + 5.0
        while any(p.closed for p in self._grouped) and time.monotonic() < deadline:
            self._drop_groups()
            time.sleep(0.02 if self._grouped else 0.0)


def trusted_cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("autokernel")


@functools.cache
def guards_here() -> dict[str, str]:
    """`sandbox.probe`, once per process."""
    return sandbox.probe()


def cache_folders(scratch: Path, *, trusted: bool) -> dict[str, Any]:
    """Where compilers keep their results: shared and lasting for trusted subjects, private otherwise.

    A candidate that could write to the shared folders could plant code that a later baseline would run.
    """
    base = trusted_cache() if trusted else scratch / "cache"
    env = {"TORCHINDUCTOR_CACHE_DIR": str(base / "inductor"), "TRITON_CACHE_DIR": str(base / "triton")}
    if not trusted:
        env |= {"HOME": str(scratch), "XDG_CACHE_HOME": str(base), "CUDA_CACHE_PATH": str(base / "cuda")}
    return env
