"""Write a task's ``reference.py``: readable code, printed from the region's FX graph, that runs by itself.

The form is KernelBench's: ``class Model(nn.Module)``, ``get_inputs()``, ``get_init_inputs()``.  The model has
no parameters of its own; ``forward`` takes the task's inputs in contract order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .records import Port, Task
from .regions.code import statements, variable_names

RE_IM = ".re_im"  # suffix under which a complex tensor is stored as pairs of reals

_TAKEN = ("self", "torch", "F", "nn", "math", "operator", "Path", "load_file", "DEVICE", "saved")

_STRIDED = '''
def strided(x, stride):
    """The values of ``x`` in memory laid out by ``stride``; an expanded dimension has stride 0."""
    x = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)]
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
'''


def variables(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Names for a subgraph's values, the ports' own names for its inputs."""
    return variable_names(gm.graph.nodes, _TAKEN)


def body(gm: fx.GraphModule, names: Mapping[fx.Node, str], device: str, *, fresh: bool = False) -> list[str]:
    """The statements of ``forward`` and its return; a literal device is written as ``device``.

    With ``fresh``, results that share memory with an input or with each other are copied.  Raises
    `regions.code.UnprintableNode` for a node that has no source form.
    """
    calls = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    lines = [re.sub(r'torch\.device\("\w+"\)', device, line) for line in statements(calls, names)]
    seen = {_memory(n) for n in gm.graph.nodes if n.op == "placeholder"}
    results = []
    for node in _results(gm):
        shares = fresh and _memory(node) in seen
        results.append(names[node] + (".clone()" if shares else ""))
        seen.add(_memory(node))
    return [*lines, "return " + ", ".join(results)]


def _results(gm: fx.GraphModule) -> list[fx.Node]:
    value: Any = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return list(value) if isinstance(value, list | tuple) else [value]


def _memory(node: fx.Node) -> int:
    return node.meta["example_value"].untyped_storage()._cdata


def reference_text(
    task: Task, gm: fx.GraphModule, captured: Mapping[str, Tensor], stored: Sequence[str], model: str
) -> str:
    """The whole file.  ``captured`` holds the inputs' values, ``stored`` the names that were saved."""
    names = variables(gm)
    arguments = [names[n] for n in gm.graph.nodes if n.op == "placeholder"]
    lines = body(gm, names, "DEVICE")
    inputs = [_input(port, captured.get(port.name), port.name in stored) for port in task.inputs]
    reads = any("saved[" in line for line in inputs)
    laid_out = any("strided(" in line for line in inputs)
    imports = ["import torch", "import torch.nn.functional as F", "from torch import nn"]
    if any("operator." in line for line in lines):
        imports.insert(0, "import operator")
    if reads:
        imports = [
            "from pathlib import Path",
            "",
            *imports[:-1],
            "from safetensors.torch import load_file",
            imports[-1],
        ]
    device = task.device.partition(":")[0]
    parts = [
        f'"""{_docstring(task, arguments, model)}"""',
        "",
        *imports,
        "",
        f'DEVICE = "{device}"',
        "",
        "",
        "class Model(nn.Module):",
        f"    def forward(self, {', '.join(arguments)}):",
        *(f"        {line}" for line in lines),
        "",
        "",
        "def get_init_inputs():",
        "    return []",
        "",
        "",
        "def get_inputs():",
        '    """Random inputs, scaled as in the model; buffers and masks keep the model\'s values."""',
    ]
    if reads:
        parts.append('    saved = load_file(Path(__file__).with_name("inputs.safetensors"), device=DEVICE)')
    parts += ["    return [", *(f"        {line}," for line in inputs), "    ]"]
    if laid_out:
        parts += ["", _STRIDED.rstrip()]
    parts += [
        "",
        "",
        'if __name__ == "__main__":',
        "    with torch.no_grad():",
        "        result = Model()(*get_inputs())",
        "    for value in result if isinstance(result, tuple) else (result,):",
        '        print(tuple(value.shape), value.dtype, f"mean {value.float().mean():.4g}")',
    ]
    return "\n".join(parts) + "\n"


