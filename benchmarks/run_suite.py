"""Run `autokernel optimize` on the shipped models and those in benchmarks/models; write down what came of it.

    python benchmarks/run_suite.py --out benchmarks/h200
    python benchmarks/run_suite.py --out benchmarks/cpu --models nano --device cpu --dtype float32
    python benchmarks/run_suite.py --out benchmarks/h200 --models transformers_bert qwen3 --dtype bfloat16

For every model: the command's own output (before each line, the seconds since its start), its results.tsv,
report.md and the kernels that stayed in the model go to ``OUT/<model>/``; ``OUT/suite.md`` is one table over
all of them, with device, versions and date.  Each ratio comes from one run in which both sides were timed in
the same rounds.  A model whose folder already holds a result is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autokernel.records import Experiment

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHIPPED = ("gpt2", "llama", "nano", "bert", "vit", "convnet", "llama_decode")
OTHERS = ("transformers_bert", "qwen3", "timm_vit")
MODELS = {name: f"models/{name}.py" for name in SHIPPED}
MODELS |= {name: f"benchmarks/models/{name}.py" for name in OTHERS}


def run(name: str, out: Path, runs: Path, arguments: argparse.Namespace) -> None:
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "autokernel", "optimize", MODELS[name], "--device", arguments.device,
        "--dtype", arguments.dtype, "--top", str(arguments.top), "--run", str(runs / name),
    ]  # fmt: skip
    if arguments.budget:
        command += ["--budget", arguments.budget]
    if arguments.max_autotune:
        command += ["--max-autotune"]
    begun = time.monotonic()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with (
        (folder / "output.txt").open("w", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        stops = [
            threading.Timer(arguments.limit + late, process.send_signal, [number])
            for late, number in ((0, signal.SIGINT), (60, signal.SIGUSR1), (65, signal.SIGKILL))
        ]
        for stop in stops:
            stop.start()
        assert process.stdout is not None
        for line in process.stdout:
            log.write(f"{time.monotonic() - begun:6.1f} s  {line}")
            log.flush()
        for stop in stops:
            stop.cancel()
    seconds = time.monotonic() - begun
    for file in ("results.tsv", "report.md", "run.json", "profile.json"):
        if (runs / name / file).exists():
            shutil.copy(runs / name / file, folder / file)
    if (runs / name / "optimized").exists():
        shutil.copytree(runs / name / "optimized", folder / "optimized", dirs_exist_ok=True)
    (folder / "seconds.txt").write_text(f"{seconds:.0f}\n", encoding="utf-8")
    without_paths(folder, runs)


def without_paths(folder: Path, runs: Path) -> None:
    """Where things lie on this machine is nobody's business, and different on the next."""
    for file in folder.iterdir():
        if file.suffix in (".txt", ".tsv", ".md", ".json"):
            text = file.read_text(encoding="utf-8").replace(f"{runs}/", "runs/").replace(f"{ROOT}/", "")
            text = re.sub(r"/[^\s\"']*/(?:site|dist)-packages/", "", text)
            text = re.sub(r"/[^\s\"']*/autokernel-[a-z0-9_]+/", "", text)
            file.write_text(text, encoding="utf-8")


def table(out: Path) -> str:
    """One row per model, from the journals alone."""
    from autokernel.report.summary import MODEL, OURS, final_row, summarize
    from autokernel.results import read_results

    lines = [
        "| model | best baseline | latency | ours | speed-up over the best baseline (95 % interval) "
        "| over eager | error / eager's | kernels in | judged regions' share of the time | optimized in |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    about = ""
    for name in MODELS:
        folder = out / name
        if not (folder / "results.tsv").exists():
            continue
        rows = read_results(folder / "results.tsv")
        summary = summarize(rows)
        finished = final_row([r for r in rows if r.task == MODEL and r.backend == OURS]) is not None
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        about = f"{summary.device}; " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
        best = next((b for b in summary.baselines if b.best), None)
        ours = f"{summary.latency_us:.0f} µs" if summary.latency_us else "-"
        ratio = (
            f"**{summary.speedup:.3f}×** ({summary.ci_low:.3f} to {summary.ci_high:.3f})"
            if summary.speedup
            else ("nothing beat it" if finished else "not finished")
        )
        eager = f"{summary.speedup_vs_eager:.2f}×" if summary.speedup_vs_eager else "-"
        error = f"{summary.error_ratio:.2f}" if summary.error_ratio is not None else "-"
        kept = sum(k.outcome == "in the model" for k in summary.kernels)
        seconds = (folder / "seconds.txt").read_text().strip()
        rival = f"{best.backend} | {best.latency_us:.0f} µs" if best and best.latency_us else "- | -"
        profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
        share = judged_share(rows, profile)
        lines.append(
            f"| {name} | {rival} | {ours} | {ratio} | {eager} | {error} | {kept} | {share:.1%} "
            f"| {seconds} s |"
        )
    return f"{time.strftime('%Y-%m-%d')}; {about}\n\n" + "\n".join(lines) + "\n"


def judged_share(rows: Sequence[Experiment], profile: dict[str, Any]) -> float:
    """Of eager's profiled time, the part in regions for which at least one candidate was found correct."""
    judged = {r.task.rpartition("-")[2] for r in rows if r.candidate and r.status in ("keep", "discard")}
    times = [r["time_us"] for r in profile["regions"] if r["fingerprint"][:8] in judged]
    return sum(times) / profile["total_us"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2", "llama"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--budget", default="")
    parser.add_argument("--limit", type=float, default=600, help="seconds per model, then Ctrl-C")
    parser.add_argument("--max-autotune", action="store_true")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    for name in arguments.models:
        if not (out / name / "seconds.txt").exists():
            run(name, out, arguments.runs.resolve(), arguments)
            print((out / name / "output.txt").read_text(encoding="utf-8")[-6000:])
    text = table(out)
    (out / "suite.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
