"""Which parameters a kernel's ``prepack`` merges, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from autokernel.capture.graph import Graph
from autokernel.records import Task
from autokernel.regions.partition import partition

_HELPER = "merge_rows"


def merged_arguments(source: str) -> list[list[int]]:
    """Positions (among prepack's arguments) of each group of plain arguments given to ``merge_rows``."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    groups = []
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "prepack":
            continue
        names = [a.arg for a in function.args.args]
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == _HELPER:
                arguments = [a.id for a in call.args if isinstance(a, ast.Name)]
                if len(arguments) == len(call.args) > 1 and all(a in names for a in arguments):
                    groups.append([names.index(a) for a in arguments])
    return groups


def parameter_merges(
    model: nn.Module, graphs: Sequence[Graph], kept: Sequence[tuple[Task, Path]]
) -> dict[str, list[list[str]]]:
    """By fingerprint: for every call site, the names of the parameters to lay side by side."""
    names = {id(p): n for n, p in model.named_parameters()}
    wanted = {t.fingerprint: merged_arguments(s.read_text(encoding="utf-8")) for t, s in kept}
    result: dict[str, list[list[str]]] = {}
    for graph in graphs:
        for region in partition(graph).regions:
            for group in wanted.get(region.fingerprint, []):
                values = region.static_values()
                found = [names.get(id(values[i])) for i in group]
                if all(found):
                    result.setdefault(region.fingerprint, []).append([n for n in found if n])
    return result