def torch_kernel_text(task: Task, gm: fx.GraphModule, model: str) -> str:
    """A ``kernel.py`` for the ``torch`` backend that runs the region's own ops: correct, a place to start."""
    names = variables(gm)
    arguments = [names[n] for n in gm.graph.nodes if n.op == "placeholder"]
    lines = body(gm, names, f'torch.device("{task.device.partition(":")[0]}")', fresh=True)
    imports = ["import torch", "import torch.nn.functional as F"]
    if any("operator." in line for line in lines):
        imports.insert(0, "import operator")
    return "\n".join(
        [
            f'"""{_docstring(task, arguments, model)}"""',
            "",
            *imports,
            "",
            'BACKEND = "torch"',
            "",
            "",
            f"def kernel_fn({', '.join(arguments)}):",
            *(f"    {line}" for line in lines),
            "",
        ]
    )


def _docstring(task: Task, arguments: Sequence[str], model: str) -> str:
    shown = task.module_paths[:3] + (["…"] if len(task.module_paths) > 3 else [])
    sites = f"{task.call_count} call site{'s' if task.call_count != 1 else ''}"
    title = f"{task.family.replace('_', ' ')} from {model}: {sites}"
    width = max(len(a) for a in arguments)
    lines = [title + (f" ({', '.join(shown)})." if shown else "."), "", "Takes, in this order:"]
    for name, port in zip(arguments, task.inputs, strict=True):
        note = f", below {port.high}" if port.high is not None else ""
        lines.append(f"    {name:<{width}}  {port.shape} {port.dtype}, {port.role}{note}")
    lines.append("Returns:")
    lines += [f"    {port.shape} {port.dtype}" for port in task.outputs]
    return "\n".join(lines) + "\n"


def _input(port: Port, value: Tensor | None, stored: bool) -> str:
    """The expression that makes one input."""
    dtype: Any = getattr(torch, port.dtype)
    keeps = port.role in ("buffer", "constant") or port.dtype == "bool" or _is_mask(value)
    if stored and keeps:
        text = (
            f'torch.view_as_complex(saved["{port.name}{RE_IM}"])'
            if dtype.is_complex
            else f'saved["{port.name}"]'
        )
    elif dtype.is_floating_point or dtype.is_complex:
        text = _normal(port, value)
    elif port.dtype == "bool":
        text = f"torch.ones({port.shape}, dtype=torch.bool, device=DEVICE)"
    else:
        text = f"torch.randint(0, {port.high or 2}, {port.shape}, dtype=torch.{port.dtype}, device=DEVICE)"
    return text if _contiguous(port) else f"strided({text}, {port.stride})" + _expanded(port)


def _is_mask(value: Tensor | None) -> bool:
    """Whether it holds minus infinity, or what a dtype has for it: to be added to scores that don't count."""
    if value is None or not value.is_floating_point() or value.numel() == 0:
        return False
    return bool((value <= torch.finfo(value.dtype).min / 2).any())


def _expanded(port: Port) -> str:
    return f".expand({port.shape})" if 0 in port.stride else ""


def _normal(port: Port, value: Tensor | None) -> str:
    mean, deviation = _moments(value)
    text = f"torch.randn({port.shape}, dtype=torch.{port.dtype}, device=DEVICE)"
    if deviation != 1.0:
        text += f" * {deviation:.3g}"
    return text + (f" + {mean:.3g}" if mean else "")


def _moments(value: Tensor | None) -> tuple[float, float]:
    """Mean and deviation to draw with; never a constant, which would hide an unused input."""
    if value is None or value.numel() == 0:
        return 0.0, 1.0
    if value.is_complex():
        return 0.0, float(torch.view_as_real(value.resolve_conj()).float().std()) or 1.0
    wide = value.to(torch.float32 if value.dtype != torch.float64 else torch.float64)
    wide = wide[
        wide.abs() < torch.finfo(wide.dtype).max / 2
    ]  # neither infinite, nor what stands for it in a mask
    if wide.numel() == 0:
        return 0.0, 1.0
    mean = float(wide.mean())
    deviation = float(wide.std()) if wide.numel() > 1 else 0.0
    if abs(mean) < 0.1 * deviation:
        mean = 0.0
    return mean, max(deviation, 0.1 * abs(mean)) or 0.02


def _contiguous(port: Port) -> bool:
    expected = 1
    for size, stride in zip(reversed(port.shape), reversed(port.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
