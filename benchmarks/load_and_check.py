"""Load a run's artifact in a fresh process, the way a user would, and check it against the original model.

    python benchmarks/load_and_check.py models/nano.py runs/nano

Prints the largest difference from the original's output in units of the original's own error against
float64, and the paired speed-up over the original (eager), with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import autokernel
from autokernel.capture.source import SourceSpec, load
from autokernel.integrate.whole_model import WholeModelOracle, agree
from autokernel.judge.stats import paired_ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    spec = SourceSpec(arguments.model, dtype=arguments.dtype, device=arguments.device)
    original = load(spec)
    answers = [WholeModelOracle(original).answer(seed) for seed in (11, 12)]
    model = autokernel.load(arguments.run)(load(spec).model)

    def call(m: torch.nn.Module) -> float:
        begin = time.perf_counter()
        m(*original.args, **original.kwargs)
        if arguments.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    with torch.no_grad():
        outputs = [[model(*a.inputs).clone()] for a in answers]
        found = agree(answers, outputs)
        print(f"agrees: {found.ok}, error {found.error_ratio:.3f} times eager's {found.reason}")
        for _ in range(5):
            call(original.model), call(model)
        pairs = [(call(original.model), call(model)) for _ in range(arguments.pairs)]
    ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
    eager_ms, ours_ms = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"{ratio.ratio:.2f} times eager, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}; "
        f"one call at a time and waited for: {eager_ms:.3f} ms and {ours_ms:.3f} ms"
    )
    sys.exit(0 if found.ok else 1)


if __name__ == "__main__":
    main()
