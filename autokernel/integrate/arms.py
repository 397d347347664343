"""Variants of the whole model, each in a process of its own, that are checked and timed side by side."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from autokernel.capture.graph import Graph
from autokernel.capture.source import LoadedModel
from autokernel.integrate.artifact import write_artifact
from autokernel.integrate.merges import parameter_merges
from autokernel.integrate.subjects import BASELINES
from autokernel.integrate.whole_model import Agreement, Answer, WholeModelOracle, agree
from autokernel.judge import Judge, clock
from autokernel.judge.conditions import describe
from autokernel.judge.handle import WorkerFault
from autokernel.judge.launch import LaunchError
from autokernel.judge.spawned import SpawnedWorker
from autokernel.records import Task
from autokernel.results import source_id
from autokernel.torch_flags import tf32

MIN_SAMPLE_S = {"cpu": 0.02, "cuda": 0.006}
"""A sample lasts at least so long: several calls on a GPU, so that the host runs ahead, as when serving."""
PATIENCE, MIN_PATIENCE_S = 3.0, 60.0
"""A variant may take so many times as long to start as the slowest baseline did, and at least so long."""


@dataclass(frozen=True)
class KeptKernel:
    """A kernel that won as a region and now asks to be in the model."""

    task: Task
    source: Path
    region_speedup: float
    alternatives: tuple[Path, ...] = ()
    """Other kernels for the same region that were correct and no slower than the baselines."""

    def instead(self, source: Path) -> KeptKernel:
        return KeptKernel(self.task, source, self.region_speedup)

    @property
    def id(self) -> str:
        return source_id(self.source.read_text(encoding="utf-8"))

    @property
    def expected_gain_us(self) -> float:
        return (self.task.device_time_us or 0.0) * (1.0 - 1.0 / max(self.region_speedup, 1e-9))


@dataclass
class Arm:
    """One variant of the model in a process of its own, or the reason why there is none."""

    name: str
    worker: SpawnedWorker | None = None
    fault: WorkerFault | None = None
    agreement: Agreement | None = None
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.agreement is not None and self.agreement.ok

    @property
    def why_not(self) -> str:
        if self.fault is not None:
            return self.fault.reason
        return self.agreement.reason if self.agreement is not None else "not started"

    def alive(self) -> SpawnedWorker:
        assert self.worker is not None
        return self.worker

    def sample(self, start: int) -> clock.Sample:
        return self.alive().sample()

    def fail(self, fault: WorkerFault) -> None:
        self.close()
        self.worker, self.fault = None, fault

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails in here costs this arm only."""
        try:
            yield
        except WorkerFault as fault:
            self.fail(fault)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


