"""How many candidates a minute go from source to a screened verdict?  Ours, and beside it a peer's bench.

    python benchmarks/judge_rate.py [--device cpu|cuda] [--peer DIR] [--repeats 3] [--out FILE]

Eight candidates for four regions of a GPT-2-like model (norm, softmax, attention, three linears on one
input), one after the other.  Each is a source that has never been compiled: it holds a comment of its own,
and what is not trusted compiles with empty caches.  What is paid once is measured apart: the judge's start
and the opening of each task (admission, references, baselines, the noise of equal arms).  The workers that
wait for candidates are made in bulk; the time until there are as many again belongs to the candidates.

``--peer`` is a checkout of RightNow-AI/autokernel.  Its ``bench.py --quick`` runs as a user would run it,
once per candidate, in a copy of its folder: its own starter kernels, of the same kinds, as they are and with
one number changed, each with a comment of its own, too; Triton's cache is the user's, as it is.  It runs
after ours, when torch's files are in memory already.
A candidate counts when it was timed; the peer times what it calls wrong, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from autokernel import hardware
from autokernel.errors import AutokernelError
from autokernel.judge import Judge
from autokernel.judge.stages import STAGES
from autokernel.judge.trial import StageResult, Trial
from autokernel.records import Family, Role, Task
from autokernel.reference_task import make_task

PEER_LIMIT_S = 120
SIZES = {
    "cuda": {"rows": 1024, "width": 768, "heads": 12, "dim": 64},
    "cpu": {"rows": 128, "width": 256, "heads": 4, "dim": 64},
}
DTYPES = {"cuda": "float16", "cpu": "float32"}
REFERENCE = """
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def forward(self, {arguments}):
        return {body}


def normal(*shape, scale=1.0, offset=0.0):
    return (offset + scale * torch.randn(*shape)).to(torch.{dtype})


def get_inputs():
    return [{inputs}]
"""
TORCH = """
import torch
import torch.nn.functional as F

BACKEND = "torch"
# {stamp}


"""
TRITON = """
import torch
import triton
import triton.language as tl

BACKEND = "triton"
ROWS = {rows}
num_warps = {warps}


"""
# The comment stands inside the Triton functions, since the rest of a file has no part in a cache's key.
NORM = """@triton.jit
def norm_kernel(x_ptr, w_ptr, b_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # {stamp}
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1)[:, None] / columns
    centred = tl.where(col < columns, x - mean, 0.0)
    var = tl.sum(centred * centred, axis=1)[:, None] / columns
    w = tl.load(w_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + col, centred * tl.rsqrt(var + 1e-5) * w + b, mask=inside)


def kernel_fn(x, w, b):
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty_like(x)
    norm_kernel[(triton.cdiv(rows, ROWS),)](
        x, w, b, out, rows, columns, ROWS=ROWS, BLOCK=triton.next_power_of_2(columns), num_warps=num_warps
    )
    return out
"""
SOFTMAX = """@triton.jit
def softmax_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # {stamp}
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row * columns + col, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(row < rows, x, 0.0)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    tl.store(out_ptr + row * columns + col, e / tl.sum(e, axis=1)[:, None], mask=inside)


def kernel_fn(x):
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty_like(x)
    softmax_kernel[(triton.cdiv(rows, ROWS),)](
        x, out, rows, columns, ROWS=ROWS, BLOCK=triton.next_power_of_2(columns), num_warps=num_warps
    )
    return out
