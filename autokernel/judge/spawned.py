"""Whole-model subjects: a worker with judge-held inputs and outputs, and paired timing of two of them.

Outputs may be large (logits), so they cross once: the worker copies them into its arena, and `run` clones
them from there only when asked to.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel.judge import clock
from autokernel.judge.arena import Arena
from autokernel.judge.buffers import PATTERNS, whereabouts
from autokernel.judge.clock import Sample
from autokernel.judge.compare import error_of
from autokernel.judge.handle import Prepared, Worker, WorkerFault
from autokernel.judge.launch import Kind, Launcher
from autokernel.judge.layout import DTYPES, TensorSpec, fill, pack_specs
from autokernel.judge.protocol import OutputRecord
from autokernel.judge.stats import paired_ratio
from autokernel.records import Ratio
from autokernel.torch_flags import Tf32

SUBJECT = 0


@dataclass(frozen=True, slots=True)
class PairedResult:
    """``ratio`` > 1 means that ``b`` is faster than ``a``; the medians are us per call.

    ``drift_a`` and ``drift_b`` are the relative Frobenius distance between what the last timed call
    returned and what `run` returned before: 0 for a deterministic subject.  ``gate_fault`` is not empty
    when the judge's own clock contradicts what ``b`` claims, and then ``ratio`` means nothing.
    """

    ratio: Ratio
    a_us: float
    b_us: float
    drift_a: float
    drift_b: float
    gate_fault: str = ""


class SpawnedWorker:
    """One subject in a process of its own. Methods raise WorkerFault when it fails; then it is dead."""

    def __init__(
        self,
        launcher: Launcher,
        subject: dict[str, Any],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec] | None,
        *,
        device: torch.device,
        scratch: Path,
        ipc: bool,
        deadline_s: float | None,
        kind: Kind,
        tf32: Tf32,
        graph: bool,
    ) -> None:
        self.device, self._scratch, self._ipc, self._graph = device, scratch, ipc, graph
        self.deadline_s = deadline_s or launcher.deadlines.compile_s
        self._specs, end = pack_specs([TensorSpec(s.dtype, s.shape, s.stride) for s in inputs])
        self._inputs = Arena(device, end, scratch, ipc=ipc)
        self._outputs: Arena | None = None
        self._replaced: list[Arena] = []
        self.output_specs: list[TensorSpec] = []
        self.prepared: Prepared | None = None
        self.held_bytes = 0.0
        self._first_run = True
        self.worker = Worker(launcher, kind=kind, tf32=tf32)
        try:
            self.worker.load(SUBJECT, subject, deadline_s)
            self.worker.attach(inputs=(self._inputs, [self._specs]))
            if outputs is not None:
                self._attach_outputs([s.contiguous() for s in outputs])
        except WorkerFault:
            self.close()
            raise

    def _attach_outputs(self, specs: Sequence[TensorSpec]) -> None:
        if self._outputs is not None:
            self._replaced.append(self._outputs)  # the worker still maps it
        self.output_specs, end = pack_specs(specs)
        self._outputs = Arena(self.device, end, self._scratch, ipc=self._ipc)
        self.worker.attach(outputs=(self._outputs, [self.output_specs]))

    def set_inputs(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._specs):
            raise ValueError(f"{len(inputs)} inputs for a worker with {len(self._specs)}")
        for spec, value in zip(self._specs, inputs, strict=True):
            fill(self._inputs.view(spec), value)
        self._inputs.sync()

    def run(self, inputs: Sequence[Tensor] | None = None, *, copy: bool = True) -> list[Tensor]:
        """Call the subject on ``inputs`` (or the ones it has), and return its outputs, judge-held.

        ``copy=False`` returns views that the next run or timing overwrites.
        """
        if inputs is not None:
            self.set_inputs(inputs)
        deadline_s, self._first_run = (self.deadline_s if self._first_run else None), False
        if self._outputs is not None:
            self._outputs.bytes().fill_(PATTERNS[0])
            self._outputs.sync()
        ran = self.worker.run(SUBJECT, [0], deadline_s=deadline_s)
        records = ran.outputs.get(0, [])
        self.held_bytes = ran.held_bytes
        if not self._fits(records):  # the first run, or another structure: make room for it and run again
            shapes = [TensorSpec(DTYPES[r.dtype], r.shape, r.shape).contiguous() for r in records]
            self._attach_outputs(shapes)
            records = self.worker.run(SUBJECT, [0]).outputs.get(0, [])
            if not self._fits(records):
                raise WorkerFault("incorrect", "returns another structure on every call")
        return self._read(records, copy)

    def _fits(self, records: Sequence[OutputRecord]) -> bool:
        found = [(DTYPES[r.dtype], r.shape) for r in records]
        return self._outputs is not None and found == [(s.dtype, s.shape) for s in self.output_specs]

    def _read(self, records: Sequence[OutputRecord], copy: bool) -> list[Tensor]:
        assert self._outputs is not None
        size = self._outputs.nbytes
        views = [
            self._outputs.view(whereabouts(spec, record, 0, size))
            for spec, record in zip(self.output_specs, records, strict=True)
        ]
        return [v.clone() for v in views] if copy else views

    def prepare(self, min_sample_s: float | None = None) -> Prepared:
        """Warm up and size the samples; done once, by the first timing."""
        if self.prepared is None:
            self.prepared = self.worker.prepare(SUBJECT, [0], graph=self._graph, min_sample_s=min_sample_s)
        return self.prepared

    def sample(self) -> Sample:
        return self.worker.time(SUBJECT, 0)

    def timed_outputs(self) -> list[Tensor]:
        """Views of what the latest timed call returned."""
        records = self.worker.collect(SUBJECT).get(0, [])
        if not self._fits(records):
            raise WorkerFault("incorrect", "returns another structure when it is timed")
        return self._read(records, copy=False)

    def close(self) -> None:
        if hasattr(self, "worker"):
            self.worker.close()
        for arena in (self._inputs, self._outputs, *self._replaced):
            if arena is not None:
                arena.close()
        self._replaced.clear()

    def __enter__(self) -> SpawnedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Arm:
    def __init__(self, name: str, worker: SpawnedWorker) -> None:
        self.name, self.worker = name, worker

    def sample(self, start: int) -> Sample:
        return self.worker.sample()


def paired(
    a: SpawnedWorker, b: SpawnedWorker, pairs: int, inputs: Sequence[Tensor] | None = None
) -> PairedResult:
    """Time two workers in random order, pair by pair, on the same inputs.

    Raises WorkerFault when one of them fails.
    """
    before = {"a": a.run(inputs), "b": b.run(inputs)}
    for worker in (a, b):
        worker.prepare()
    rounds = clock.interleave([_Arm("a", a), _Arm("b", b)], pairs, device=a.device)
    drift = {name: _drift(worker, before[name]) for name, worker in (("a", a), ("b", b))}
    times = {name: rounds.times_s(name) for name in ("a", "b")}
    return PairedResult(
        ratio=paired_ratio(times["a"], times["b"]),
        a_us=rounds.median_us("a"),
        b_us=rounds.median_us("b"),
        drift_a=drift["a"],
        drift_b=drift["b"],
        gate_fault=clock.gate_fault(rounds.samples["b"], rounds.samples["a"]),
    )


def _drift(worker: SpawnedWorker, before: Sequence[Tensor]) -> float:
    pairs = zip(worker.timed_outputs(), before, strict=True)
    return max((0.0 if torch.equal(t, r) else error_of(t, r).frobenius for t, r in pairs), default=0.0)


def measure(worker: SpawnedWorker, samples: int = 15) -> float:
    """Median us per call."""
    worker.prepare()
    return statistics.median(worker.sample().per_call_s for _ in range(samples)) * 1e6
