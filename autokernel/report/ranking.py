"""Where a model's time goes, and which tasks were cut out of it, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autokernel.records import Task
from autokernel.report.terminal import latency, table, times

if TYPE_CHECKING:
    from rich.console import Console

    from autokernel.profile_records import Profile


def print_profile(profile: Profile, out: Console, top: int) -> None:
    from autokernel.profile_records import TABLE_COLUMNS

    head, *rest = profile.summary()
    out.print(head, style="bold", markup=False)
    ranking = table("", *TABLE_COLUMNS)
    for row in profile.table(top):
        ranking.add_row(*row)
    out.print(ranking)
    if len(profile.regions) > top:
        out.print(f"… and {len(profile.regions) - top} more kinds of region", markup=False, style="dim")
    for line in rest:
        out.print(line, markup=False)


def print_tasks(tasks: Sequence[Task], out: Console) -> None:
    ranking = table(
        "Tasks", "folder", "calls", "share", "time", "floor per call", "head-room", "model at most"
    )
    for task in tasks:
        share = "-" if task.share is None else f"{task.share:.1%}"
        ranking.add_row(
            str(task.dir),
            str(task.call_count),
            share,
            latency(task.device_time_us),
            latency(task.roofline_us),
            times(task.head_room),
            times(task.amdahl_bound),
        )
    out.print(ranking)
