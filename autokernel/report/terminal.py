"""The final table on a terminal, and the progress lines before it.

Bars and spinners appear only where the output is a terminal; a log file gets plain lines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autokernel.proposers.clip import clip_middle
from autokernel.records import Experiment, Verdict
from autokernel.report.summary import EVICTED, IN, Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_TEXT_COLUMNS = frozenset({"family", "best", "outcome", "bound", "modules"})
_REASON = 4000
"""Characters of a verdict's reason that are shown."""
_STYLES = {"keep": "green", "discard": "dim", "baseline": "cyan", "infra_error": "yellow"}


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # A pipe or a file has no width: let a table have what it needs instead of rich's 80 columns.
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 160)


def print_summary(summary: Summary, out: Console) -> None:
    """Every baseline, ours, each kernel's part, what was evicted and why."""
    from rich.text import Text

    out.print(Text(f"{summary.tag}  on {summary.device or 'an unknown device'}", style="bold"))
    if summary.baselines or summary.improved:
        out.print(_model_table(summary))
    if summary.kernels:
        out.print(_kernel_table(summary))
    for line in summary.kernels:
        if line.why:
            out.print(Text(f"  {line.task}: {line.outcome}: {_clip(line.why)}", style="dim"))
    counts = ", ".join(f"{n} {status}" for status, n in sorted(summary.statuses.items()))
    spent = f"; {summary.tokens:,} tokens" if summary.tokens else ""
    spent += f", ${summary.cost_usd:.2f}" if summary.cost_usd is not None else ""
    out.print(Text(f"{sum(summary.statuses.values())} experiments: {counts}{spent}"))
    if summary.baselines or summary.improved:
        out.print(Text(f"Result: {summary.headline()}", style="bold green" if summary.improved else "bold"))


def table(title: str, *columns: str) -> Table:
    """An empty table in the one style that all of them have."""
    from rich import box
    from rich.table import Table

    grid = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        text = i == 0 or name in _TEXT_COLUMNS
        grid.add_column(name, justify="left" if text else "right", no_wrap=i == 0)
    return grid


def _model_table(summary: Summary) -> Table:
    grid = table("Whole model", "what ran", "latency", "vs eager", "vs best baseline", "95 % interval")
    for line in sorted(summary.baselines, key=lambda b: b.latency_us or float("inf")):
        if line.latency_us is None:
            grid.add_row(line.backend, "-", "-", "-", _clip(line.reason, 60), style="dim")
            continue
        name = f"{line.backend} (best baseline)" if line.best else line.backend
        grid.add_row(name, latency(line.latency_us), times(line.vs_eager), times(line.vs_best), "")
    if summary.improved:
        interval = f"{_number(summary.ci_low)} – {_number(summary.ci_high)}"
        grid.add_row(
            "autokernel",
            latency(summary.latency_us),
            times(summary.speedup_vs_eager),
            times(summary.speedup),
            interval,
            style="bold green",
        )
    return grid


def _kernel_table(summary: Summary) -> Table:
    grid = table(
        "Kernels",
        "task",
        "tries",
        "best",
        "latency",
        "vs eager",
        "vs compile",
        "decided by (95 %)",
        "outcome",
        "gives",
    )
    for line in summary.kernels:
        best = "/".join(t for t in (line.backend, line.strategy) if t)
        decision = "-"
        if line.decided is not None and line.ci_low is not None:
            interval = f"{_number(line.ci_low)} – {_number(line.ci_high)}"
            decision = f"{_number(line.decided)}× {line.rival} ({interval})"
        style = "green" if line.outcome == IN else "yellow" if line.outcome == EVICTED else "dim"
        grid.add_row(
            line.task,
            str(line.attempts),
            _clip(best, 36) or "-",
            latency(line.latency_us),
            times(line.speedup_vs_eager),
            times(line.speedup_vs_compile),
            decision,
            line.outcome,
            times(line.contribution),
            style=style,
        )
    return grid


def print_row(row: Experiment, out: Console) -> None:
    """One journal row as it is written."""
    from rich.text import Text

    parts = [
        f"{row.experiment:>4}",
        f"{row.status:<13}",
        row.task or row.kernel_type,
        row.backend,
        row.strategy,
    ]
    if row.task == "model" and row.backend == "autokernel":
        parts.append(row.description)
    if row.latency_us is not None:
        parts.append(latency(row.latency_us))
    if row.speedup_vs_best_baseline is not None:
        parts.append(f"{row.speedup_vs_best_baseline:.2f}× best baseline")
    if row.reason:
        parts.append(_clip(row.reason, 100))
    text = Text("  ".join(p for p in parts if p), style=_STYLES.get(row.status, "red"))
    if out.is_terminal:
        out.print(text, overflow="ellipsis", no_wrap=True)
    else:
        out.print(text, soft_wrap=True)


def print_verdict(verdict: Verdict, row: Experiment, out: Console) -> None:
    """A verdict with its stages, as ``bench`` shows it."""
    from rich.text import Text

    for name, (passed, detail) in verdict.stages.items():
        mark = ("pass ", "green") if passed else ("FAIL ", "bold red")
        # Of a failure the first line: the whole text, a compiler's message, say, follows as it is.
        shown = _clip(detail, 400) if passed else _clip(detail.split("\n")[0], 120)
        out.print(Text.assemble(mark, f"{name:<14} ", shown))
    style = "bold green" if verdict.correct else "bold red"
    reason = f": {clip_middle(verdict.reason, _REASON)}" if verdict.reason else ""
    out.print(Text(f"{row.correctness} ({verdict.status}){reason}", style=style))
    if verdict.latency_us is not None:
        out.print(Text(f"latency {latency(verdict.latency_us)}{_bound(row)}"))
    rivals = (
        ("eager", verdict.vs_eager),
        ("torch.compile", verdict.vs_compile),
        ("its parent", verdict.vs_parent),
    )
    for name, ratio in rivals:
        if ratio is not None:
            interval = f"95 % interval {ratio.low:.3f} – {ratio.high:.3f}, {ratio.pairs} pairs"
            out.print(Text(f"{ratio.ratio:.3f}× {name} ({interval})"))


@contextlib.contextmanager
def working(text: str, out: Console) -> Iterator[None]:
    """A spinner with ``text`` on a terminal; elsewhere the text once, as a line."""
    if out.is_terminal:
        with out.status(text):
            yield
    else:
        print(text, file=out.file, flush=True)
        yield


def _bound(row: Experiment) -> str:
    """What limits it and how near it comes, as far as the row knows."""
    share = None if row.pct_peak is None else f"{row.pct_peak:.0f} % of the roofline's speed"
    known = [part for part in (f"bound: {row.bound}" if row.bound else None, share) if part]
    return f"; {', '.join(known)}" if known else ""


def latency(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us / 1000:.3f} ms" if us >= 1000 else f"{us:.2f} µs"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}×"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _clip(text: str, limit: int = 140) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
