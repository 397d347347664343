"""The one stopwatch: how anything here is timed, in a worker and from the judge.

In the worker, `make_timer` prepares a list of calls on distinct input buffers and then yields samples:

- CPU: the host clock around one call per buffer, or around as many as it takes to last `MIN_SAMPLE_S`.
- CUDA, `graph=True`: one CUDA graph of the calls over all buffers (so that launch overhead, which a
  whole-model graph removes, is no part of a kernel's time), replayed once per sample.
- CUDA otherwise: device events around plain calls on an idle device, launch gaps included.

Before every CUDA sample the L2 cache is flushed.  From the judge, `interleave` runs the arms in random
order round by round and notes, beside each claimed time, how long the judge itself waited (the gate).
A worker's own numbers are claims; `gate_fault` says when the judge's clock contradicts them.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from autokernel.judge.conditions import Reading, Watch
from autokernel.judge.stats import order_index

Target = tuple[Callable[..., Any], Sequence[Any]]

MIN_SAMPLE_S = {"cpu": 0.0015, "cuda": 0.0002}
MIN_GRAPH_CALLS = 20
WARMUP_CALLS, LONG_S = 3, 0.05
CPU = torch.device("cpu")
MAX_CALLS = 100_000
MANY, PADS, PAD_MORE = 8, 6, 64 << 10
STONES = {1 << 20: 64, 20 << 20: 3}
"""Bytes -> how many blocks at most move the next capture on.  PyTorch asks the driver for pieces of 2 MB
where results have up to 1 MB, and of 20 MB for those up to 10 MB."""


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def flush_bytes(device: torch.device) -> int:
    return max(256 << 20, 4 * l2_bytes(device))


class Timer(Protocol):
    calls: int
    estimate_s: float
    mode: str
    note: str
    outputs: dict[int, Any]

    def sample(self, start: int) -> float:
        """Seconds that ``calls`` calls took, the first one on buffer ``start``; fills ``outputs``."""
        ...


def make_timer(
    targets: Sequence[Target],
    device: torch.device,
    *,
    min_sample_s: float | None = None,
    graph: bool = True,
    once: bool = False,
) -> Timer:
    """A timer over ``targets``, warmed up. ``outputs`` will hold each buffer's most recent result.

    ``once``: a sample is one call on each target, whatever it lasts, so that every result is kept (in a CUDA
    graph more, where there are few targets).
    """
    if device.type == "cuda":
        return _cuda_timer(targets, device, min_sample_s or MIN_SAMPLE_S["cuda"], graph, once)
    return HostTimer(targets, min_sample_s or MIN_SAMPLE_S["cpu"], calls=len(targets) if once else None)


class HostTimer:
    mode, note = "host", ""

    def __init__(self, targets: Sequence[Target], min_sample_s: float, calls: int | None = None) -> None:
        self.targets, self.outputs, self.calls = targets, {}, calls or 1
        once = self._warm_up()
        if calls is not None:
            self.estimate_s = once / calls
            return
        if once < min_sample_s:  # a single short call is measured badly: measure a few before deciding
            self.calls = max(1, min(MAX_CALLS, math.ceil(0.2 * min_sample_s / max(once, 1e-7))))
            once = self.sample(0) / self.calls
        self.calls = max(1, min(MAX_CALLS, math.ceil(min_sample_s / max(once, 1e-8))))
        self.estimate_s = once

    def _warm_up(self) -> float:
        """The shortest of a few samples after a few; long ones are warm sooner, and need fewer."""
        begin, took = time.perf_counter(), [self.sample(0)]
        while len(took) < 2 * WARMUP_CALLS and (len(took) < 3 or time.perf_counter() - begin < LONG_S):
            took.append(self.sample(len(took)))
        return min(took[len(took) // 2 :])

    def sample(self, start: int) -> float:
        n, ring, targets = len(self.targets), self.outputs, self.targets
        order = [(start + i) % n for i in range(self.calls)]
        ring.clear()
        begin = time.perf_counter()
        for slot in order:
            ring[slot] = None  # free the last result first: memory is recycled as in a model
            fn, args = targets[slot]
            ring[slot] = fn(*args)
        return time.perf_counter() - begin


def _cuda_timer(
    targets: Sequence[Target], device: torch.device, min_sample_s: float, graph: bool, once: bool
) -> Timer:
    plain = EventTimer(targets, device, 1)
    for start in range(WARMUP_CALLS):
        plain.sample(start)
    call_s, n = statistics.median(plain.sample(i) for i in range(3)), len(targets)
    if not graph:
        plain.calls = n if once else max(1, math.ceil(min_sample_s / max(call_s, 1e-7)))
        plain.estimate_s = call_s
        return plain
    calls = n if call_s > min_sample_s else n * max(1, math.ceil(MIN_GRAPH_CALLS / n))
    try:
        timer = GraphTimer(targets, device, calls)
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        plain.calls, plain.estimate_s = calls, call_s
        plain.note = f"no CUDA graph: {str(error).splitlines()[0][:200]}"
        return plain
    return timer


class _DeviceTimer:
    def __init__(self, targets: Sequence[Target], device: torch.device, calls: int) -> None:
        self.targets, self.device, self.calls = targets, device, calls
        self.outputs: dict[int, Any] = {}
        self.estimate_s, self.note = 0.0, ""
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.flush = _flush_buffer(device)

    def _elapsed_s(self) -> float:
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


def _mark_step() -> None:
    """Tell Inductor's CUDA-graph trees that earlier results are done with, if there can be any.

    Without a compiled subject torch's own function would first import the compiler, which takes seconds.
    """
    if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
        trees.mark_step_begin()


class EventTimer(_DeviceTimer):
    mode = "events"

    def sample(self, start: int) -> float:
        n, ring, targets = len(self.targets), self.outputs, self.targets
        order = [(start + i) % n for i in range(self.calls)]
        ring.clear()
        _mark_step()
        self.flush.zero_()
        torch.cuda.synchronize(self.device)
        self.begin.record()
        for slot in order:
            ring[slot] = None
            fn, args = targets[slot]
            ring[slot] = fn(*args)
        self.end.record()
        return self._elapsed_s()


class _Wander:
    """Moves the memory that calls get while a graph is captured, so that no one place decides what they take.

    An allocator hands the same few blocks to call after call, others in every process, and where they lie
    makes the same code up to 2.5 % faster or slower for good.  Blocks of about an output's size that are held
    for a few calls make the next ones find others.  Nothing is written to them.  ``result``: of a call; None
    where calls are too few and long to be moved.
    """

    def __init__(self, result: Any, device: torch.device) -> None:
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._bytes = max((t.numel() * t.element_size() for t in tensors), default=0)
        self.pads: deque[torch.Tensor] = deque(maxlen=PADS)
        self._device = device

    def on(self) -> None:
        if self._bytes and random.random() < 0.5:
            more = 512 * random.randrange(1 + min(self._bytes, PAD_MORE) // 512)
            self.pads.append(torch.empty(self._bytes + more, dtype=torch.uint8, device=self._device))


class GraphTimer(_DeviceTimer):
    mode = "graph"

    def __init__(self, targets: Sequence[Target], device: torch.device, calls: int) -> None:
        super().__init__(targets, device, calls)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for fn, args in targets[:WARMUP_CALLS]:
                warm = fn(*args)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        if len(targets) >= MANY:
            _move_on(device)
        self.graph = torch.cuda.CUDAGraph()
        results: dict[int, Any] = {}
        wander = _Wander(warm if len(targets) >= MANY else None, device)
        del warm
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for i in range(calls):
                fn, args = targets[i % len(targets)]
                results[i % len(targets)] = fn(*args)
                wander.on()
            wander.pads.clear()
        self.outputs = results
        for _ in range(2):
            self.sample(0)
        self.estimate_s = self.sample(0) / calls

    def sample(self, start: int) -> float:
        self.flush.zero_()
        self.begin.record()
        self.graph.replay()
        self.end.record()
        return self._elapsed_s()


_flush: dict[torch.device, torch.Tensor] = {}
_stones: dict[torch.device, list[torch.Tensor]] = {}


def flush_held() -> int:
    """Bytes that this process holds only to flush the cache between samples, or to move its memory about."""
    stones = sum(stone.numel() for held in _stones.values() for stone in held)
    return sum(buffer.numel() for buffer in _flush.values()) + stones


def _move_on(device: torch.device) -> None:
    """Have the next graph's memory come from elsewhere than the last one's.

    Where its results lie decides what a graph of short kernels takes, by up to 2.5 % on an H200, for as long
    as it lives; and the driver hands out the lowest memory that is free, so the last graph's.  So that goes
    back to the driver, and a random number of blocks takes it before the next capture can.
    """
    _stones.pop(device, None)
    torch.cuda.empty_cache()
    sizes = [size for size, most in STONES.items() for _ in range(random.randint(0, most))]
    _stones[device] = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def _flush_buffer(device: torch.device) -> torch.Tensor:
    if device not in _flush:
        _flush[device] = torch.empty(flush_bytes(device), dtype=torch.uint8, device=device)
    return _flush[device]


# -- the judge's side -------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """One timed sample: ``claimed_s`` for ``calls`` calls by the worker's clock, ``gated_s`` by ours."""

    claimed_s: float
    gated_s: float
    calls: int

    @property
    def per_call_s(self) -> float:
        return self.claimed_s / self.calls


