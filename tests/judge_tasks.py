"""Small tasks and kernels for the judge's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from autokernel.judge.layout import name_of
from autokernel.records import Port, Task

RMS_NORM = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, weight):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return h.type_as(x) * weight

def get_inputs():
    return [torch.randn(64, 256), torch.ones(256)]

def get_init_inputs():
    return []
"""

LINEARS = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def forward(self, x, wa, wb):
        return F.linear(x, wa), F.linear(x, wb)
"""

MERGED = """
import torch
BACKEND = "torch"

def prepack(wa, wb):
    return (torch.cat([wa, wb]),)

def kernel_fn(x, w):
    a, b = torch.nn.functional.linear(x, w).split([96, 32], -1)
    return a.contiguous(), b.contiguous()
"""


def port(name: str, value: torch.Tensor, role: Any = "activation", high: int | None = None) -> Port:
    return Port(name, tuple(value.shape), name_of(value.dtype), tuple(value.stride()), role, high)


def make_task(
    folder: Path,
    reference: str,
    inputs: dict[str, tuple[torch.Tensor, str]],
    *,
    family: Any = "other",
    device: str = "cpu",
    captured: tuple[str, ...] | None = None,
    **fields: Any,
) -> Task:
    """A task folder as extraction writes it. ``captured`` names what goes into inputs.safetensors (all)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reference.py").write_text(reference)
    names: dict[str, Any] = {}
    exec(reference, names)
    high = fields.pop("high", {})
    ports = [port(n, v, role, high.get(n)) for n, (v, role) in inputs.items()]
    with torch.no_grad():
        result = names["Model"]()(*[v for v, _ in inputs.values()])
    results = result if isinstance(result, tuple) else (result,)
    saved = {}
    for name, (value, _) in inputs.items():
        if captured is None or name in captured:
            if value.dtype.is_complex:
                saved[name + ".re_im"] = torch.view_as_real(value).clone()
            else:
                saved[name] = value.contiguous().clone()
    save_file(saved, str(folder / "inputs.safetensors"))
    task = Task(
        rank=1, family=family, fingerprint="0" * 16, device=device, call_count=1, module_paths=["m"],
        inputs=ports, outputs=[port(f"out{i}", r) for i, r in enumerate(results)], **fields,
    )  # fmt: skip
    task.save(folder)
    return task


def rms_task(folder: Path, rows: int = 64, width: int = 256, dtype: torch.dtype = torch.float32) -> Task:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=gen).to(dtype)
    weight = (1 + 0.1 * torch.randn(width, generator=gen)).to(dtype)
    return make_task(
        folder, RMS_NORM, {"x": (x, "activation"), "weight": (weight, "parameter")}, family="norm"
    )


def linears_task(folder: Path) -> Task:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=gen)
    wa, wb = (torch.randn(n, 128, generator=gen) / 11 for n in (96, 32))
    return make_task(
        folder, LINEARS,
        {"x": (x, "activation"), "wa": (wa, "parameter"), "wb": (wb, "parameter")},
        family="sibling_linears",
    )  # fmt: skip


def write_kernel(folder: Path, body: str, name: str = "kernel.py") -> Path:
    path = folder / name
    header = "" if "BACKEND" in body else 'BACKEND = "torch"\n'
    path.write_text("import torch\n" + header + body)
    return path
