"""How often does the judge call a kernel faster that is the reference itself?  And what does a verdict cost?

    python benchmarks/judge_false_accepts.py [--device cpu|cuda] [--runs 200] [--limit SECONDS] [--out FILE]

The candidate is eager's own code, in a kernel file.  Tasks are opened anew all the time, so that processes,
memory and the calibration of delta are drawn anew, too.  Counted is what would be called faster than eager by
the rule that keeps a kernel (the lower bound above 1 + delta), and what a bare lower bound above 1 would call
so.  Every run is a promotion (100 pairs); some are screened as well, for the time that takes from source.
With ``--limit`` it ends with what it has by then; what has been found is in the file after every task.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from autokernel import hardware
from autokernel.judge import Judge
from autokernel.judge.stats import faster
from autokernel.records import Verdict
from autokernel.reference_task import make_task

BODIES = {
    "rms_norm 64x256": (
        "x, w",
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w",
        "(64, 256), (256,)",
    ),
    "softmax 256x512": ("x", "torch.softmax(x, -1)", "(256, 512),"),
    "linear 128x256x256": ("x, w", "torch.nn.functional.linear(x, w)", "(128, 256), (256, 256)"),
    "gelu 512x1024": ("x", "torch.nn.functional.gelu(x)", "(512, 1024),"),
}
REFERENCE = """
import torch


class Model(torch.nn.Module):
    def forward(self, {arguments}):
        return {body}


def get_inputs():
    return [torch.randn(*shape) for shape in [{shapes}]]
"""
KERNEL = 'import torch\n\nBACKEND = "torch"\n\n\ndef kernel_fn({arguments}):\n    return {body}\n'
PER_OPENING = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[Verdict]] = {name: [] for name in BODIES}
    screened: list[float] = []
    deltas: list[float] = []
    accepted, bare, deadline, text = 0, 0, time.monotonic() + args.limit, ""
    with tempfile.TemporaryDirectory() as name, Judge(args.device) as judge:
        folder, number = Path(name), 0
        while sum(map(len, found.values())) < args.runs and time.monotonic() < deadline:
            title = list(BODIES)[number % len(BODIES)]
            arguments, body, shapes = BODIES[title]
            reference, kernel = folder / f"reference{number}.py", folder / f"kernel{number}.py"
            reference.write_text(REFERENCE.format(arguments=arguments, body=body, shapes=shapes))
            kernel.write_text(KERNEL.format(arguments=arguments, body=body))
            with judge.open(make_task(reference, folder / f"task{number}", args.device)) as opened:
                deltas.append(opened.delta)
                screened.append(opened.judge(kernel).seconds)
                for _ in range(PER_OPENING):
                    verdict = opened.judge(kernel, tier="promote")
                    found[title].append(verdict)
                    if verdict.vs_eager is not None:
                        accepted += faster(verdict.vs_eager, opened.delta)
                        bare += verdict.vs_eager.lower_bound > 1
            number += 1
            text = report(args.device, found, screened, deltas, accepted, bare)
            if args.out:
                args.out.write_text(text, encoding="utf-8")
    print(text)


def report(
    device: str,
    found: dict[str, list[Verdict]],
    screened: list[float],
    deltas: list[float],
    accepted: int,
    bare: int,
) -> str:
    runs = sum(map(len, found.values()))
    wrong = [v for verdicts in found.values() for v in verdicts if not v.correct]
    refused = "".join(f"; {v.status}: {v.reason}" for v in wrong[:3])
    lines = [
        f"{hardware.detect(device).name}, {platform.system()}, torch {torch.__version__}, "
        f"{datetime.date.today()}",
        "",
        f"{runs} runs of the reference as a kernel: {accepted} called faster (lower bound above 1 + delta), "
        f"{bare} with one above 1, {len(wrong)} refused{refused}",
        "",
        f"delta over {len(deltas)} openings: median {statistics.median(deltas):.3f}, from {min(deltas):.3f} "
        f"to {max(deltas):.3f}",
        "",
        f"screened verdict from source: median {statistics.median(screened):.2f} s, at most "
        f"{max(screened):.2f} s ({len(screened)} of them)",
        "",
        "| task | runs | against eager: median | lowest | highest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for title, verdicts in found.items():
        ratios = [v.vs_eager.ratio for v in verdicts if v.vs_eager is not None]
        if ratios:
            figures = f"{statistics.median(ratios):.3f}x | {min(ratios):.3f}x | {max(ratios):.3f}x"
            lines.append(f"| {title} | {len(ratios)} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
