"""Which kernels stay in the model, and what carries the graph: decided by the whole model's own time.

    executor      what carries the graph: Inductor or the plain graph, with or without CUDA graphs
    adding        the kernels in order of expected gain, each set timed against the one before it
    alternatives  another kernel for the same region, against the set as it stands
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

    def run(self, kernels: Sequence[KeptKernel], executors: Sequence[str]) -> list[KeptKernel]:
        """The kernels that stay; `executor` is set to what carries the graph."""
        ordered = sorted(kernels, key=lambda k: -k.expected_gain_us)
        self.executor, ordered = self._choose_executor(ordered, executors)
        added, clear = self._add(ordered)
        chosen = self._swap(ordered, added)
        if clear and chosen == added == ordered[:1]:
            return chosen  # what it is worth has just been measured: adding it to nothing is leaving it out
        return self._leave_out(chosen)

    def _choose_executor(
        self, kernels: list[KeptKernel], names: Sequence[str]
    ) -> tuple[str, list[KeptKernel]]:
        """The fastest executor with all kernels in; kernels without which none would run are dropped."""
        while True:
            self._say(f"Choosing what carries the graph, with {counted(kernels, 'kernel')} in …")
            arms = self.arms.start({n: self.arms.variant(kernels, n) for n in names})
            try:
                rounds = self.timed(list(arms.values()))
                for name, arm in arms.items():
                    self._write(
                        arm, rounds, strategy=name, description=f"all {counted(kernels, 'kernel')}, {name}"
                    )
                live = [a for a in arms.values() if a.ready]
                if live:
                    return min(live, key=lambda a: median_us(rounds[a.name])).name, kernels
            finally:
                close(arms)
            if not kernels:
                return names[0], kernels
            kernels = self._working_alone(kernels, names[0])

    def _working_alone(self, kernels: list[KeptKernel], executor: str) -> list[KeptKernel]:
        """All kernels together failed: keep those that work in the model one at a time."""
        arms = self.arms.start({k.id: self.arms.variant([k], executor) for k in kernels})
        for kernel in kernels:
            if not arms[kernel.id].ready:
                self._write(arms[kernel.id], {}, strategy=executor, candidate=kernel.id,
                            description=f"add {kernel.task.name}")  # fmt: skip
        close(arms)
        good = [k for k in kernels if arms[k.id].ready]
        return good if len(good) < len(kernels) else good[:-1]

    def _add(self, kernels: list[KeptKernel]) -> tuple[list[KeptKernel], bool]:
        """Time the growing sets side by side; a kernel stays if its set beats the one before it.

        Also returns whether the first one clearly does.
        """
        if not kernels:
            return [], False
        self._say(f"Adding {counted(kernels, 'kernel')} one by one ({self.executor}) …")
        arms = self._start({f"first {i}": kernels[:i] for i in range(len(kernels) + 1)})
        try:
            rounds = self.timed(list(arms.values()))
            chosen, clear = list[KeptKernel](), False
            before = "first 0" if arms["first 0"].ready else self.baseline.name
            for i, kernel in enumerate(kernels, start=1):
                arm = arms[f"first {i}"]
                gain = paired_ratio(rounds[before], rounds[arm.name]) if arm.ready else None
                helps = gain is not None and gain.lower_bound > 1.0
                if helps:
                    chosen.append(kernel)
                if i == 1 and before == "first 0" and gain is not None:
                    clear = gain.lower_bound > CLEARLY
                why = "" if helps or gain is None else f"the model is not faster with it ({interval(gain)})"
                self._write(arm, rounds, candidate=kernel.id, gain=gain, keep=helps, reason=why,
                            description=f"add {kernel.task.name}")  # fmt: skip
                if arm.ready:
                    before = arm.name
            return chosen, clear
        finally:
            close(arms)

    def _swap(self, kernels: list[KeptKernel], chosen: list[KeptKernel]) -> list[KeptKernel]:
        """Try the alternatives of every kernel in its place, all against the set as it stands.

        The best kernel of a region by itself need not be the best in the model: a custom kernel keeps the
        compiler from fusing across it, a rewrite into library calls does not.
        """
        swaps = {
            f"{k.id}->{i}": (k, k.instead(source)) for k in kernels for i, source in enumerate(k.alternatives)
        }
        if not swaps:
            return chosen
        self._say(f"Trying {counted(swaps, 'alternative')} in the model …")

        def swapped(old: KeptKernel, new: KeptKernel) -> list[KeptKernel]:
            return [*(c for c in chosen if c is not old), new]

        arms = self._start({"as is": chosen} | {n: swapped(*pair) for n, pair in swaps.items()})
        try:
            if not arms["as is"].ready:
                return chosen
            rounds = self.timed(list(arms.values()))
            best: dict[str, tuple[float, KeptKernel, KeptKernel]] = {}
            for name, (old, new) in swaps.items():
                arm = arms[name]
                gain = paired_ratio(rounds["as is"], rounds[name]) if arm.ready else None
                helps = gain is not None and gain.lower_bound > 1.0
                if helps and gain is not None and gain.ratio > best.get(old.id, (1.0,))[0]:
                    best[old.id] = (gain.ratio, old, new)
                why = "" if helps or gain is None else f"no better in the model ({interval(gain)})"
                self._write(arm, rounds, candidate=new.id, gain=gain, keep=helps, reason=why,
                            description=f"another kernel for {old.task.name}")  # fmt: skip
            for _, old, new in best.values():
                chosen = swapped(old, new)
            return chosen
        finally:
            close(arms)

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
        return self.arms.start({n: self.arms.variant(s, self.executor) for n, s in sets.items()})

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


def close(arms: dict[str, Arm]) -> None:
    for arm in arms.values():
        arm.close()


def counted(things: Sequence[Any] | dict[str, Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
