"""Which kernels stay in the model, and what carries the graph: decided by the whole model's own time.

    trying        the kernels in order of expected gain, each set against the one before it; beside them all
                  kernels on every other executor (Inductor or the plain graph, with or without CUDA graphs),
                  and all kernels with another one for one region
    leaving out   each kernel in turn; what the model is not slower without is evicted

All arms of a step are timed in the same rounds, in random order.  Everything that is measured is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autokernel.errors import AutokernelError
from autokernel.integrate.arms import Arm, Arms, KeptKernel
from autokernel.integrate.model_rows import ModelRows, interval, median_us
from autokernel.judge.stats import paired_ratio
from autokernel.records import Experiment

ROUNDS = 30
MAX_LEAVE_OUT_ROUNDS = 3
CLEARLY = 1.02
"""A lower bound above which a kernel is needed beyond doubt, however another one's eviction shifts it."""

Say = Callable[[str], None]


class Selector:
    """The steps, against one running ``baseline``.  ``journal`` takes the rows, ``say`` tells of progress."""

    def __init__(
        self,
        arms: Arms,
        baseline: Arm,
        make: ModelRows,
        journal: Callable[[Experiment], Experiment],
        say: Say = lambda text: None,
    ) -> None:
        self.arms, self.baseline, self.make = arms, baseline, make
        self._journal, self._say = journal, say
        self.executor = ""
        self._held: dict[frozenset[str], float] = {}
        """Bytes of device memory that the model held with a set of kernels in it."""

    def run(self, kernels: Sequence[KeptKernel], executors: Sequence[str]) -> list[KeptKernel]:
        """The kernels that stay; `executor` is set to what carries the graph."""
        ordered = sorted(kernels, key=lambda k: -k.expected_gain_us)
        chosen, clear = self._try(ordered, list(executors))
        if clear and chosen == ordered[:1]:
            return chosen  # what it is worth has just been measured: adding it to nothing is leaving it out
        return self._leave_out(chosen)

    def without_the_largest(self, chosen: list[KeptKernel]) -> list[KeptKernel]:
        """``chosen`` less the kernel without which the model holds the least memory, as far as is known; less
        the last one otherwise."""
        rest = [[c for c in chosen if c is not k] for k in chosen]
        known = [s for s in rest if _ids(s) in self._held]
        return min(known, key=lambda s: self._held[_ids(s)]) if known else chosen[:-1]

    def _try(self, kernels: list[KeptKernel], executors: list[str]) -> tuple[list[KeptKernel], bool]:
        """What helps, on the executor that is fastest with all kernels in; kernels without which none would
        run are dropped.  Also whether the first kernel clearly helps by itself.

        The first of ``executors`` is expected to be it: on another one everything is timed again.
        """
        while True:
            self.executor, *others = executors
            swaps = {
                f"{k.id}->{i}": (k, k.instead(source))
                for k in kernels
                for i, source in enumerate(k.alternatives)
            }
            self._say(
                f"Trying {counted(kernels, 'kernel')} and {counted(swaps, 'alternative')} in the model "
                f"({self.executor}) …"
            )
            arms = self.arms.start(
                {f"first {i}": self.arms.variant(kernels[:i], self.executor) for i in range(len(kernels) + 1)}
                | {n: self.arms.variant(_swapped(kernels, *pair), self.executor) for n, pair in swaps.items()}
                | {n: self.arms.variant(kernels, n) for n in others}
            )
            self._note_memory({f"first {i}": kernels[:i] for i in range(len(kernels) + 1)}, arms)
            try:
                carriers = {self.executor: arms[f"first {len(kernels)}"]} | {n: arms[n] for n in others}
                rounds = self.timed(list(arms.values())) if any(a.ready for a in carriers.values()) else {}
                for name, arm in carriers.items():
                    self._write(
                        arm, rounds, strategy=name, description=f"all {counted(kernels, 'kernel')}, {name}"
                    )
                best = self._fastest(carriers, rounds)
                if best == self.executor:
                    chosen, gains, clear = self._added(kernels, arms, rounds)
                    return self._swaps(kernels, chosen, gains, swaps, arms, rounds), clear
            finally:
                close(arms)
            if best is not None:
                executors = [best]
            elif not kernels:
                return [], False
            else:
                kernels = self._working_alone(kernels)

    def _fastest(self, carriers: dict[str, Arm], rounds: dict[str, list[float]]) -> str | None:
        """The executor that runs fastest: the expected one unless another is faster beyond doubt."""
        ready = {name: arm for name, arm in carriers.items() if arm.ready}
        if not ready:
            return None
        best = min(ready, key=lambda name: median_us(rounds[ready[name].name]))
        if best != self.executor and self.executor in ready:
            expected = rounds[ready[self.executor].name]
            if paired_ratio(expected, rounds[ready[best].name]).lower_bound <= 1.0:
                return self.executor
        return best

    def _working_alone(self, kernels: list[KeptKernel]) -> list[KeptKernel]:
        """All kernels together failed: keep those that work in the model one at a time."""
        arms = self._start({k.id: [k] for k in kernels})
        for kernel in kernels:
            if not arms[kernel.id].ready:
                self._write(arms[kernel.id], {}, candidate=kernel.id, description=f"add {kernel.task.name}")
        close(arms)
        good = [k for k in kernels if arms[k.id].ready]
        return good if len(good) < len(kernels) else good[:-1]

    def _added(
        self, kernels: list[KeptKernel], arms: dict[str, Arm], rounds: dict[str, list[float]]
    ) -> tuple[list[KeptKernel], dict[str, float], bool]:
        """The kernels whose set beats the one before it, what each one brought, and whether the first one
        clearly does."""
        chosen, gains, clear = list[KeptKernel](), dict[str, float](), False
        before = "first 0" if arms["first 0"].ready else self.baseline.name
        for i, kernel in enumerate(kernels, start=1):
            arm = arms[f"first {i}"]
            gain = paired_ratio(rounds[before], rounds[arm.name]) if arm.ready else None
            helps = gain is not None and gain.lower_bound > 1.0
            if helps:
                chosen.append(kernel)
            if gain is not None:
                gains[kernel.id] = gain.ratio
                clear = clear or (i == 1 and before == "first 0" and gain.lower_bound > CLEARLY)
            why = "" if helps or gain is None else f"the model is not faster with it ({interval(gain)})"
            self._write(arm, rounds, candidate=kernel.id, gain=gain, keep=helps, reason=why,
                        description=f"add {kernel.task.name}")  # fmt: skip
            if arm.ready:
                before = arm.name
        return chosen, gains, clear

    def _swaps(
        self,
        kernels: list[KeptKernel],
        chosen: list[KeptKernel],
        gains: dict[str, float],
        swaps: dict[str, tuple[KeptKernel, KeptKernel]],
        arms: dict[str, Arm],
        rounds: dict[str, list[float]],
    ) -> list[KeptKernel]:
        """``chosen`` with the alternatives that are better in the model than the kernel in whose place they
        were, and than none at all.

        The best kernel of a region by itself need not be the best in the model: a custom kernel keeps the
        compiler from fusing across it, a rewrite into library calls does not.
        """
        everything = f"first {len(kernels)}"
        best: dict[str, tuple[float, KeptKernel, KeptKernel]] = {}
        for name, (old, new) in swaps.items():
            arm = arms[name]
            gain = paired_ratio(rounds[everything], rounds[name]) if arm.ready else None
            helps, why = False, ""
            if gain is not None:
                over_none = 1.0 if old in chosen else gain.ratio * gains.get(old.id, 0.0)
                helps = gain.lower_bound > 1.0 and over_none >= 1.0
                if gain.lower_bound <= 1.0:
                    why = f"no better in the model ({interval(gain)})"
                elif not helps:
                    why = f"better in the model ({interval(gain)}), but worse than neither"
            if helps and gain is not None and gain.ratio > best.get(old.id, (1.0,))[0]:
                best[old.id] = (gain.ratio, old, new)
            self._write(arm, rounds, candidate=new.id, gain=gain, keep=helps, reason=why,
                        description=f"another kernel for {old.task.name}")  # fmt: skip
        for _, old, new in best.values():
            chosen = _swapped(chosen, old, new)
        return chosen

    def _leave_out(self, chosen: list[KeptKernel]) -> list[KeptKernel]:
        """Leave each kernel out in turn, and evict all that the model is not slower without.

        Evicted together they may be missed after all (two may stand in for each other): the next round has
        the set of before as an arm, too, and if that is faster only the worst of them goes.
        """
        before: list[KeptKernel] | None = None
        suspects: list[KeptKernel] = []
        for number in range(1, MAX_LEAVE_OUT_ROUNDS + 1):
            if not chosen and before is None:
                return chosen
            self._say(f"Leaving {counted(chosen, 'kernel')} out one by one …")
            without = {k.id: [c for c in chosen if c is not k] for k in chosen}
            extra = {} if before is None else {"before": before}
            arms = self._start({"all": chosen, **extra, **without})
            try:
                if not arms["all"].ready:
                    return before or []
                rounds = self.timed(list(arms.values()))
                if before is not None and arms["before"].ready:
                    missed = paired_ratio(rounds["all"], rounds["before"])
                    if missed.lower_bound > 1.0:
                        chosen = [k for k in before if k is not suspects[0]]
                        before, suspects = None, []
                        continue
                useless, clear = self._useless(chosen, arms, rounds)
            finally:
                close(arms)
            if not useless:
                return chosen
            if len(useless) == 1 and clear:
                return [k for k in chosen if k is not useless[0]]
            if number == MAX_LEAVE_OUT_ROUNDS:
                useless = useless[:1]  # there is no round left that could miss the others
            before, suspects = (chosen, useless) if len(useless) > 1 else (None, [])
            chosen = [k for k in chosen if k not in useless]
        return chosen

    def _useless(
        self, chosen: list[KeptKernel], arms: dict[str, Arm], rounds: dict[str, list[float]]
    ) -> tuple[list[KeptKernel], bool]:
        """The kernels that the model is not slower without, the worst first; and whether it clearly is slower
        without each of the others, so that they needn't be asked again once one useless one is out."""
        useless: list[tuple[float, KeptKernel]] = []
        clear = True
        for kernel in chosen:
            arm = arms[kernel.id]
            if not arm.ready:
                clear = False
                continue
            needed = paired_ratio(rounds[arm.name], rounds["all"])
            evict = needed.lower_bound <= 1.0
            if evict:
                useless.append((needed.ratio, kernel))
            elif needed.lower_bound < CLEARLY:
                clear = False
            self._write(
                arm, rounds, parent=kernel.id,
                gain=paired_ratio(rounds["all"], rounds[arm.name]), keep=evict,
                reason=f"the model is not slower without it ({interval(needed)})" if evict else "",
                description=f"leave out {kernel.task.name}",
            )  # fmt: skip
        return [kernel for _, kernel in sorted(useless, key=lambda pair: pair[0])], clear

    def _start(self, sets: dict[str, list[KeptKernel]]) -> dict[str, Arm]:
        arms = self.arms.start({n: self.arms.variant(s, self.executor) for n, s in sets.items()})
        self._note_memory(sets, arms)
        return arms

    def _note_memory(self, sets: dict[str, list[KeptKernel]], arms: dict[str, Arm]) -> None:
        for name, kernels in sets.items():
            if arms[name].worker is not None:
                self._held[_ids(kernels)] = arms[name].alive().held_bytes

    def timed(self, arms: Sequence[Arm], rounds: int = ROUNDS) -> dict[str, list[float]]:
        """Seconds per call of the baseline and of the arms that are ready."""
        times = self.arms.rounds([self.baseline, *(a for a in arms if a.ready)], rounds)
        if self.baseline.name not in times:
            raise AutokernelError(
                f"{self.baseline.name} failed while it was timed ({self.baseline.why_not}); "
                "run again to go on"
            )
        return times

    def _write(self, arm: Arm, rounds: dict[str, list[float]], *, strategy: str = "", **facts: Any) -> None:
        executor = strategy or self.executor
        self._journal(self.make.variant(arm, executor, rounds, self.baseline.name, **facts))


def _ids(kernels: Sequence[KeptKernel]) -> frozenset[str]:
    return frozenset(k.id for k in kernels)


def _swapped(kernels: list[KeptKernel], old: KeptKernel, new: KeptKernel) -> list[KeptKernel]:
    return [*(k for k in kernels if k is not old), new]


def close(arms: dict[str, Arm]) -> None:
    for arm in arms.values():
        arm.close()


def counted(things: Sequence[Any] | dict[str, Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
