"""The whole model decides: baselines, kernels added and left out one by one, the final measurement.

    baselines   what a user gets for free, each in a process of its own
    executor    what carries the graph: Inductor or the plain graph, with or without CUDA graphs
    adding      the kernels in order of expected gain, each set timed against the one before it
    leaving out one kernel at a time; what the model is not slower without is evicted
    final       fresh inputs, more pairs, error and memory: the only numbers that are published

All arms of a step are timed in the same rounds, in random order.  Everything that is measured is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autokernel import hardware
from autokernel.capture.graph import Graph
from autokernel.capture.source import LoadedModel
from autokernel.errors import AutokernelError
from autokernel.integrate.arms import Arm, Arms, KeptKernel
from autokernel.integrate.artifact import write_artifact
from autokernel.integrate.executors import executors_for
from autokernel.integrate.model_rows import ModelRows, interval, median_us
from autokernel.integrate.subjects import BASELINES
from autokernel.judge import Judge
from autokernel.judge.stats import paired_ratio
from autokernel.records import Experiment, Ratio

__all__ = ["EndToEnd", "KeptKernel", "Selection"]

SCREEN_ROUNDS, FINAL_ROUNDS = 30, 100
MAX_MEMORY_RATIO = 1.1
MAX_LEAVE_OUT_ROUNDS = 3
GROWTH_SAMPLES = 25

Say = Callable[[str], None]


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
        rows_are_old: bool = False,
        max_autotune: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.loaded, self.run_dir, self.judge = loaded, run_dir, judge
        self._journal, self._say = journal, say
        self._rows = list(rows)
        self._rows_are_old = rows_are_old
        self.max_autotune = max_autotune
        self.device = hardware.detect(loaded.spec.device)
        self.arms = Arms(loaded, judge, graphs)
        self.make = ModelRows(run_dir.name, self.device.name)

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
            if r.task == "model"
            and r.backend in BASELINES
            and r.latency_us is None
            and r.status != "infra_error"
        }
        missing = [n for n in self.baseline_names() if n not in known and n not in failed]
        if missing:
            arms = self.arms.start({n: {"baseline": n} for n in missing})
            try:
                known |= self._time_baselines(arms)
            finally:
                for arm in arms.values():
                    arm.close()
        return {n: t for n, t in known.items() if t is not None}

    def _current_baselines(self) -> dict[str, float]:
        """Baselines of this very process: those that a resumed run finds in its journal may have been timed
        on a machine in another state, and the best of them has to be the best now."""
        if self._rows_are_old:
            self._rows = []
        return self.baselines()

    def baseline_names(self) -> list[str]:
        names = ["eager"]
        if self.arms.kind == "cuda":
            names += ["eager-cudagraph", "compile-default", "compile-reduce-overhead", "compile-freezing"]
        elif _has_compiler():
            names += ["compile-default", "compile-freezing"]
        if self.max_autotune and (self.arms.kind == "cuda" or _has_compiler()):
            names.append("compile-max-autotune")
        return names

    def _time_baselines(self, arms: dict[str, Arm]) -> dict[str, float]:
        live = {n: a for n, a in arms.items() if a.worker is not None}
        rounds = self.arms.rounds(list(live.values()), SCREEN_ROUNDS)
        result: dict[str, float] = {}
        eager = rounds.get("eager")
        for name, arm in arms.items():
            samples = rounds[name] if name in live else None
            if samples is not None:
                result[name] = median_us(samples)
            self._journal(self.make.baseline(arm, samples, eager, "whole model as torch gives it"))
        return result

    # --- selection --------------------------------------------------------------------------------------

    def select(self, kept: Sequence[KeptKernel]) -> Selection:
        """Find the set of kernels that makes the whole model fastest, measure it, write ``optimized/``."""
        known = self._current_baselines()
        if not known:
            return Selection(why="no baseline could be measured")
        if not kept and self.arms.kind == "cpu":
            return Selection(why="no kernel won its region")  # and the plain graph is torch.compile's own
        best = min(known, key=lambda n: known[n])
        baseline = self.arms.start({best: {"baseline": best}})[best]
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
            self.arms.close()

    def _choose_executor(self, baseline: Arm, kernels: list[KeptKernel]) -> tuple[str, list[KeptKernel]]:
        """The fastest executor with all kernels in; kernels without which none would run are dropped."""
        names = executors_for(self.loaded.spec.device, _has_compiler())
        while True:
            self._say(f"Choosing what carries the graph, with {len(kernels)} kernels in …")
            arms = self.arms.start({n: self.arms.variant(kernels, n) for n in names})
            try:
                live = [a for a in arms.values() if a.ready]
                if live:
                    rounds = self._timed(baseline, live, SCREEN_ROUNDS)
                    for name, arm in arms.items():
                        self._write_variant(
                            arm,
                            name,
                            rounds,
                            baseline.name,
                            description=f"all {len(kernels)} kernels, {name}",
                        )
                    live = [a for a in live if a.ready]  # one may have failed while it was timed
                if live:
                    winner = min(live, key=lambda a: median_us(rounds[a.name]))
                    return winner.name, kernels
                if not kernels:
                    return names[0], kernels
                for name, arm in arms.items():
                    self._write_variant(arm, name, {}, baseline.name,
                                        description=f"all {len(kernels)} kernels, {name}")  # fmt: skip
            finally:
                for arm in arms.values():
                    arm.close()
            kernels = self._working_alone(kernels, names[0])

    def _working_alone(self, kernels: list[KeptKernel], executor: str) -> list[KeptKernel]:
        """All kernels together failed: keep those that work in the model one at a time."""
        arms = self.arms.start({k.id: self.arms.variant([k], executor) for k in kernels})
        good = []
        for kernel in kernels:
            arm = arms[kernel.id]
            if arm.ready:
                good.append(kernel)
            else:
                self._write_variant(arm, executor, {}, "", candidate=kernel.id,
                                    description=f"add {kernel.task.name}")  # fmt: skip
            arm.close()
        return good if len(good) < len(kernels) else good[:-1]

    def _add(self, baseline: Arm, executor: str, kernels: list[KeptKernel]) -> list[KeptKernel]:
        """Time the growing sets side by side; a kernel stays if its set beats the one before it."""
        if not kernels:
            return []
        self._say(f"Adding {len(kernels)} kernels one by one ({executor}) …")
        sets = {f"first {i}": kernels[:i] for i in range(len(kernels) + 1)}
        arms = self.arms.start({n: self.arms.variant(s, executor) for n, s in sets.items()})
        try:
            live = [a for a in arms.values() if a.ready]
            rounds = self._timed(baseline, live, SCREEN_ROUNDS)
            chosen: list[KeptKernel] = []
            before = "first 0" if arms["first 0"].ready else baseline.name
            for i, kernel in enumerate(kernels, start=1):
                arm = arms[f"first {i}"]
                gain = paired_ratio(rounds[before], rounds[arm.name]) if arm.ready else None
                helps = gain is not None and gain.lower_bound > 1.0
                if helps:
                    chosen.append(kernel)
                why = "" if helps or gain is None else f"the model is not faster with it ({interval(gain)})"
                self._write_variant(
                    arm, executor, rounds, baseline.name,
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

        arms = self.arms.start(
            {"as is": self.arms.variant(chosen, executor)}
            | {n: self.arms.variant(swapped(*pair), executor) for n, pair in swaps.items()}
        )
        try:
            if not arms["as is"].ready:
                return chosen
            live = [a for a in arms.values() if a.ready]
            rounds = self._timed(baseline, live, SCREEN_ROUNDS)
            best: dict[str, tuple[float, KeptKernel, KeptKernel]] = {}
            for name, (old, new) in swaps.items():
                arm = arms[name]
                gain = paired_ratio(rounds["as is"], rounds[name]) if arm.ready else None
                helps = gain is not None and gain.lower_bound > 1.0
                if helps and gain is not None and gain.ratio > best.get(old.id, (1.0,))[0]:
                    best[old.id] = (gain.ratio, old, new)
                why = "" if helps or gain is None else f"no better in the model ({interval(gain)})"
                self._write_variant(
                    arm, executor, rounds, baseline.name,
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
            arms = self.arms.start({"all": self.arms.variant(chosen, executor)}
                               | {n: self.arms.variant(s, executor) for n, s in without.items()})  # fmt: skip
            try:
                full = arms["all"]
                if not full.ready:
                    return []
                live = [a for a in arms.values() if a.ready]
                rounds = self._timed(baseline, live, SCREEN_ROUNDS)
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
                        arm, executor, rounds, baseline.name, parent=kernel.id,
                        gain=paired_ratio(rounds["all"], rounds[arm.name]), keep=evict,
                        reason=f"the model is not slower without it ({interval(needed)})" if evict else "",
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
        self.arms.renew()
        kept = [(k.task, k.source) for k in chosen]
        arms = self.arms.start(
            {"ours": self.arms.variant(chosen, executor)}
            | ({} if best == "eager" else {"eager": {"baseline": "eager"}})
        )
        ours = arms["ours"]
        selection = Selection(chosen, executor)
        try:
            if ours.ready:
                self.arms.check(baseline)
                timed = [a for a in arms.values() if a.worker is not None]
                rounds = self._timed(baseline, timed, FINAL_ROUNDS)
                if "ours" not in rounds:
                    raise AutokernelError(f"the result failed while it was timed: {ours.why_not}")
                selection.ratio = paired_ratio(rounds[baseline.name], rounds["ours"])
                selection.why = self._reject(baseline, ours, selection.ratio)
                eager = rounds.get("eager", rounds[baseline.name])
                vs_eager = paired_ratio(eager, rounds["ours"]).ratio
                for arm in (baseline, *timed):
                    if arm is not ours and arm.name in rounds:
                        samples = rounds[arm.name]
                        self._journal(self.make.baseline(arm, samples, eager, "again, beside the result"))
            else:
                rounds, vs_eager, selection.why = {}, None, ours.why_not
            selection.improved = ours.ready and not selection.why
            self._write_variant(
                ours, executor, rounds, baseline.name, keep=selection.improved, reason=selection.why,
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
            write_artifact(self.run_dir / "optimized", kept, executor, facts, self.arms.merges(kept))
        return selection

    def _timed(self, baseline: Arm, arms: Sequence[Arm], rounds: int) -> dict[str, list[float]]:
        times = self.arms.rounds([baseline, *arms], rounds)
        if baseline.name not in times:
            raise AutokernelError(
                f"{baseline.name} failed while it was timed ({baseline.why_not}); run again to go on"
            )
        return times

    def _reject(self, baseline: Arm, ours: Arm, ratio: Ratio) -> str:
        """Why the final variant may not ship, or ``""``."""
        if not ours.ready:
            return ours.why_not
        if ratio.lower_bound <= 1.0:
            return f"not faster than {baseline.name} ({interval(ratio)})"
        assert baseline.worker is not None and ours.worker is not None
        for worker in (baseline.worker, ours.worker):
            worker.run()
            worker.run()
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

    def _write_variant(
        self, arm: Arm, executor: str, rounds: dict[str, list[float]], baseline: str, **facts: Any
    ) -> None:
        self._journal(self.make.variant(arm, executor, rounds, baseline, **facts))


def _has_compiler() -> bool:
    from autokernel.backends import cpp_backend

    return cpp_backend.available("cpu")[0]
