"""The prompt for one edit of kernel.py, built from plain data by pure functions.

One bottleneck and one change per round, the whole file back in one block.  What has been tried goes in with
its outcome, so that a failure is information and not a dead end.
"""

from __future__ import annotations

from collections.abc import Sequence

from autokernel.proposers.base import TaskState
from autokernel.proposers.provider import Request
from autokernel.records import Experiment, Port, Task

HISTORY = 12
SOURCE_LIMIT = 60_000
MAX_OUTPUT_TOKENS = 32_000

SYSTEM = """\
You write fast and correct kernels for PyTorch models. You are given one region of a model and its current \
kernel.py, and you return a better kernel.py.

A kernel.py is one Python file:
- `BACKEND = "torch" | "triton" | "cpp"`.
- `kernel_fn(*inputs)` takes the inputs listed below in that order and returns a newly allocated tensor, or \
a tuple of them. It must not change its inputs and must not keep anything between calls.
- Optionally `prepack(*static_inputs) -> tuple`, run once on the static inputs; then \
`kernel_fn(*activations, *packed)` is what is called.
- Optionally `SPACE = {"BLOCK_M": [64, 128], ...}` where every name is also a module-level constant that the \
kernel reads: a tuner searches it. Use it for tile sizes, warps and stages; don't spend edits on them.
- It may import only torch, triton, math, ctypes and autokernel.backends. A cpp kernel holds its C++ in a \
string SOURCE with extern "C" functions and calls autokernel.backends.cpp_backend.load(SOURCE).

A judge runs it in a sandbox on secret inputs (normal, large, offset, with outliers, captured from the \
model), compares every output with a float64 reference, and times it in pairs against the current best. \
Lower precision than the model's own, skipped work, cached answers and shape tricks fail. Falling back to \
the reference is no gain.

Answer with two lines and one fenced block, and nothing else:
STRATEGY: <one to three short tags, e.g. split-k, fused-epilogue>
DESCRIPTION: <one sentence: which bottleneck, which change, why it should help>
```python
<the whole kernel.py>
```"""


def build_prompt(state: TaskState, device: str) -> list[dict[str, str]]:
    """The messages for one edit.  ``device`` is a line such as ``NVIDIA H200 (sm_90)``."""
    task = state.task
    parts = [
        f"# Task\n{describe_task(task, device)}",
        f"# Reference (what the result must equal)\n```python\n{_clip(state.reference)}\n```",
        f"# Times\n{describe_times(state)}",
        f"# Current kernel.py\n```python\n{_clip(state.current)}\n```",
    ]
    if state.recall:
        parts.append(f"# What is known of such kernels here\n{state.recall}")
    history = describe_history(state.history)
    if history:
        parts.append(f"# Tried on this task, oldest first\n{history}")
    parts.append("Change one thing that attacks the bottleneck, and return the whole file.")
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\n\n".join(parts)}]


def build_request(state: TaskState, device: str) -> Request:
    system, user = build_prompt(state, device)
    return Request(system["content"], "", [{"role": "user", "content": user["content"]}], MAX_OUTPUT_TOKENS)


def describe_task(task: Task, device: str) -> str:
    lines = [f"Family {task.family}, on {device}, called {task.call_count} time(s) per forward pass."]
    lines += [f"input {i}: {_port(p)}" for i, p in enumerate(task.inputs)]
    lines += [f"output {i}: {_port(p)}" for i, p in enumerate(task.outputs)]
    if task.flops is not None and task.bytes is not None:
        intensity = task.flops / task.bytes if task.bytes else 0.0
        lines.append(f"{task.flops:.4g} FLOPs, {task.bytes:.4g} bytes: {intensity:.1f} FLOPs per byte.")
    if task.roofline_us is not None:
        lines.append(f"Roofline time of one call: {task.roofline_us:.1f} µs.")
    return "\n".join(lines)


def _port(port: Port) -> str:
    role = "" if port.role == "activation" else f", {port.role} (static)"
    return f"{port.name}: {port.dtype}{list(port.shape)} strides {list(port.stride)}{role}"


def describe_times(state: TaskState) -> str:
    lines = [f"{name}: {us:.2f} µs" for name, us in sorted(state.baselines.items())]
    if state.current_latency_us is not None:
        ahead = "beats every baseline" if state.ahead else "does not beat the best baseline yet"
        lines.append(f"current kernel.py: {state.current_latency_us:.2f} µs ({ahead})")
    else:
        lines.append("current kernel.py: not timed yet")
    return "\n".join(lines)


def describe_history(history: Sequence[Experiment]) -> str:
    """The last attempts, one line each, with the outcome and the reason."""
    attempts = [r for r in history if r.status not in ("baseline", "infra_error") and r.proposer != "tuner"]
    lines = []
    for row in attempts[-HISTORY:]:
        outcome = row.status
        if row.latency_us is not None:
            outcome += f" at {row.latency_us:.2f} µs"
        if row.speedup_vs_best_baseline is not None:
            outcome += f", {row.speedup_vs_best_baseline:.2f}× the best baseline"
        what = f"[{row.strategy}] {row.description}".strip()
        reason = f": {_clip(row.reason, 400)}" if row.reason else ""
        lines.append(f"- {what} -> {outcome}{reason}")
    return "\n".join(lines)


def _clip(text: str, limit: int = SOURCE_LIMIT) -> str:
    return text if len(text) <= limit else text[:limit] + "\n… (cut here)"
