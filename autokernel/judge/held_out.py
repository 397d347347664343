"""Shapes that a kernel has not been tuned on: what one that says ``SHAPES = "any"`` is tried on, too.

A size is varied wherever it stands in an input, parameters included (the rows of a norm, its width and that
of its weight), if the reference takes it: whatever runs in eager is a shape that the kernel must serve.
Constants keep theirs, and so do sizes that the reference has written out.

Not covered: sizes that only together make sense (heads times width), other numbers of dims, and broadcasting
that the task itself does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from autokernel.judge import oracle
from autokernel.judge.inputs import InputSource
from autokernel.judge.layout import name_of, stride_order
from autokernel.judge.subjects import tensors_of
from autokernel.records import Port, Task


def _prime_below(n: int) -> int:
    while n > 2 and any(n % d == 0 for d in range(2, math.isqrt(n) + 1)):
        n -= 1
    return max(n, 1)


RECIPES: dict[str, Callable[[int], int]] = {
    "one more": lambda n: n + 1,
    "one less": lambda n: max(n - 1, 1),
    "odd": lambda n: (n // 2) | 1,
    "prime": lambda n: _prime_below(3 * n // 4),
}
"""Each of a task's sizes -> the size it is given."""


def held_out(task: Task, reference: nn.Module, device: torch.device) -> list[Task]:
    """Variants of ``task`` that ``reference`` takes, with as many sizes changed as will go: one a recipe.

    The folder is still the task's own; inputs.safetensors there has the original shapes.
    """
    sizes = sorted({n for p in task.inputs if p.role != "constant" for n in p.shape if n > 1}, reverse=True)
    found: list[Task] = []
    for recipe in RECIPES.values():
        best, changed = None, dict[int, int]()
        for size in sizes:
            attempt = changed | {size: recipe(size)}
            if variant := _variant(task, attempt, reference, device):
                best, changed = variant, attempt
        shapes = best and [p.shape for p in best.inputs]
        if best and shapes not in [[p.shape for p in t.inputs] for t in (*found, task)]:
            found.append(best)
    return found


def shapes_of(task: Task) -> str:
    return ", ".join("x".join(map(str, p.shape)) or "scalar" for p in task.inputs)


def _variant(task: Task, sizes: dict[int, int], reference: nn.Module, device: torch.device) -> Task | None:
    """The task with these sizes changed, or None when the reference does not take it."""
    inputs = [p if p.role == "constant" else _resized(p, sizes) for p in task.inputs]
    changed = replace(task, inputs=inputs)
    try:
        source = InputSource(changed, device)
        outputs = tensors_of(oracle.eager(reference, source.draw("normal", 0, 1.0)), strict=True)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return None
    if len(outputs) != len(task.outputs) or any(t.numel() == 0 for t in outputs):
        return None
    changed.outputs = [
        replace(p, shape=tuple(t.shape), stride=tuple(t.stride()), dtype=name_of(t.dtype))
        for p, t in zip(task.outputs, outputs, strict=True)
    ]
    return changed


def _resized(port: Port, sizes: dict[int, int]) -> Port:
    shape = tuple(sizes.get(n, n) for n in port.shape)
    if shape == tuple(port.shape):
        return port
    stride, step = [0] * len(shape), 1
    order = stride_order(port.shape, port.stride)
    for dim in (*(d for d in reversed(order)), *(d for d in range(len(shape)) if d not in order)):
        stride[dim] = 0 if port.stride[dim] == 0 else step
        step *= shape[dim] if stride[dim] else 1
    high = None if port.high is None else min(port.high, sizes.get(port.high, port.high))
    return replace(port, shape=shape, stride=tuple(stride), high=high)