class Arm(Protocol):
    name: str

    def sample(self, start: int) -> Sample: ...


@dataclass(slots=True)
class Rounds:
    """Samples per arm; the i-th sample of every arm belongs to the same round.  ``readings`` are of the
    device's state meanwhile, where it can be read."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)

    def times_s(self, arm: str) -> list[float]:
        return [s.per_call_s for s in self.samples[arm]]

    def median_us(self, arm: str) -> float:
        return statistics.median(self.times_s(arm)) * 1e6


PAUSE_S, QUIET_S = 0.002, 0.05
"""On a CPU: before each sample, and before the first one.  OpenMP threads spin for a while after their work
(`launch.OPENMP` bounds it in workers; 30 ms is usual in this process), and take a core from the next arm."""

GATE_NOISE_S = 1e-4

ALLOWANCE = {"cpu": (0.0, 0.0), "cuda": (0.05, GATE_NOISE_S)}
"""By what share, and by how many seconds a sample, a claim may fall short of what the judge saw and count.

On a GPU the overhead of a sample (two contexts taking turns, the flush, the copies) is as long as many
samples are, and differs between processes: for honest kernels on an H200 by up to 41 us a sample of 0.3 ms,
and by up to 2.5 % of samples of 1.5 to 12 ms."""


def interleave(
    arms: Sequence[Arm],
    rounds: int,
    *,
    buffers: int = 1,
    before_round: Callable[[], None] | None = None,
    after_round: Callable[[], None] | None = None,
    device: torch.device = CPU,
    pause_s: float | None = None,
    rng: random.Random | None = None,
) -> Rounds:
    """Time every arm once per round, in random order, for exactly ``rounds`` rounds.

    All arms of a round start on the same buffer.  ``before_round()`` and ``after_round()`` are not timed: new
    contents, checks.  ``pause_s``: see PAUSE_S, 0 on a GPU.
    """
    rng = rng or random.SystemRandom()
    pause_s = (PAUSE_S if device.type == "cpu" else 0.0) if pause_s is None else pause_s
    watch = Watch(device)
    result = Rounds({arm.name: [] for arm in arms}, watch.readings)
    with _quiet(pause_s):
        for number in range(-1, rounds):  # the first samples are never typical: one round does not count
            if before_round is not None:
                before_round()
            start = rng.randrange(buffers)
            for arm in rng.sample(list(arms), len(arms)):
                _before_sample(device, pause_s)
                sample = arm.sample(start)
                if number >= 0:
                    result.samples[arm.name].append(sample)
            watch.look()
            if after_round is not None:
                after_round()
    return result


_token: dict[torch.device, torch.Tensor] = {}


def _before_sample(device: torch.device, pause_s: float) -> None:
    """Bring the machine into the same state before every sample.

    A GPU takes a while to change from one process's context to another's.  Arms share processes or don't,
    so the judge's own context has its turn before each sample, and every arm pays for one change.
    """
    if pause_s:
        time.sleep(pause_s)
    if device.type == "cuda":
        if device not in _token:
            _token[device] = torch.zeros(1, device=device)
        _token[device].add_(1)
        torch.cuda.synchronize(device)


@contextmanager
def _quiet(pause_s: float) -> Iterator[None]:
    """Keep this process's own threads from spinning while others are timed: one thread until it is over."""
    threads = torch.get_num_threads()
    if pause_s:
        torch.set_num_threads(1)
        time.sleep(QUIET_S)
    try:
        yield
    finally:
        if pause_s:
            torch.set_num_threads(threads)


