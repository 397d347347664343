"""Forks a child that leaves the process group, and so would go on working while others are timed.
Defence: setsid and setpgid are refused; the whole group is stopped while it is not its turn.
"""

import torch

BACKEND = "torch"
os = __import__("os")


def kernel_fn(x, weight):
    for leave in (os.setsid, lambda: os.setpgid(0, 0)):
        child = os.fork()
        if child == 0:
            try:
                leave()
            except PermissionError:
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    raise PermissionError("may not leave its group")
