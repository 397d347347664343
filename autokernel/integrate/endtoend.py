"""The whole model decides: baselines, the selection of kernels, the final measurement.

    baselines   what a user gets for free, each in a process of its own
    selection   see `autokernel.integrate.selection`
    final       fresh inputs, fresh processes, more pairs, error and memory: the only published numbers

The same artifact can be steadily some percent faster in one process than in another (where its memory lies,
say), so that the final measurement has several of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autokernel import hardware
from autokernel.capture.graph import Graph
from autokernel.capture.source import LoadedModel
from autokernel.errors import AutokernelError
from autokernel.integrate.arms import Arm, Arms, KeptKernel
from autokernel.integrate.artifact import write_artifact
from autokernel.integrate.executors import executors_for
from autokernel.integrate.model_rows import ModelRows, interval, median_us
from autokernel.integrate.selection import ROUNDS, Selector, close, counted
from autokernel.integrate.subjects import BASELINES
from autokernel.judge import Judge
from autokernel.judge.stats import paired_ratio
from autokernel.records import Experiment, Ratio

__all__ = ["EndToEnd", "KeptKernel", "Selection"]

PROCESSES = 3
"""How many processes each side of the final measurement has."""
FINAL_ROUNDS = 34
"""Every round gives one pair per process: a hundred pairs."""
MAX_MEMORY_RATIO = 1.1
GROWTH_SAMPLES = 25


@dataclass
class Selection:
    """What came of it.  ``kernels`` are in the model; ``ratio`` is against the best baseline."""

    kernels: list[KeptKernel] = field(default_factory=list)
    executor: str = ""
    ratio: Ratio | None = None
    improved: bool = False
    why: str = ""
    too_large: bool = False
    """Whether it is its memory alone that keeps the model with these kernels from being shipped."""


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
        say: Callable[[str], None] = lambda text: None,
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
        rounds = self.arms.rounds(list(live.values()), ROUNDS)
        result: dict[str, float] = {}
        eager = rounds.get("eager")
        for name, arm in arms.items():
            samples = rounds[name] if name in live else None
            if samples is not None:
                result[name] = median_us(samples)
            text = self._under("whole model as torch gives it")
            self._journal(self.make.baseline(arm, samples, eager, text))
        return result

    def _under(self, description: str) -> str:
        """With the conditions of the latest timing, where they are known."""
        return "; ".join(part for part in (description, self.arms.conditions) if part)

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
            selector = Selector(self.arms, baseline, self.make, self._journal, self._say)
            chosen = selector.run(kept, executors_for(self.loaded.spec.device, _has_compiler(), known))
            while True:
                selection = self._finish(best, selector, chosen)
                if not selection.too_large or not chosen:
                    return selection
                chosen = selector.without_the_largest(chosen)
                self._say(f"{selection.why}: once more with {counted(chosen, 'kernel')}")
        finally:
            baseline.close()
            self.arms.close()

    def _finish(self, best: str, selector: Selector, chosen: list[KeptKernel]) -> Selection:
        self._say("Measuring the result on fresh inputs …")
        self.arms.renew()
        kept = [(k.task, k.source) for k in chosen]
        baseline, executor = selector.baseline, selector.executor
        artifact, theirs = self.arms.variant(chosen, executor), {"baseline": best}
        copies = range(2, PROCESSES + 1)
        arms = self.arms.start(
            {"ours": artifact}
            | ({} if best == "eager" else {"eager": {"baseline": "eager"}})
            | {f"ours {i}": artifact for i in copies}
            | {f"{best} {i}": theirs for i in copies}
        )
        ours = arms["ours"]
        selection = Selection(chosen, executor)
        try:
            rounds: dict[str, list[float]] = {}
            vs_eager, spread = None, ""
            broken = [a for n, a in arms.items() if n.startswith("ours") and not a.ready]
            if not broken:
                self.arms.check(baseline)
                samples = self.arms.rounds(
                    [baseline, *(a for a in arms.values() if a.worker is not None)], FINAL_ROUNDS
                )
                broken = [a for n, a in arms.items() if n.startswith("ours") and not a.ready]
                if baseline.name not in samples:
                    raise AutokernelError(f"{best} failed while it was timed ({baseline.why_not}); run again")
            if broken:
                selection.why = broken[0].why_not
            else:
                rounds, spread = _sides(samples, best)
                selection.ratio = paired_ratio(rounds[best], rounds["ours"])
                selection.why = self._reject(baseline, ours, selection.ratio)
                if not selection.why:
                    selection.why = self._memory(baseline, ours)
                    selection.too_large = bool(selection.why)
                vs_eager = paired_ratio(rounds["eager"], rounds["ours"]).ratio
                for arm in (baseline, arms.get("eager")):
                    if arm is not None and arm.name in rounds:
                        row = self.make.baseline(
                            arm, rounds[arm.name], rounds["eager"], self._under("again, beside the result")
                        )
                        self._journal(row)
            selection.improved = not selection.why
            row = self.make.variant(
                ours, executor, rounds, baseline.name, keep=selection.improved, reason=selection.why,
                candidate=",".join(k.id for k in chosen), strategy="final", vs_eager=vs_eager,
                description=self._under(f"{executor}, {counted(chosen, 'kernel')}{spread}"),
            )  # fmt: skip
            self._journal(row)
        finally:
            close(arms)
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

    def _reject(self, baseline: Arm, ours: Arm, ratio: Ratio) -> str:
        """Why the final variant may not ship, or ``""``."""
        if not ours.ready:
            return ours.why_not
        if ratio.lower_bound <= 1.0:
            return f"not faster than {baseline.name} ({interval(ratio)})"
        return ""

    def _memory(self, baseline: Arm, ours: Arm) -> str:
        """Why the final variant takes too much device memory, or ``""``."""
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


def _sides(samples: dict[str, list[float]], best: str) -> tuple[dict[str, list[float]], str]:
    """The samples of each side, process by process, so that the n-th of one pairs with the n-th of another
    (eager has one process, which pairs with all); and what the single processes of ours took."""
    sides = {
        side: [s for name, s in samples.items() if name == side or name.startswith(f"{side} ")]
        for side in ("ours", best, "eager")
    }
    count = min(len(sides["ours"]), len(sides[best]))
    rounds = {
        side: [t for i in range(count) for t in same[min(i, len(same) - 1)]]
        for side, same in sides.items()
        if same
    }
    single = sorted(median_us(s) for s in sides["ours"])
    spread = f"; {len(single)} processes: {', '.join(f'{us:.0f}' for us in single)} µs"
    return rounds, spread if len(single) > 1 else ""


def _has_compiler() -> bool:
    from autokernel.backends import cpp_backend

    return cpp_backend.available("cpu")[0]
