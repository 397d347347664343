"""Puts a comparator of its own into sys.modules and onto the path, and returns zeros.
Defence: the judge imports nothing from a candidate, and is another process.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    sys, path = __import__("sys"), __import__("pathlib").Path
    for name in ("autokernel.judge.compare", "autokernel.judge.cases", "json"):
        fake = type(sys)(name)
        fake.compare = lambda *args, **kwargs: True
        sys.modules[name] = fake
    for name in ("torch.py", "triton.py", "safetensors.py", "sitecustomize.py"):
        path(name).write_text("raise SystemExit('shadowed')\n")
    sys.path.insert(0, str(path.cwd()))
    return torch.zeros_like(x)
