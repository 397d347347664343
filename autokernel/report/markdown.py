"""report.md: the same facts as the final table."""

from __future__ import annotations

from collections.abc import Sequence

from autokernel.report.summary import Summary
from autokernel.report.terminal import latency, times


def render_markdown(summary: Summary) -> str:
    parts = [
        f"# {summary.tag or 'autokernel'}",
        f"Device: {summary.device or 'unknown'}",
        f"**{summary.headline()}**",
    ]
    if summary.baselines:
        rows = [
            [
                b.backend + (" (best baseline)" if b.best else ""),
                latency(b.latency_us),
                times(b.vs_eager),
                times(b.vs_best),
                b.reason if b.latency_us is None else "",
            ]
            for b in sorted(summary.baselines, key=lambda b: b.latency_us or float("inf"))
        ]
        if summary.improved:
            interval = ""
            if summary.ci_low is not None and summary.ci_high is not None:
                interval = f"95 % interval {summary.ci_low:.3f} to {summary.ci_high:.3f}"
            ours = [
                latency(summary.latency_us),
                times(summary.speedup_vs_eager),
                times(summary.speedup),
                interval,
            ]
            rows.append(["**autokernel**", *ours])
        parts.append(
            "## Whole model\n\n" + _table(["what ran", "latency", "vs eager", "vs best", "note"], rows)
        )
    if summary.kernels:
        rows = [
            [
                k.task,
                str(k.attempts),
                k.backend,
                k.strategy,
                k.provenance,
                latency(k.latency_us),
                times(k.speedup_vs_eager),
                times(k.speedup_vs_compile),
                k.outcome,
                times(k.contribution),
                k.why,
            ]
            for k in summary.kernels
        ]
        head = [
            "task",
            "tries",
            "backend",
            "strategy",
            "provenance",
            "latency",
            "vs eager",
            "vs compile",
            "outcome",
        ]
        parts.append("## Kernels\n\n" + _table([*head, "gives the model", "why"], rows))
    counts = ", ".join(f"{n} {status}" for status, n in sorted(summary.statuses.items()))
    parts.append(f"{sum(summary.statuses.values())} experiments: {counts}.")
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
