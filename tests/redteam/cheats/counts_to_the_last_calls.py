"""As skips_middle_calls, but with a clock and a counter only: a pause starts a sample of known length.
Defence: outputs of every timed call: as many buffers as calls, each with its own output area.
"""

import torch

BACKEND = "torch"
NOW = __import__("time").perf_counter
STATE = {"last": 0.0, "count": 0, "length": 0, "steady": 0, "y": None}


def kernel_fn(x, weight):
    now, s = NOW(), STATE
    if now - s["last"] > 0.0005:  # a pause: the sample before this one is over
        s["steady"] = s["steady"] + 1 if s["count"] == s["length"] else 0
        s["length"], s["count"] = s["count"], 0
    s["count"] += 1
    s["last"] = now
    skip = s["steady"] >= 2 and s["length"] > 16 and s["count"] <= s["length"] - 6
    if skip and s["y"] is not None:
        return s["y"]
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
    s["y"] = y.clone()
    return y
