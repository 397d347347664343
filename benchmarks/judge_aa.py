"""Where does equal code differ?  The reference against itself, in several processes, subjects and captures.

    python benchmarks/judge_aa.py [--device cpu|cuda] [--openings 3] [--limit SECONDS] [--out FILE] [TASK ...]

Every process holds the same subject twice, and on a GPU each is captured anew ten times.  Printed is how far
each arm strays from the mean of all (median log-ratios, in percent): a subject that strays the same way in
every capture and every opening is no noise, and no number of rounds averages it out.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from judge_false_accepts import BODIES, REFERENCE

from autokernel import hardware
from autokernel.judge import Judge, clock, task_judge
from autokernel.judge.contents import Contents
from autokernel.judge.stages.timing import WorkerArm
from autokernel.judge.task_judge import TaskJudge
from autokernel.reference_task import make_task

PROCESSES, SUBJECTS, CAPTURES, ROUNDS = 4, 2, 10, 10


def arms_of(judge: TaskJudge) -> list[WorkerArm]:
    """The baseline's eager arm, as many processes more, and every process's subject once more."""
    arms = [judge.baseline_arms()[0], *(judge._twin(f"p{i}") for i in range(1, PROCESSES))]
    for i, arm in enumerate(list(arms)):
        arm.name = f"p{i}s0"
        for number in range(1, SUBJECTS):
            arm.worker.load(number, judge._reference_spec("reference"))
            judge.ready(arm.worker, number)
            arms.append(WorkerArm(f"p{i}s{number}", arm.worker, number))
    return arms


def strays(judge: TaskJudge) -> tuple[dict[str, float], float]:
    """Arm -> percent by which it is slower than the mean of all; and the deviation between its captures."""
    arms = arms_of(judge)
    try:
        judge.launcher.settle()
        contents = Contents(judge.inputs, judge.maker, judge._statics)
        by_capture: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for number in range(CAPTURES):
            if number and judge.graph:
                for arm in arms:
                    arm.anew(judge)
            rounds = clock.interleave(
                arms, ROUNDS, buffers=judge.inputs.timed, before_round=contents.deal, device=judge.device
            )
            times = [[math.log(t) for t in rounds.times_s(arm.name)] for arm in arms]
            means = [statistics.mean(column) for column in zip(*times, strict=True)]
            for arm, row in zip(arms, times, strict=True):
                off = statistics.median(t - m for t, m in zip(row, means, strict=True))
                by_capture[arm.name].append(100 * off)
    finally:
        for arm in arms[1:PROCESSES]:
            arm.worker.close()
    typical = {name: statistics.mean(values) for name, values in by_capture.items()}
    within = [v - typical[name] for name, values in by_capture.items() for v in values]
    return dict(sorted(typical.items())), statistics.pstdev(within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--openings", type=int, default=3)
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("tasks", nargs="*", default=list(BODIES))
    args = parser.parse_args()
    task_judge.SUBJECTS = {"eager": ("reference", 0)}
    chosen = [title for title in BODIES if any(title.startswith(name) for name in args.tasks)]
    lines = [
        f"{hardware.detect(args.device).name}, {platform.system()}, torch {torch.__version__}, "
        f"{datetime.date.today()}", "",
        f"{PROCESSES} processes (p), {SUBJECTS} subjects each (s), {CAPTURES} captures of {ROUNDS} rounds "
        "each; slower than the mean of all, in %", "",
    ]  # fmt: skip
    deadline, head = time.monotonic() + args.limit, False
    with tempfile.TemporaryDirectory() as name, Judge(args.device) as judge:
        for number, title in enumerate(t for t in chosen for _ in range(args.openings)):
            if time.monotonic() > deadline:
                break
            arguments, body, shapes = BODIES[title]
            reference = Path(name) / f"reference{number}.py"
            reference.write_text(REFERENCE.format(arguments=arguments, body=body, shapes=shapes))
            with judge.open(make_task(reference, Path(name) / f"task{number}", args.device)) as opened:
                found, within = strays(opened)
                if not head:
                    lines += [f"| task | delta | between captures | {' | '.join(found)} |"]
                    lines += ["| --- " * (3 + len(found)) + "|"]
                    head = True
                cells = " | ".join(f"{v:+.2f}" for v in found.values())
                lines.append(f"| {title} | {opened.delta:.3f} | {within:.2f} | {cells} |")
            if args.out:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