"""
NORM_BY_HAND = """def kernel_fn(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w + b
"""
NORM_LIBRARY = """def kernel_fn(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)
"""
SOFTMAX_BY_HAND = """def kernel_fn(x):
    e = (x - x.amax(-1, keepdim=True)).exp_()
    return e.div_(e.sum(-1, keepdim=True))
"""
SOFTMAX_LIBRARY = """def kernel_fn(x):
    return torch.softmax(x, -1)
"""
SDPA = """def kernel_fn(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
SDPA_FLASH = """from torch.nn.attention import SDPBackend, sdpa_kernel


def kernel_fn(q, k, v, mask):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
MERGED = """def prepack(a, b, c):
    return (torch.cat([a, b, c]),)


def kernel_fn(x, packed):
    return tuple(y.contiguous() for y in F.linear(x, packed).chunk(3, -1))
"""
MERGED_TRANSPOSED = """def prepack(a, b, c):
    return (torch.cat([a, b, c]).t().contiguous(),)


def kernel_fn(x, packed):
    return tuple(y.contiguous() for y in torch.mm(x, packed).chunk(3, -1))
"""
DIFFERENCES = [
    "A screened verdict: one shape and dtype; secret data of two kinds, and captured data, against float64; "
    "inputs left alone; weights changed in place; 30 interleaved rounds against eager and torch.compile, the "
    "outputs of all timed calls compared; in a process of its own.",
    "",
    "The peer's quick mode: 16 to 30 combinations of shape (its own) and dtype, one fixed seed, `allclose` "
    "to PyTorch in the same dtype; one size in float16 timed with `do_bench`, first the kernel, then "
    "PyTorch's eager form; in the process that judges it. What it calls FAIL is timed, and counts here.",
]
WARPS_OLD = "        BLOCK_SIZE=BLOCK_SIZE,\n    )"
WARPS_NEW = "        BLOCK_SIZE=BLOCK_SIZE,\n        num_warps=8,\n    )"


@dataclass(frozen=True)
class Region:
    """``cuda`` and ``cpu``: two candidates each, by what they are.

    ``peer``: its op of this kind; ``change``: what a variant of its kernel is, and the texts that make it.
    """

    name: str
    family: Family
    roles: dict[str, Role]
    body: str
    inputs: str
    cuda: dict[str, str]
    cpu: dict[str, str]
    peer: str
    change: tuple[str, str, str]

    def candidates(self, device: str) -> dict[str, str]:
        return self.cuda if device.startswith("cuda") else self.cpu


def triton(text: str, rows: int, warps: int) -> str:
    return TRITON.replace("{rows}", str(rows)).replace("{warps}", str(warps)) + text


ATTENTION = {"library": TORCH + SDPA, "library, flash": TORCH + SDPA_FLASH}
LINEARS = {"merged": TORCH + MERGED, "merged, transposed": TORCH + MERGED_TRANSPOSED}
REGIONS = [
    Region(
        "norm", "norm", {"x": "activation", "w": "parameter", "b": "parameter"},
        "F.layer_norm(x, x.shape[-1:], w, b, 1e-5)",
        "normal({rows}, {width}), normal({width}, scale=0.1, offset=1.0), normal({width}, scale=0.1)",
        {"Triton, 1 row": triton(NORM, 1, 4), "Triton, 4 rows": triton(NORM, 4, 8)},
        {"by hand": TORCH + NORM_BY_HAND, "library": TORCH + NORM_LIBRARY},
        "layernorm", ("8 warps", WARPS_OLD, WARPS_NEW),
    ),
    Region(
        "softmax", "softmax", {"x": "activation"},
        "F.softmax(x, -1)",
        "normal({heads} * {rows}, {rows})",
        {"Triton, 1 row": triton(SOFTMAX, 1, 4), "Triton, 4 rows": triton(SOFTMAX, 4, 8)},
        {"by hand": TORCH + SOFTMAX_BY_HAND, "library": TORCH + SOFTMAX_LIBRARY},
        "softmax", ("8 warps", WARPS_OLD, WARPS_NEW),
    ),
    Region(
        "attention", "attention",
        {"q": "activation", "k": "activation", "v": "activation", "mask": "constant"},
        "F.softmax((q @ k.mT * {dim} ** -0.5).masked_fill(mask, float('-inf')), -1) @ v",
        "*(normal(1, {heads}, {rows}, {dim}) for _ in range(3)), "
        "torch.ones({rows}, {rows}, dtype=torch.bool).triu(1)",
        ATTENTION, ATTENTION,
        "flash_attention", ("blocks of 32 keys", "BLOCK_N = 64", "BLOCK_N = 32"),
    ),
    Region(
        "linears", "sibling_linears",
        {"x": "activation", "a": "parameter", "b": "parameter", "c": "parameter"},
        "F.linear(x, a), F.linear(x, b), F.linear(x, c)",
        "normal({rows}, {width}), *(normal({width}, {width}, scale={width} ** -0.5) for _ in range(3))",
        LINEARS, LINEARS,
        "matmul", ("64 of K at once", "BLOCK_SIZE_K = 32", "BLOCK_SIZE_K = 64"),
    ),
]  # fmt: skip


# -- ours -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One candidate's way to a verdict. ``counts``: it was timed; if not, ``verdict`` says why."""

    seconds: float
    verdict: str
    counts: bool


@dataclass
class Round:
    """All candidates once, in the order of `titles`; seconds of what is paid once, by what it is."""

    ours: list[Outcome] = field(default_factory=list)
    peer: list[Outcome] = field(default_factory=list)
    once: dict[str, float] = field(default_factory=dict)
    refill_s: float = 0.0

    @property
    def judged_s(self) -> float:
        return sum(o.seconds for o in self.ours if o.counts) + self.refill_s

    @property
    def peer_s(self) -> float:
        return sum(o.seconds for o in self.peer if o.counts)

    def rates(self) -> tuple[float, float, float]:
        """Candidates a minute: ours, ours with what is paid once, the peer's."""
        ours, peer = (sum(o.counts for o in found) for found in (self.ours, self.peer))
        whole_s = self.judged_s + sum(self.once.values())
        pairs = (ours, self.judged_s), (ours, whole_s), (peer, self.peer_s)
        ours_rate, whole, peers = (60 * n / s if n else 0.0 for n, s in pairs)
        return ours_rate, whole, peers


def watch_stages(seconds: list[dict[str, float]]) -> None:
    """From now on, each verdict adds a dictionary with the seconds of each of its stages to ``seconds``.

    A verdict says what its stages found and not how long they took, so they are timed from outside.
    """

    def watched(name: str, run: Callable[[Trial], StageResult]) -> Callable[[Trial], StageResult]:
        def timed(trial: Trial) -> StageResult:
            if name == next(iter(STAGES)):
                seconds.append({})
            begin = time.perf_counter()
            try:
                return run(trial)
            finally:
                seconds[-1][name] = time.perf_counter() - begin

        return timed

    STAGES.update({name: watched(name, run) for name, run in STAGES.items()})


def task_of(region: Region, folder: Path, device: str) -> Task:
    kind = torch.device(device).type
    sizes = {name: str(size) for name, size in SIZES[kind].items()}
    reference = folder / f"{region.name}.py"
    text = REFERENCE.format(
        arguments=", ".join(region.roles),
        body=region.body.replace("{dim}", sizes["dim"]),
        inputs=region.inputs.format(**sizes),
        dtype=DTYPES[kind],
    )
    reference.write_text(text, encoding="utf-8")
    task = make_task(reference, folder / f"task-{region.name}", device)
    task.family = region.family
    ports = zip(task.inputs, region.roles.values(), strict=True)
    task.inputs = [dataclasses.replace(port, role=role) for port, role in ports]
    task.save(task.dir)
    return task


def judge_all(device: str, folder: Path, into: Round, guards: dict[str, str]) -> None:
    tasks = [task_of(region, folder, device) for region in REGIONS]
    begin = time.perf_counter()
    with Judge(device) as judge:
        _ = judge.ipc  # found out once per judge; with the first workers, it is what its start consists of
        judge.launcher.refill()
        judge.launcher.settle()
        into.once["the judge's start"] = start_s = time.perf_counter() - begin
        guards |= judge.guards_left_out
        say(f"ours: started in {start_s:.1f} s")
        for region, task in zip(REGIONS, tasks, strict=True):
            judge_region(judge, region, task, folder, into)
        begin = time.perf_counter()
        judge.launcher.refill()
        judge.launcher.settle()
        into.refill_s = time.perf_counter() - begin
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # the peer gets the whole device


def judge_region(judge: Judge, region: Region, task: Task, folder: Path, into: Round) -> None:
    candidates = region.candidates(str(judge.device))
    begin = time.perf_counter()
    try:
        opened = judge.open(task)
    except AutokernelError as error:
        into.ours += [Outcome(0.0, f"not opened: {first_line(str(error))}", False) for _ in candidates]
        return
    into.once[f"opening {region.name}"] = time.perf_counter() - begin
    say(f"ours: {region.name} opened in {time.perf_counter() - begin:.1f} s")
    with opened:
        for i, text in enumerate(candidates.values()):
            kernel = folder / f"{region.name}{i}.py"
            begin = time.perf_counter()
            kernel.write_text(text.replace("{stamp}", uuid.uuid4().hex), encoding="utf-8")
            verdict = opened.judge(kernel, tier="screen")
            seconds = time.perf_counter() - begin
            said = f"{verdict.status}: {first_line(verdict.reason)}"
            if verdict.vs_eager is not None:
                said = f"{verdict.status}, {verdict.vs_eager.ratio:.2f}x eager"
            into.ours.append(Outcome(seconds, said, verdict.correct))
            say(f"ours: {region.name} {i + 1}: {seconds:.2f} s, {said}")


# -- the peer's -----------------------------------------------------------------------------------------


def bench_all(peer: Path, folder: Path, into: Round) -> None:
    for region in REGIONS:
        shipped = (peer / "kernels" / f"{region.peer}.py").read_text(encoding="utf-8")
        for i, text in enumerate((shipped, variant(region, shipped))):
            into.peer.append(bench(peer, stamped(text), folder / f"peer-{region.name}{i}"))
            say(f"peer: {region.peer} {i + 1}: {into.peer[-1].seconds:.2f} s, {into.peer[-1].verdict}")


def stamped(kernel: str) -> str:
    """With a comment in each Triton function, whose text is what Triton's cache goes by."""
    return re.sub(
        r"(@triton\.jit\ndef \w+\(.*?\):\n)", rf"\1    # {uuid.uuid4().hex}\n", kernel, flags=re.DOTALL
    )


def variant(region: Region, shipped: str) -> str:
    """The peer's kernel with one number changed; in a version that hasn't got that number, as shipped."""
    _, old, new = region.change
    return shipped.replace(old, new) if shipped.count(old) == 1 else shipped


def bench(peer: Path, kernel: str, copy: Path) -> Outcome:
    """One candidate, as the peer's user would: the kernel in kernel.py, and the bench in a process."""
    shutil.copytree(peer, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.png"))
    (copy / "kernel.py").write_text(kernel, encoding="utf-8")
    env = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that a bench that is stopped has said where
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "bench.py", "--quick"], cwd=copy, env=env, timeout=PEER_LIMIT_S, text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        seconds, output, code = time.perf_counter() - begin, done.stdout, f"exit code {done.returncode}"
        ended = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        seconds, ended, code = time.perf_counter() - begin, False, f"stopped after {PEER_LIMIT_S} s"
        output = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else ""
    return peer_outcome(seconds, output, ended, code)


def peer_outcome(seconds: float, output: str, ended: bool, code: str) -> Outcome:
    """What the bench's last line of each name says; one that was cut short or timed nothing has failed.

    It exits with 0 after most errors, and then says what went wrong further up than in its last line.
    """
    said = dict(re.findall(r"^(\w+): (.*\S)\s*$", output, re.MULTILINE))
    tried = said.get("shape_sweep", "SKIP") != "SKIP" and float(said.get("latency_us", "0")) > 0
    if not ended or not tried:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        wrong = next((f"; {line}" for line in lines if re.match(r"(FAIL|ERROR|FATAL)\b", line)), "")
        return Outcome(seconds, f"{code}, last line: {lines[-1] if lines else 'none'}{wrong}", False)
    verdict = said.get("correctness", "no verdict")
    if failed := re.match(r"FAIL \((.*)\)", said["shape_sweep"]):
        verdict += f" ({failed[1]})"
    return Outcome(seconds, f"{verdict}, {said.get('speedup_vs_pytorch', '?')} PyTorch", True)


# -- the report -----------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress, so that a run that is cut short has said what it had."""
    print(text, file=sys.stderr, flush=True)


def first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:160].replace("|", "/")


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median, and the range where there is one."""
    if not values:
        return "-"
    text = form.format(statistics.median(values))
    if len(values) == 1:
        return text
    return f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def titles(device: str) -> list[tuple[str, str, str]]:
    """Region, our candidate, the peer's."""
    return [
        (region.name, ours, peers)
        for region in REGIONS
        for ours, peers in zip(
            region.candidates(device),
            (f"{region.peer}, as shipped", f"{region.peer}, {region.change[0]}"),
            strict=True,
        )
    ]


def report(
    device: str,
    rounds: list[Round],
    stages: list[dict[str, float]],
    guards: dict[str, str],
    peer: Path | None,
) -> str:
    count, kind = len(titles(device)), torch.device(device).type
    versions = f"torch {torch.__version__}, Triton {version('triton')}, Python {platform.python_version()}"
    times = "once" if len(rounds) == 1 else f"{len(rounds)} times; medians, and ranges in brackets"
    lines = [
        f"{hardware.detect(device).name}, {platform.system()}, {versions}, {datetime.date.today()}",
        "",
        f"{count} candidates for {len(REGIONS)} regions of a GPT-2-like model in {DTYPES[kind]}, each a "
        f"source that was never compiled before, one after the other; all of them {times}",
        "",
        "| | timed | candidates a minute |",
        "| --- | --- | --- |",
    ]
    rates = [r.rates() for r in rounds]
    total = count * len(rounds)
    timed = f"{sum(o.counts for r in rounds for o in r.ours)} of {total}"
    lines.append(f"| the judge, screened verdicts | {timed} | {spread([r[0] for r in rates], '{:.1f}')} |")
    lines.append(f"| with its start and the openings | {timed} | {spread([r[1] for r in rates], '{:.1f}')} |")
    if peer is not None:
        timed = f"{sum(o.counts for r in rounds for o in r.peer)} of {total}"
        digest = hashlib.sha256((peer / "bench.py").read_bytes()).hexdigest()[:12]
        name = f"RightNow-AI/autokernel, `bench.py --quick` (sha256 {digest}…)"
        rates = [r for r in rates if r[2]]
        lines.append(f"| {name} | {timed} | {spread([r[2] for r in rates], '{:.1f}')} |")
        if rates:
            excluded, included = (spread([r[i] / r[2] for r in rates]) for i in (0, 1))
            lines += [
                "",
                f"the judge against the peer's bench: {excluded} times as many; "
                f"{included} with its start and the openings, which {count} candidates share here",
            ]
    lines += ["", *once(rounds), "", *inside(rounds, stages)]
    if guards:
        lines += ["", f"guards that this GPU's driver does not work with, left out: {', '.join(guards)}"]
    if peer is not None:
        lines += ["", *DIFFERENCES]
    lines += ["", *table(device, rounds, peer is not None)]
    return "\n".join(lines) + "\n"


def once(rounds: list[Round]) -> list[str]:
    """What is paid once. The first round is the one that may find the compilers' caches empty."""
    lines = ["| paid once | seconds |", "| --- | --- |"]
    if len(rounds) > 1:
        lines = ["| paid once | seconds, round 1 | later rounds |", "| --- | --- | --- |"]
    paid = [r.once | {"in all": sum(r.once.values())} for r in rounds]
    for name in dict.fromkeys(name for p in paid for name in p):
        cells = [f"{paid[0][name]:.1f}" if name in paid[0] else "-"]
        if len(rounds) > 1:
            cells.append(spread([p[name] for p in paid[1:] if name in p], "{:.1f}"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def inside(rounds: list[Round], stages: list[dict[str, float]]) -> list[str]:
    """Where a screened verdict's seconds go, and for how long a candidate needs the device to itself."""
    finished = [s for s in stages if "provenance" in s]  # the others ended early
    if not finished:
        return ["no candidate went through all stages"]
    own = [sum(t for name, t in s.items() if name not in ("static", "load")) for s in finished]
    parts = ", ".join(
        f"{name} {statistics.median([s[name] for s in finished]):.2f}"
        for name in finished[0]
        if max(s[name] for s in finished) >= 0.005
    )
    refills = spread([r.refill_s for r in rounds])
    return [
        f"a screened candidate has the device to itself (its checks and its timing, once it has compiled and "
        f"run) for {spread(own)} s; stages, medians in seconds: {parts}",
        "",
        f"until as many workers wait as before: {refills} s, which count as the candidates' own",
    ]


def table(device: str, rounds: list[Round], with_peer: bool) -> list[str]:
    lines = ["| region | candidate | s | verdict |", "| --- | --- | --- | --- |"]
    if with_peer:
        lines = [
            "| region | candidate | s | verdict | the peer's candidate | s | verdict |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
    for i, (region, ours, peers) in enumerate(titles(device)):
        cells = [region, ours, *row([o for r in rounds for o in r.ours[i : i + 1]])]
        if with_peer:
            cells += [peers, *row([o for r in rounds for o in r.peer[i : i + 1]])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row(found: list[Outcome]) -> list[str]:
    """Seconds where it was timed, and the last round's verdict, or the last failure."""
    if not found:
        return ["-", "-"]
    shown = next((o for o in reversed(found) if not o.counts), found[-1])
    said = shown.verdict if shown.counts else f"not counted: {shown.verdict}"
    return [spread([o.seconds for o in found if o.counts]), first_line(said)]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", type=Path, help="checkout of RightNow-AI/autokernel")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.peer and not (args.peer / "bench.py").is_file():
        parser.error(f"no bench.py in {args.peer}")
    warnings.simplefilter("ignore")
    stages: list[dict[str, float]] = []
    watch_stages(stages)
    rounds: list[Round] = []
    guards: dict[str, str] = {}

    def written() -> str:
        text = report(args.device, rounds, stages, guards, args.peer)
        if args.out:
            args.out.write_text(text, encoding="utf-8")
        return text

    for _ in range(args.repeats):
        rounds.append(Round())
        with tempfile.TemporaryDirectory() as name:
            judge_all(args.device, Path(name), rounds[-1], guards)
            written()  # what comes next may be cut short
            if args.peer:
                bench_all(args.peer.resolve(), Path(name), rounds[-1])
                written()
    print(written())


if __name__ == "__main__":
    main()
