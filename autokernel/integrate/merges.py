"""Which parameters a kernel's ``prepack`` merges, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from autokernel.capture.graph import Graph
from autokernel.records import Task
from autokernel.regions.partition import partition

_MERGE, _PAD = "merge_rows", "pad_rows"


def merged_arguments(source: str) -> list[tuple[list[int], int]]:
    """Positions (among prepack's arguments) of each group that wants to lie side by side, and how many rows
    of room it wants behind it: ``merge_rows(a, b)`` and ``pad_rows(a, 47)``."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    groups: list[tuple[list[int], int]] = []
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "prepack":
            continue
        names = [a.arg for a in function.args.args]
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            given = [a.id for a in call.args if isinstance(a, ast.Name)]
            if not all(g in names for g in given):
                continue
            if call.func.id == _MERGE and len(given) == len(call.args) > 1:
                groups.append(([names.index(g) for g in given], 0))
            elif call.func.id == _PAD and len(given) == 1 and len(call.args) == 2:
                rows = call.args[1]
                if isinstance(rows, ast.Constant) and isinstance(rows.value, int):
                    groups.append(([names.index(given[0])], rows.value))
    return groups


def parameter_merges(
    model: nn.Module, graphs: Sequence[Graph], kept: Sequence[tuple[Task, Path]]
) -> dict[str, list[dict[str, Any]]]:
    """By fingerprint: for every call site, ``{"names": [...], "spare_rows": n}``."""
    names = {id(p): n for n, p in model.named_parameters()}
    wanted = {t.fingerprint: merged_arguments(s.read_text(encoding="utf-8")) for t, s in kept}
    result: dict[str, list[dict[str, Any]]] = {}
    for graph in graphs:
        for region in partition(graph).regions:
            for group, spare in wanted.get(region.fingerprint, []):
                values = region.static_values()
                found = [names.get(id(values[i])) for i in group]
                if all(found):
                    result.setdefault(region.fingerprint, []).append({"names": found, "spare_rows": spare})
    return result