class Arms:
    """Starts, checks and times variants of one model.

    ``graphs`` gives the model's captured graphs (for the parameters that kernels want side by side).
    """

    def __init__(self, loaded: LoadedModel, judge: Judge, graphs: Callable[[], Sequence[Graph]]) -> None:
        self.loaded, self.judge, self._graphs = loaded, judge, graphs
        self.kind = "cuda" if loaded.spec.device.startswith("cuda") else "cpu"
        self._oracle = WholeModelOracle(loaded)
        self._comparing = Lock()
        self._weights: Path | None = None
        self._answers: list[Answer] = []
        self._baseline_s = 0.0
        self.conditions = ""
        """The device's state in the latest `rounds`, in words; ``""`` where it can't be read."""

    def merges(self, kept: Sequence[tuple[Task, Path]]) -> dict[str, list[dict[str, Any]]]:
        return parameter_merges(self.loaded.model, self._graphs(), kept) if kept else {}

    def variant(self, kernels: Sequence[KeptKernel], executor: str) -> dict[str, Any]:
        """An artifact of its own for one set of kernels."""
        key = source_id("\n".join([executor, *sorted(k.id for k in kernels)]))
        folder = self.judge.scratch / "variants" / key
        if not (folder / "manifest.json").exists():
            kept = [(k.task, k.source) for k in kernels]
            write_artifact(folder, kept, executor, {}, self.merges(kept))
        return {"artifact": str(folder)}

    def start(self, variants: dict[str, dict[str, Any]]) -> dict[str, Arm]:
        """Start, compile and check all variants, several at a time; nothing is timed meanwhile."""
        inputs = self.answers()[0].inputs
        common = {"spec": self.loaded.spec.to_json(), "weights": str(self._saved_weights())}

        def start(item: tuple[str, dict[str, Any]]) -> Arm:
            name, variant = item
            begun = time.monotonic()
            arm = self._start_one(name, common | variant, inputs)
            if arm.fault is not None and arm.fault.status == "timeout" and "baseline" not in variant:
                # Several are compiled at once; one that hangs then need not hang again.
                warnings.warn(f"{name}: {arm.fault.reason}; starting it once more", stacklevel=2)
                arm = self._start_one(name, common | variant, inputs)
            if arm.ready and "baseline" in variant:
                self._baseline_s = max(self._baseline_s, time.monotonic() - begun)
            return arm

        _ = self.judge.ipc  # found out once, before several threads ask
        begun = time.monotonic()
        workers = max(2, min(10, (os.cpu_count() or 2) * 5 // 8))
        with ThreadPoolExecutor(workers) as pool:
            arms = {arm.name: arm for arm in pool.map(start, variants.items())}
        for arm in arms.values():  # they ran side by side: each one's share of the wall clock
            arm.seconds = (time.monotonic() - begun) / len(arms)
        return arms

    def _start_one(self, name: str, args: dict[str, Any], inputs: Sequence[torch.Tensor]) -> Arm:
        arm = Arm(name)
        subject = {
            "kind": "factory",
            "module": "autokernel.integrate.subjects",
            "function": "make_subject",
            "args": args,
        }
        patience_s = max(MIN_PATIENCE_S, PATIENCE * self._baseline_s)
        deadline_s = patience_s if self._baseline_s and "baseline" not in args else None
        try:
            arm.worker = self.judge.spawn(subject, inputs, deadline_s=deadline_s, tf32=tf32())
            self.check(arm)
        except WorkerFault as fault:
            arm.fail(fault)
        except (LaunchError, torch.OutOfMemoryError) as error:
            arm.fail(WorkerFault("infra_error", str(error).splitlines()[0]))
        return arm

    def check(self, arm: Arm) -> None:
        """Run a variant on every answer's inputs and compare."""
        assert arm.worker is not None
        answers = self.answers()
        outputs = [arm.worker.run(a.inputs) for a in answers]
        with self._comparing:  # float64 copies of large outputs: one set at a time
            arm.agreement = agree(answers, outputs)

    def answers(self) -> list[Answer]:
        if not self._answers:
            self._answers = [self._oracle.answer(secrets.randbelow(2**31)) for _ in range(2)]
        return self._answers

    def renew(self) -> None:
        """Fresh inputs from here on: a winner is measured again before it is published."""
        self._answers = []

    def close(self) -> None:
        self._oracle.close()

    def _saved_weights(self) -> Path:
        if self._weights is None:
            self._weights = self.judge.scratch / "weights.pt"
            torch.save({k: v.cpu() for k, v in self.loaded.model.state_dict().items()}, self._weights)
        return self._weights

    def rounds(self, arms: Sequence[Arm], rounds: int) -> dict[str, list[float]]:
        """Seconds per call of every arm, round by round, all on the same inputs.

        What the last timed call of a variant returned is checked like any other output of it.
        """
        self.judge.launcher.settle()
        answer = self.answers()[0]
        inputs = answer.inputs
        for arm in arms:
            with arm.guarded():
                worker = arm.alive()
                worker.set_inputs(inputs)
                worker.prepare(MIN_SAMPLE_S[self.kind])
        while True:
            live = [arm for arm in arms if arm.worker is not None]
            try:
                result = clock.interleave(live, rounds, device=self.judge.device)
                break
            except WorkerFault as fault:  # the others are timed again without it
                dead = [arm for arm in live if arm.worker is not None and arm.worker.worker.closed]
                if not dead:
                    raise
                for arm in dead:
                    arm.fail(fault)
        for arm in live:
            if arm.ready and arm.name.split()[0] not in BASELINES:
                with arm.guarded():
                    found = agree([answer], [arm.alive().timed_outputs()])
                    if not found.ok:
                        arm.agreement = Agreement(
                            False, f"in a timed call: {found.reason}", found.error_ratio
                        )
        self.conditions = describe(result.readings)
        return {arm.name: result.times_s(arm.name) for arm in live}
