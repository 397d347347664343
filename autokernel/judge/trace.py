"""Provenance: whose code a candidate's time is spent in, its own or a library's.

`record` runs in the worker, under torch's profiler, untimed; `classify` runs in the judge, on what the worker
said.  It is a label, no defence: the worker's process is the candidate's, which could forge it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autokernel.records import Provenance

SPAN = "autokernel: one call"
CALLS, LONG_S = 10, 0.5
SHORT_CALLS, SHORT_S = 100, 0.05
"""On a CPU, up to so many calls and so long: of a short call what is nobody's is a large part, and only
many of them have one in which it was small."""
MAX_NAMES, MAX_NAME = 64, 160
NEGLIGIBLE = 0.05
"""Less than this share of the time is nobody's contribution: an output that is allocated, a cast."""
PER_CALL_US, PER_OP_US = 30.0, 10.0
"""On a CPU, what Python and the profiler may take for a call and for each torch op in it; the rest of the
time that is in no torch op is the candidate's own code."""
LIBRARY = re.compile(
    r"\bat::|\bc10::|cublas|cudnn|cutlass|nvjet|xmma|gemm|gemv|flash_|fmha|splitKreduce|\bcub::|thrust|"
    r"^Mem(cpy|set)",
    re.IGNORECASE,
)


def record(fn: Callable[..., Any], values: Sequence[Any], device: torch.device) -> str:
    """What one call ran, as JSON: ``time_us`` in all, ``parts`` name -> us, ``ops`` how many torch ops.

    On a CUDA device the parts are kernels and the time is theirs; on a CPU they are torch's outermost ops,
    and the time is the wall clock's.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        begin, calls = time.perf_counter(), 0
        while _goes_on(calls, time.perf_counter() - begin, cuda):
            with record_function(SPAN):
                fn(*values)
            calls += 1
        if cuda:
            torch.cuda.synchronize(device)
    events = profiler.events() or []
    if cuda:
        kernels = [e for e in events if e.device_type.name == "CUDA" and e.name != SPAN]
        parts = _sums([(e.name, e.time_range.elapsed_us() / calls) for e in kernels])
        return _told(sum(parts.values()), parts, len(kernels) // calls)
    calls_seen = []
    for span in (e for e in events if e.name == SPAN):
        pairs = [(e.name, e.time_range.elapsed_us()) for e in span.cpu_children]
        calls_seen.append((span.time_range.elapsed_us(), pairs))
    return _undisturbed(calls_seen)


def _goes_on(calls: int, seconds: float, cuda: bool) -> bool:
    if calls < CALLS:
        return calls < 2 or seconds < LONG_S
    return not cuda and calls < SHORT_CALLS and seconds < SHORT_S


def _undisturbed(calls: Sequence[tuple[float, list[tuple[str, float]]]]) -> str:
    """From several calls, each (us in all, [(op, us)]): every op, and what is in none, where it took least.

    A busy machine stops a call anywhere, and then a millisecond is added to an op that takes one microsecond.
    """
    least: dict[str, float] = {}
    for _, pairs in calls:
        for name, us in _sums(pairs).items():
            least[name] = min(us, least.get(name, us))
    rest, ops = min((took - sum(us for _, us in pairs), len(pairs)) for took, pairs in calls)
    return _told(rest + sum(least.values()), _sums(list(least.items())), ops)


def _sums(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, us in pairs:
        sums[name[:MAX_NAME]] = sums.get(name[:MAX_NAME], 0.0) + us
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:MAX_NAMES])


def _told(time_us: float, parts: dict[str, float], ops: int) -> str:
    rounded = {name: round(us, 2) for name, us in parts.items()}
    return json.dumps({"time_us": round(time_us, 2), "parts": rounded, "ops": ops})


def classify(told: str, source: str, device: torch.device) -> tuple[Provenance | None, str]:
    """The label and, in words, what it is based on; None if the worker's account makes no sense."""
    account = _parsed(told)
    if account is None:
        return None, "the worker's account of what ran is malformed"
    time_us, parts, ops = account
    named_us = sum(parts.values())
    if device.type == "cuda":
        own_us = sum(us for name, us in parts.items() if _is_own(name, source))
        total_us, library_us = named_us, named_us - own_us
    else:
        total_us, library_us = time_us, min(named_us, time_us)
        own_us = max(0.0, time_us - library_us - PER_CALL_US - PER_OP_US * ops)
    if total_us <= 0.0:
        return None, "nothing that ran could be seen"
    label: Provenance = "mixed"
    if library_us < NEGLIGIBLE * total_us:
        label = "custom"
    elif own_us < NEGLIGIBLE * total_us:
        label = "library"
    share = own_us / (own_us + library_us) if own_us + library_us else 1.0
    text = f"{label}: {share:.0%} of the time in its own code"
    return label, text + (f"; of what is named, {next(iter(parts))} took longest" if parts else "")


def _parsed(told: str) -> tuple[float, dict[str, float], int] | None:
    try:
        data = json.loads(told)
        parts = {str(name): float(us) for name, us in data["parts"].items()}
        time_us, ops = float(data["time_us"]), int(data["ops"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    numbers = [time_us, *parts.values()]
    good = ops >= 0 and all(math.isfinite(x) and x >= 0.0 for x in numbers)
    return (time_us, parts, ops) if good else None


def _is_own(kernel: str, source: str) -> bool:
    """Whether a device kernel's (demangled) name is that of a function that the source defines."""
    name = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].split("::")[-1].strip()
    if LIBRARY.search(kernel) or not re.fullmatch(r"\w+", name):
        return False
    defined = re.findall(r"^\s*def (\w+)\s*\(", source, re.MULTILINE)
    defined += re.findall(
        r"__global__[^;{]*?(\w+)\s*\(", re.sub(r"__launch_bounds__\s*\([^)]*\)", "", source)
    )
    return any(name == d or re.fullmatch(rf"{d}(_\d\w*)?", name) for d in defined)
