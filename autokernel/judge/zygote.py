"""``python -m autokernel.judge.zygote FD DEVICE [lean]``: imports torch once, then forks workers on request.

Requests arrive on the Unix socket FD as one JSON packet with four descriptors: commands (read), replies
(write), log (write), exit status (write).  The answer is the child's pid.  When a child ends, its wait
status is written to its exit descriptor.  When the socket closes, every child's group is killed.

It never runs an operator and never touches CUDA, so that its children can.  Should importing the compiler
have done so, it starts itself again and leaves the compiler out (``lean``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

if hasattr(os, "sched_setaffinity"):  # a bound judge must not confine us to its one core
    os.sched_setaffinity(0, range(os.cpu_count() or 1))

from autokernel.judge import compilers, sandbox, worker

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # a container may have nobody else who reaps
    wake_r, wake_w = os.pipe()
    for fd in (wake_r, wake_w):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w)
    exits: dict[int, int] = {}
    lean = "lean" in sys.argv[3:]
    compilers.preload(sys.argv[2], compiler=not lean)
    if sys.argv[2] == "cpu":
        compilers.find_vector_units()
    if sys.argv[2].startswith("cuda") and not lean and worker.cuda_initialized():
        os.set_inheritable(control.fileno(), True)
        os.execv(
            sys.executable, [sys.executable, "-P", "-m", "autokernel.judge.zygote", *sys.argv[1:], "lean"]
        )
    gc.collect()
    gc.freeze()  # no child need look through all that again, or copy the pages it is on by doing so
    while True:
        ready, _, _ = select.select([control, wake_r], [], [])
        if wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_r, 4096)
            _reap(exits)
        if control in ready:
            request, fds, _, _ = socket.recv_fds(control, 65_536, 4)
            if not request:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become_worker(json.loads(request), fds)
            exits[pid] = fds[3]
            for fd in fds[:3]:
                os.close(fd)
            control.send(struct.pack("<q", pid))
    for pid in exits:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # unloading everything would take a second


def _reap(exits: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        exit_fd = exits.pop(pid, None)
        if exit_fd is not None:
            with contextlib.suppress(OSError):
                os.write(exit_fd, struct.pack("<i", status))
            os.close(exit_fd)


def _become_worker(request: dict[str, Any], fds: list[int]) -> None:
    """In the child; never returns."""
    code = 70
    try:
        command_fd, reply_fd = worker.enter(*fds[:3])
        if request["sandbox"] is not None:
            sandbox.enter(request["sandbox"])
        worker.serve(command_fd, reply_fd, request["device"], request["threads"])
        code = 0
    except OSError as error:  # SandboxError: the judge finds it in the log
        print(f"a guard could not be applied: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