@contextmanager
def beside_workers(device: torch.device) -> Iterator[None]:
    """Keep this thread off the core where a CPU worker's first thread is bound, and waits awake."""
    if device.type != "cpu" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def gate_fault(candidate: Sequence[Sample], trusted: Sequence[Sample]) -> str:
    """Why the judge's clock contradicts the candidate's claims, or ``""``.

    The judge waits a little longer than a worker claims: message, wake-up, cache flush.  That overhead is
    the same for a trusted arm measured in the same rounds, so only what the candidate's exceeds it by
    counts.  On a busy machine a single wake-up can be late by more than a sample lasts; hence a sign test
    over the rounds, at one in a thousand, for an excess above a tenth of the time seen.
    """
    if any(s.claimed_s > s.gated_s or s.claimed_s <= 0 for s in candidate):
        return "claims more time than the judge saw pass, or none at all"
    excess = sorted(
        (c.gated_s - c.claimed_s) - (t.gated_s - t.claimed_s) - 0.1 * c.gated_s
        for c, t in zip(candidate, trusted, strict=True)
    )
    k = order_index(len(excess), 0.001)
    if k >= 0 and excess[k] > GATE_NOISE_S:
        claimed = statistics.median(s.claimed_s for s in candidate)
        seen = statistics.median(s.gated_s for s in candidate)
        overhead = statistics.median(s.gated_s - s.claimed_s for s in trusted)
        return (
            f"claims {claimed * 1e6:.1f} us a sample, but the judge's own clock saw {seen * 1e6:.1f} us, of "
            f"which {overhead * 1e6:.1f} us are its usual overhead"
        )
    return ""


def confirmed_s(
    candidate: Sequence[Sample],
    trusted: Sequence[Sample],
    device: torch.device = CPU,
    *,
    noise: float = 0.0,
) -> list[float]:
    """Seconds per call, round by round, that the judge's clock bears out: the headline is the slower account.

    `gate_fault` convicts only beyond doubt, and on a busy machine little is.  What counts here is the claim,
    or what the judge saw less the usual overhead, whichever is slower in the typical round (`ALLOWANCE`).
    ``noise``: the share of the usual overhead by which it differs between processes anyway.
    """
    usual = statistics.median(t.gated_s - t.claimed_s for t in trusted)
    seen = [c.gated_s - usual for c in candidate]
    claimed = [c.claimed_s for c in candidate]
    share, noise_s = ALLOWANCE[device.type]
    noise_s = max(noise_s, noise * usual)
    typical, told = statistics.median(seen), statistics.median(claimed)
    if told < (1 - share) * typical and typical - told > noise_s:
        return [max(a, b) / c.calls for a, b, c in zip(claimed, seen, candidate, strict=True)]
    return [c.per_call_s for c in candidate]
