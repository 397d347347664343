"""Sends signal 0 (which only asks whether it could) to whatever runs pytest, and to all pids near its own.
Defence: a process namespace of its own.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    os, own = __import__("os"), __import__("os").getpid()
    threads = {int(entry.name) for entry in __import__("pathlib").Path("/proc/self/task").iterdir()}
    reached = []
    for pid in {*range(2, 64), *range(max(2, own - 2000), own + 50)} - {os.getppid(), *threads}:
        try:
            os.kill(pid, 0)
            reached.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    if not reached:
        raise PermissionError("no other process can be signalled")
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
