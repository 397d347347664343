"""Variants of one kernel (points of its SPACE) looked at quickly: compiled side by side, timed one by one.

Several untrusted workers share the points.  Each point is checked on one secret case and timed alone, by its
worker's clock; ``discard`` carries that time, and whatever wins has to go through `TaskJudge.judge` like any
other candidate.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

from autokernel.judge.buffers import OutputBuffers
from autokernel.judge.cases import Case, worst_e0
from autokernel.judge.compare import Measures
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.launch import LaunchError
from autokernel.records import Verdict

if TYPE_CHECKING:
    from autokernel.judge.task_judge import TaskJudge

SAMPLES = 7
LOG_LIMIT = 8000
MAX_WORKERS = 8


@dataclass(slots=True)
class _Lane:
    """One worker and its output area; the worker is started when there is work, again after it died."""

    outputs: OutputBuffers
    worker: Worker | None = None

    def rest(self) -> None:
        """Nothing that a point may have left running in it disturbs what is timed from here on."""
        if self.worker is not None and not self.worker.closed:
            self.worker.rest()


@dataclass(slots=True)
class _Point:
    """A source on its way: ``verdict`` is set as soon as it has ended; ``worker``, of ``lane``, holds it."""

    source: Path
    number: int
    lane: _Lane | None = None
    worker: Worker | None = None
    verdict: Verdict | None = None
    ratio: float | None = None
    seconds: float = 0.0


class Sweep:
    """The workers for one task's sweeps; kept from one sweep to the next."""

    def __init__(self, judge: TaskJudge) -> None:
        self.judge = judge
        self._lanes: list[_Lane] = []
        self._numbers = itertools.count()
        self._width = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // (2 if judge.graph else 1)))

    def run(self, sources: Sequence[Path]) -> list[Verdict]:
        """One verdict per source, in order."""
        judge = self.judge
        with judge.owner.preparing:
            case = judge.maker.make("normal")
            e0 = worst_e0([case, judge.maker.make("normal")])
        judge.inputs.write_statics(case.inputs)
        for slot in range(judge.inputs.count):
            judge.inputs.write(slot, case.inputs)
        judge.inputs.arena.sync()
        points = [_Point(source, next(self._numbers)) for source in sources]
        width = min(self._width, len(points))
        while len(self._lanes) < width:
            self._lanes.append(_Lane(judge.new_outputs(slots=1)))
        lanes: Queue[_Lane] = Queue()
        for lane in self._lanes[:width]:
            lanes.put(lane)

        def compiled(point: _Point) -> None:
            lane = lanes.get()
            try:
                self._guard(point, lambda: self._check(lane, point, case, e0))
            finally:
                lane.rest()
                lanes.put(lane)

        with ThreadPoolExecutor(width) as pool:
            list(pool.map(compiled, points))
        judge.launcher.settle()
        for point in points:
            self._guard(point, lambda point=point: self._measure(point, case, e0))
            if point.lane is not None:
                point.lane.rest()
        return [self._verdict(point) for point in points]

    def close(self) -> None:
        for lane in self._lanes:
            if lane.worker is not None:
                lane.worker.close()
            lane.outputs.close()

    def _check(self, lane: _Lane, point: _Point, case: Case, e0: Sequence[Measures]) -> None:
        """Load and call it once; compilers run here."""
        judge = self.judge
        if lane.worker is None or lane.worker.closed:
            lane.worker = judge.start_worker(lane.outputs)
        lane.worker.load(point.number, judge.kernel_spec(point.source))
        lane.outputs.poison()
        ran = lane.worker.run(point.number, [0], first=True)
        with judge.owner.preparing:
            result = judge.maker.check(case, lane.outputs.outputs(0, ran.outputs.get(0, [])), e0)
        if not result.ok:
            raise WorkerFault("incorrect", result.reason)
        point.lane, point.worker, point.ratio = lane, lane.worker, result.ratio

    def _measure(self, point: _Point, case: Case, e0: Sequence[Measures]) -> None:
        if point.verdict is not None or point.lane is None:
            return
        if point.worker is None or point.worker.closed:  # another point has taken it down
            self._check(point.lane, point, case, e0)
        worker = point.worker
        assert worker is not None
        prepared = self.judge.ready(worker, point.number)
        samples = [worker.time(point.number, 0).per_call_s for _ in range(SAMPLES)]
        note = f"; {prepared.note}" if prepared.note else ""
        point.verdict = Verdict(
            "discard",
            f"a point of a search, not promoted{note}",
            error_ratio=point.ratio,
            latency_us=statistics.median(samples) * 1e6,
        )

    @staticmethod
    def _guard(point: _Point, step: Callable[[], None]) -> None:
        begin = time.perf_counter()
        try:
            step()
        except WorkerFault as fault:
            point.verdict = Verdict(fault.status, fault.reason, log=fault.log[-LOG_LIMIT:])
        except LaunchError as error:
            point.verdict = Verdict("infra_error", str(error))
        point.seconds += time.perf_counter() - begin

    @staticmethod
    def _verdict(point: _Point) -> Verdict:
        assert point.verdict is not None
        point.verdict.seconds = point.seconds
        return point.verdict
