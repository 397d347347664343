"""A task from a user's own reference file, for ``bench --ref`` and ``optimize KERNEL --ref``.

The file has KernelBench's form: ``class Model(nn.Module)``, ``get_inputs()`` and ``get_init_inputs()``.  It
is the user's own code, so it is trusted and imported here, once, to learn shapes and types; the kernel
is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from autokernel.errors import UsageError
from autokernel.records import Port, Task
from autokernel.torch_flags import tf32


def make_task(reference: Path, folder: Path, device: str) -> Task:
    """Write the task folder (task.json, reference.py, inputs.safetensors) of ``reference``; returns its task.

    Raises UsageError when the file isn't such a reference, or when it has something that a kernel could not
    be given: parameters of its own, or inputs that aren't tensors.
    """
    import torch
    from safetensors.torch import save_file

    module = _import(reference)
    for name in ("Model", "get_inputs"):
        if not callable(getattr(module, name, None)):
            raise UsageError(f"{reference} is not a reference: it has no {name}")
    try:
        init = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
        model = module.Model(*init).eval().to(device)
        inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in module.get_inputs()]
        with torch.no_grad():
            outputs = model(*inputs)
    except Exception as error:  # the user's code may raise anything  # noqa: BLE001
        raise UsageError(f"{reference} fails: {type(error).__name__}: {_line(error)}") from None
    if not all(isinstance(x, torch.Tensor) for x in inputs):
        raise UsageError(f"{reference}: get_inputs() must return tensors only; fix other arguments in Model")
    if next(iter(model.parameters()), None) is not None or next(iter(model.buffers()), None) is not None:
        raise UsageError(
            f"{reference}: Model has parameters or buffers; make them inputs of forward, as in the kernel"
        )
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if not all(isinstance(x, torch.Tensor) for x in outputs):
        raise UsageError(f"{reference}: forward must return a tensor or a tuple of tensors")
    ports = [_port(f"input{i}", x) for i, x in enumerate(inputs)]
    text, allowed = reference.read_bytes(), tf32()
    task = Task(
        rank=1,
        family="other",
        fingerprint=hashlib.sha256(text).hexdigest()[:32],
        device=device,
        call_count=1,
        module_paths=[],
        inputs=ports,
        outputs=[_port(f"out{i}", x) for i, x in enumerate(outputs)],
        allow_tf32=allowed.products,
        allow_conv_tf32=allowed.convolutions,
    )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(reference, folder / "reference.py")
    tensors = {p.name: _storable(x) for p, x in zip(ports, inputs, strict=True)}
    names = {
        p.name + ".re_im" if x.is_complex() else p.name: p.name for p, x in zip(ports, inputs, strict=True)
    }
    save_file({stored: tensors[name] for stored, name in names.items()}, folder / "inputs.safetensors")
    task.save(folder)
    return task


def _port(name: str, x: Any) -> Port:
    integral = not (x.is_floating_point() or x.is_complex())
    high = int(x.max()) + 1 if integral and x.numel() and str(x.dtype) != "torch.bool" else None
    return Port(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), tuple(x.stride()), high=high)


def _storable(x: Any) -> Any:
    import torch

    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.detach().cpu().clone(memory_format=torch.contiguous_format)


def _import(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"no such reference file: {path}")
    spec = importlib.util.spec_from_file_location(f"_autokernel_reference_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything  # noqa: BLE001
        raise UsageError(f"{path} can't be imported: {type(error).__name__}: {_line(error)}") from None
    return module


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
