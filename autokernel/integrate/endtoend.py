"""The whole model decides: baselines, kernels added and left out one by one, the final measurement.

    baselines   what a user gets for free, each in a process of its own
    executor    what carries the graph: Inductor or the plain graph, with or without CUDA graphs
    adding      the kernels in order of expected gain, each set timed against the one before it
    leaving out one kernel at a time; what the model is not slower without is evicted
    final       fresh inputs, more pairs, error and memory: the only numbers that are published

All arms of a step are timed in the same rounds, in random order.  Everything that is measured is a row.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from autokernel import hardware
from autokernel.capture.graph import Graph
from autokernel.capture.source import LoadedModel
from autokernel.integrate.artifact import write_artifact
from autokernel.integrate.executors import executors_for
from autokernel.integrate.merges import parameter_merges
from autokernel.integrate.subjects import BASELINES
from autokernel.integrate.whole_model import Agreement, Answer, WholeModelOracle, agree
from autokernel.judge import Judge, clock
from autokernel.judge.handle import WorkerFault
from autokernel.judge.spawned import SpawnedWorker
from autokernel.judge.stats import paired_ratio
from autokernel.records import Experiment, Ratio, Task
from autokernel.results import source_id
from autokernel.run_folder import now

SCREEN_ROUNDS, FINAL_ROUNDS = 30, 100
MAX_MEMORY_RATIO = 1.1
MIN_SAMPLE_S = {"cpu": 0.02, "cuda": 0.006}
MAX_LEAVE_OUT_ROUNDS = 3
GROWTH_SAMPLES = 25

Say = Callable[[str], None]


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

    def sample(self, start: int) -> clock.Sample:
        assert self.worker is not None
        return self.worker.sample()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


@dataclass
class Selection:
    """What came of it.  ``kernels`` are in the model; ``ratio`` is against the best baseline."""

    kernels: list[KeptKernel] = field(default_factory=list)
    executor: str = ""
    ratio: Ratio | None = None
    improved: bool = False
    why: str = ""


class EndToEnd:
    def __init__(
        self,
        loaded: LoadedModel,
        run_dir: Path,
        judge: Judge,
        journal: Callable[[Experiment], Experiment],
        *,
        graphs: Callable[[], Sequence[Graph]],
        rows: Sequence[Experiment] = (),
        max_autotune: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.loaded, self.run_dir, self.judge = loaded, run_dir, judge
        self._journal, self._graphs, self._say = journal, graphs, say
        self._rows = list(rows)
        self.max_autotune = max_autotune
        self.device = hardware.detect(loaded.spec.device)
        self.kind = "cuda" if loaded.spec.device.startswith("cuda") else "cpu"
        self._oracle = WholeModelOracle(loaded)
        self._comparing = Lock()
        self._weights: Path | None = None
        self._answers: list[Answer] = []

    # --- baselines --------------------------------------------------------------------------------------

    def baselines(self) -> dict[str, float]:
        """Latency in µs of every baseline that works; rows are written, also for those that fail.

        On a resumed run, what the journal holds is not measured again.
        """
        known = {
            r.backend: r.latency_us
            for r in self._rows
            if r.task == "model" and r.status == "baseline" and r.latency_us
        }
        failed = {
            r.backend
            for r in self._rows
            if r.task == "model" and r.backend in BASELINES and r.latency_us is None
        }
        missing = [n for n in self.baseline_names() if n not in known and n not in failed]
        if missing:
            arms = self._start({n: {"baseline": n} for n in missing})
            try:
                known |= self._time_baselines(arms)
            finally:
                for arm in arms.values():
                    arm.close()
        return {n: t for n, t in known.items() if t is not None}

    def baseline_names(self) -> list[str]:
        names = ["eager"]
        if self.kind == "cuda":
            names += ["eager-cudagraph", "compile-default", "compile-reduce-overhead", "compile-freezing"]
        elif _has_compiler():
            names += ["compile-default", "compile-freezing"]
        if self.max_autotune and (self.kind == "cuda" or _has_compiler()):
            names.append("compile-max-autotune")
        return names

    def _time_baselines(self, arms: dict[str, Arm]) -> dict[str, float]:
        live = {n: a for n, a in arms.items() if a.worker is not None}
        rounds = self._rounds(list(live.values()), SCREEN_ROUNDS)
        result: dict[str, float] = {}
        eager = rounds.get("eager")
        for name, arm in arms.items():
            if name in live:
                result[name] = _median_us(rounds[name])
                self._write_baseline(arm, rounds[name], eager, "whole model as torch gives it")
            else:
                row = self._row(arm, backend=name, description="whole model as torch gives it")
                row.status, row.reason = arm.fault.status if arm.fault else "crash", arm.why_not
                self._write(row)
        return result

    def _write_baseline(
        self, arm: Arm, samples: list[float], eager: list[float] | None, description: str
    ) -> None:
        row = self._row(arm, backend=arm.name, description=description)
        row.status, row.latency_us = "baseline", _median_us(samples)
        row.speedup_vs_pytorch = paired_ratio(eager, samples).ratio if eager else None
        row.reason = "" if arm.ready else f"differs from float64 more than eager does: {arm.why_not}"
        self._write(row)

    # --- selection --------------------------------------------------------------------------------------

    def select(self, kept: Sequence[KeptKernel]) -> Selection:
        """Find the set of kernels that makes the whole model fastest, measure it, write ``optimized/``."""
        known = self.baselines()
        if not known:
            return Selection(why="no baseline could be measured")
        best = min(known, key=lambda n: known[n])
        baseline = self._start({best: {"baseline": best}})[best]
        try:
            if baseline.worker is None:
                return Selection(why=f"the best baseline no longer starts: {baseline.why_not}")
            ordered = sorted(kept, key=lambda k: -k.expected_gain_us)
            executor, ordered = self._choose_executor(baseline, ordered)
            chosen = self._add(baseline, executor, ordered)
            chosen = self._swap(baseline, executor, ordered, chosen)
            chosen = self._leave_out(baseline, executor, chosen)
            return self._finish(best, baseline, executor, chosen)
        finally:
            baseline.close()
            self._oracle.close()

    def _choose_executor(self, baseline: Arm, kernels: list[KeptKernel]) -> tuple[str, list[KeptKernel]]:
        """The fastest executor with all kernels in; kernels without which none would run are dropped."""
        names = executors_for(self.loaded.spec.device, _has_compiler())
        while True:
            self._say(f"Choosing what carries the graph, with {len(kernels)} kernels in …")
            arms = self._start({n: self._variant(kernels, n) for n in names})
            try:
                live = [a for a in arms.values() if a.ready]
                if live:
                    rounds = self._rounds([baseline, *live], SCREEN_ROUNDS)
                    for name, arm in arms.items():
                        self._write_variant(
                            arm,
                            kernels,
                            name,
                            rounds,
                            baseline.name,
                            description=f"all {len(kernels)} kernels, {name}",
                        )
                    winner = min(live, key=lambda a: _median_us(rounds[a.name]))
                    return winner.name, kernels
                if not kernels:
                    return names[0], kernels
                for name, arm in arms.items():
                    self._write_variant(arm, kernels, name, {}, baseline.name,
                                        description=f"all {len(kernels)} kernels, {name}")  # fmt: skip
            finally:
                for arm in arms.values():
                    arm.close()
            kernels = self._working_alone(kernels, names[0])

    def _working_alone(self, kernels: list[KeptKernel], executor: str) -> list[KeptKernel]:
        """All kernels together failed: keep those that work in the model one at a time."""
        arms = self._start({k.id: self._variant([k], executor) for k in kernels})
        good = []
        for kernel in kernels:
            arm = arms[kernel.id]
            if arm.ready:
                good.append(kernel)
            else:
                self._write_variant(arm, [kernel], executor, {}, "", candidate=kernel.id,
                                    description=f"add {kernel.task.name}")  # fmt: skip
            arm.close()
        return good if len(good) < len(kernels) else good[:-1]

    def _add(self, baseline: Arm, executor: str, kernels: list[KeptKernel]) -> list[KeptKernel]:
        """Time the growing sets side by side; a kernel stays if its set beats the one before it."""
        if not kernels:
            return []
        self._say(f"Adding {len(kernels)} kernels one by one ({executor}) …")
        sets = {f"first {i}": kernels[:i] for i in range(len(kernels) + 1)}
        arms = self._start({n: self._variant(s, executor) for n, s in sets.items()})
        try:
            live = [a for a in arms.values() if a.ready]
            rounds = self._rounds([baseline, *live], SCREEN_ROUNDS)
            chosen: list[KeptKernel] = []
            before = "first 0" if arms["first 0"].ready else baseline.name
            for i, kernel in enumerate(kernels, start=1):
                arm = arms[f"first {i}"]
                gain = paired_ratio(rounds[before], rounds[arm.name]) if arm.ready else None
                helps = gain is not None and gain.lower_bound > 1.0
                if helps:
                    chosen.append(kernel)
                why = "" if helps or gain is None else f"the model is not faster with it ({_interval(gain)})"
                self._write_variant(
                    arm, [*sets[f"first {i - 1}"], kernel], executor, rounds, baseline.name,
                    candidate=kernel.id, gain=gain, keep=helps, reason=why,
                    description=f"add {kernel.task.name}",
                )  # fmt: skip
                if arm.ready:
                    before = arm.name
            return chosen
        finally:
            for arm in arms.values():
                arm.close()

    def _swap(
        self, baseline: Arm, executor: str, kernels: list[KeptKernel], chosen: list[KeptKernel]
    ) -> list[KeptKernel]:
        """Try the alternatives of every kernel in its place, all against the set as it stands.

        The best kernel of a region by itself need not be the best in the model: a custom kernel keeps the
        compiler from fusing across it, a rewrite into library calls does not.
        """
        swaps = {
            f"{k.id}->{i}": (k, k.instead(source)) for k in kernels for i, source in enumerate(k.alternatives)
        }
        if not swaps:
            return chosen
        self._say(f"Trying {len(swaps)} alternatives in the model …")

        def swapped(old: KeptKernel, new: KeptKernel) -> list[KeptKernel]:
            return [*(c for c in chosen if c is not old), new]

        arms = self._start(
            {"as is": self._variant(chosen, executor)}
            | {n: self._variant(swapped(*pair), executor) for n, pair in swaps.items()}
        )
        try:
            if not arms["as is"].ready:
                return chosen
            live = [a for a in arms.values() if a.ready]
            rounds = self._rounds([baseline, *live], SCREEN_ROUNDS)
            best: dict[str, tuple[float, KeptKernel, KeptKernel]] = {}
            for name, (old, new) in swaps.items():
                arm = arms[name]
                gain = paired_ratio(rounds["as is"], rounds[name]) if arm.ready else None
                helps = gain is not None and gain.lower_bound > 1.0
                if helps and gain is not None and gain.ratio > best.get(old.id, (1.0,))[0]:
                    best[old.id] = (gain.ratio, old, new)
                why = "" if helps or gain is None else f"no better in the model ({_interval(gain)})"
                self._write_variant(
                    arm, swapped(old, new), executor, rounds, baseline.name,
                    candidate=new.id, gain=gain, keep=helps, reason=why,
                    description=f"another kernel for {old.task.name}",
                )  # fmt: skip
            for _, old, new in best.values():
                chosen = swapped(old, new)
            return chosen
        finally:
            for arm in arms.values():
                arm.close()

    def _leave_out(self, baseline: Arm, executor: str, chosen: list[KeptKernel]) -> list[KeptKernel]:
        """Leave each kernel out in turn; evict what the model is not slower without, worst first."""
        for _ in range(MAX_LEAVE_OUT_ROUNDS):
            if not chosen:
                return chosen
            self._say(f"Leaving {len(chosen)} kernels out one by one …")
            without = {k.id: [c for c in chosen if c is not k] for k in chosen}
            arms = self._start({"all": self._variant(chosen, executor)}
                               | {n: self._variant(s, executor) for n, s in without.items()})  # fmt: skip
            try:
                full = arms["all"]
                if not full.ready:
                    return []
                live = [a for a in arms.values() if a.ready]
                rounds = self._rounds([baseline, *live], SCREEN_ROUNDS)
                useless: list[tuple[float, KeptKernel]] = []
                for kernel in chosen:
                    arm = arms[kernel.id]
                    if not arm.ready:
                        continue
                    needed = paired_ratio(rounds[arm.name], rounds["all"])
                    evict = needed.lower_bound <= 1.0
                    if evict:
                        useless.append((needed.ratio, kernel))
                    self._write_variant(
                        arm, without[kernel.id], executor, rounds, baseline.name, parent=kernel.id,
                        gain=paired_ratio(rounds["all"], rounds[arm.name]), keep=evict,
                        reason=f"the model is not slower without it ({_interval(needed)})" if evict else "",
                        description=f"leave out {kernel.task.name}",
                    )  # fmt: skip
            finally:
                for arm in arms.values():
                    arm.close()
            if not useless:
                return chosen
            worst = min(useless, key=lambda pair: pair[0])[1]
            chosen = [k for k in chosen if k is not worst]
        return chosen

    def _finish(self, best: str, baseline: Arm, executor: str, chosen: list[KeptKernel]) -> Selection:
        self._say("Measuring the result on fresh inputs …")
        self._answers = []  # fresh inputs: a winner is measured again before it is published
        kept = [(k.task, k.source) for k in chosen]
        arms = self._start(
            {"ours": self._variant(chosen, executor)}
            | ({} if best == "eager" else {"eager": {"baseline": "eager"}})
        )
        ours = arms["ours"]
        selection = Selection(chosen, executor)
        try:
            if ours.ready:
                self._check(baseline)
                timed = [baseline, *(a for a in arms.values() if a.worker is not None)]
                rounds = self._rounds(timed, FINAL_ROUNDS)
                selection.ratio = paired_ratio(rounds[baseline.name], rounds["ours"])
                selection.why = self._reject(baseline, ours, selection.ratio)
                eager = rounds.get("eager", rounds[baseline.name])
                vs_eager = paired_ratio(eager, rounds["ours"]).ratio
                for arm in timed:
                    if arm is not ours:
                        self._write_baseline(arm, rounds[arm.name], eager, "again, beside the result")
            else:
                rounds, vs_eager, selection.why = {}, None, ours.why_not
            selection.improved = ours.ready and not selection.why
            self._write_variant(
                ours, chosen, executor, rounds, baseline.name, keep=selection.improved, reason=selection.why,
                candidate=",".join(k.id for k in chosen), strategy="final", vs_eager=vs_eager,
                description=f"{executor}, {len(chosen)} kernels",
            )  # fmt: skip
        finally:
            for arm in arms.values():
                arm.close()
        if selection.improved and selection.ratio is not None:
            facts = {
                "model": self.loaded.spec.to_json(),
                "identity": self.loaded.identity,
                "device": self.device.to_json(),
                "versions": {k: v for k, v in hardware.versions().items() if v is not None},
                "best_baseline": best,
                "speedup_vs_best_baseline": selection.ratio.ratio,
                "ci": [selection.ratio.low, selection.ratio.high],
            }
            merges = parameter_merges(self.loaded.model, self._graphs(), kept)
            write_artifact(self.run_dir / "optimized", kept, executor, facts, merges)
        return selection

    def _reject(self, baseline: Arm, ours: Arm, ratio: Ratio) -> str:
        """Why the final variant may not ship, or ``""``."""
        if ratio.lower_bound <= 1.0:
            return f"not faster than {baseline.name} ({_interval(ratio)})"
        assert baseline.worker is not None and ours.worker is not None
        baseline.worker.run()
        ours.worker.run()
        theirs, mine = baseline.worker.held_bytes, ours.worker.held_bytes
        if theirs and mine > MAX_MEMORY_RATIO * theirs:
            return (
                f"peak memory {mine / 2**20:.0f} MiB, {baseline.name} {theirs / 2**20:.0f} (limit 1.1 times)"
            )
        for _ in range(GROWTH_SAMPLES):  # several calls each
            ours.worker.sample()
        ours.worker.run()
        if theirs and ours.worker.held_bytes > 1.02 * mine + 2**21:
            later = ours.worker.held_bytes / 2**20
            return f"memory grows with every call: {mine / 2**20:.0f} -> {later:.0f} MiB"
        return ""

    # --- arms -------------------------------------------------------------------------------------------

    def _variant(self, kernels: Sequence[KeptKernel], executor: str) -> dict[str, Any]:
        """An artifact of its own for one set of kernels."""
        key = source_id("\n".join([executor, *sorted(k.id for k in kernels)]))
        folder = self.judge.scratch / "variants" / key
        if not (folder / "manifest.json").exists():
            kept = [(k.task, k.source) for k in kernels]
            merges = parameter_merges(self.loaded.model, self._graphs(), kept) if kept else {}
            write_artifact(folder, kept, executor, {}, merges)
        return {"artifact": str(folder)}

    def _start(self, variants: dict[str, dict[str, Any]]) -> dict[str, Arm]:
        """Start, compile and check all variants, several at a time; nothing is timed meanwhile."""
        inputs = self._fresh()[0].inputs
        common = {"spec": self.loaded.spec.to_json(), "weights": str(self._saved_weights())}

        def start(item: tuple[str, dict[str, Any]]) -> Arm:
            name, variant = item
            arm = Arm(name)
            subject = {
                "kind": "factory",
                "module": "autokernel.integrate.subjects",
                "function": "make_subject",
                "args": common | variant,
            }
            try:
                tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
                arm.worker = self.judge.spawn(subject, inputs, allow_tf32=tf32)
                self._check(arm)
            except WorkerFault as fault:
                arm.close()
                arm.worker, arm.fault = None, fault
            return arm

        begun = time.monotonic()
        workers = max(2, min(10, (os.cpu_count() or 2) * 5 // 8))
        with ThreadPoolExecutor(workers) as pool:
            arms = {arm.name: arm for arm in pool.map(start, variants.items())}
        for arm in arms.values():  # they ran side by side: each one's share of the wall clock
            arm.seconds = (time.monotonic() - begun) / len(arms)
        return arms

    def _check(self, arm: Arm) -> None:
        """Run a variant on every answer's inputs and compare."""
        assert arm.worker is not None
        answers = self._fresh()
        outputs = [arm.worker.run(a.inputs) for a in answers]
        with self._comparing:  # float64 copies of large outputs: one set at a time
            arm.agreement = agree(answers, outputs)

    def _fresh(self) -> list[Answer]:
        if not self._answers:
            self._answers = [self._oracle.answer(secrets.randbelow(2**31)) for _ in range(2)]
        return self._answers

    def _saved_weights(self) -> Path:
        if self._weights is None:
            self._weights = self.judge.scratch / "weights.pt"
            torch.save({k: v.cpu() for k, v in self.loaded.model.state_dict().items()}, self._weights)
        return self._weights

    def _rounds(self, arms: Sequence[Arm], rounds: int) -> dict[str, list[float]]:
        """Seconds per call of every arm, round by round, all on the same inputs."""
        self.judge.launcher.settle()
        inputs = self._fresh()[0].inputs
        for arm in arms:
            assert arm.worker is not None
            arm.worker.set_inputs(inputs)
            arm.worker.prepare(MIN_SAMPLE_S[self.kind])
        result = clock.interleave(list(arms), rounds)
        return {arm.name: result.times_s(arm.name) for arm in arms}

    # --- rows -------------------------------------------------------------------------------------------

    def _row(self, arm: Arm, *, backend: str, description: str) -> Experiment:
        held = arm.worker.held_bytes / 2**20 if arm.worker is not None else 0.0
        return Experiment(
            experiment=0,
            tag=self.run_dir.name,
            kernel_type="model",
            peak_vram_mb=held or None,
            description=description,
            time=now(),
            task="model",
            backend=backend,
            device=self.device.name,
            error_ratio=arm.agreement.error_ratio if arm.agreement else None,
            seconds=round(arm.seconds, 2),
        )

    def _write_variant(
        self,
        arm: Arm,
        kernels: Sequence[KeptKernel],
        executor: str,
        rounds: dict[str, list[float]],
        baseline: str,
        *,
        candidate: str = "",
        parent: str = "",
        gain: Ratio | None = None,
        keep: bool = False,
        reason: str = "",
        strategy: str = "",
        vs_eager: float | None = None,
        description: str,
    ) -> None:
        row = self._row(arm, backend="autokernel", description=description)
        row.candidate, row.parent, row.strategy = candidate, parent, strategy or executor
        if arm.name in rounds:
            versus = paired_ratio(rounds[baseline], rounds[arm.name])
            row.status, row.reason = ("keep" if keep else "discard"), reason
            row.latency_us = _median_us(rounds[arm.name])
            row.speedup_vs_best_baseline = versus.ratio
            row.ci_low, row.ci_high = versus.low, versus.high
            row.speedup_vs_parent = gain.ratio if gain else None
            row.speedup_vs_pytorch = vs_eager
        else:
            row.status = arm.fault.status if arm.fault else "incorrect"
            row.reason = arm.why_not
        self._write(row)

    def _write(self, row: Experiment) -> None:
        row.__post_init__()  # the status was set after construction
        self._journal(row)


def _median_us(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] * 1e6


def _interval(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f}, 95 % interval {ratio.low:.3f} to {ratio.high:.3f}"


def _has_compiler() -> bool:
    from autokernel.backends import cpp_backend

    return cpp_backend.available("cpu")[0]
