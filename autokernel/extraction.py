"""Cut regions out of a profiled model, each into a folder that stands by itself.

A task folder holds ``task.json``, ``reference.py`` (readable code that equals the model's own values at that
place: checked here), ``inputs.safetensors`` (what the model fed the region, and its parameters) and
``kernel.py`` (a correct kernel to start from).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from .capture.graph import Graph
from .errors import AutokernelError
from .profile_records import Profile, RegionProfile
from .profiling import fresh_arguments
from .records import Port, Task
from .reference_text import RE_IM, reference_text, torch_kernel_text
from .regions.code import UnprintableNode
from .regions.region import Region
from .torch_flags import tf32

LIMIT_BYTES = 256 << 20
# Relative error (Frobenius) that the reference may show against the model: both run the same ops on the same
# values, so only a library that picks another algorithm leaves any.
_SAME = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-12}

Starter = Callable[[Task, fx.GraphModule], str | None]


class ReferenceMismatch(AutokernelError):
    """A reference that was written does not give the model's own values; its task is not used."""


def extract(
    profile: Profile,
    run_dir: Path,
    *,
    top: int | None = None,
    limit_bytes: int = LIMIT_BYTES,
    starter: Starter | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Task]:
    """Write the task folders of the ``top`` regions (all without it) and return their tasks, best gain first.

    ``profile`` must come from this process: a loaded ``profile.json`` has no graphs.  ``limit_bytes`` bounds
    each inputs.safetensors; ``task.inputs_left_out`` names what had no room.  ``starter`` writes kernel.py
    (default: the playbook's); a kernel.py that is already there stays.  ``say`` hears about each region that
    could not be extracted and why (default: a warning).
    """
    say = say or (lambda line: warnings.warn(line, stacklevel=3))
    chosen = profile.regions[:top]
    captured = _capture(region.sites[0] for region in chosen)
    tasks: list[Task] = []
    for rank, found in enumerate(chosen, start=1):
        inputs, outputs = captured.pop(found.sites[0])
        task = _task(profile, found, rank, inputs)
        folder = _folder(run_dir / "tasks", task)
        try:
            _write(task, folder, found.sites[0], inputs, outputs, profile.model, limit_bytes)
            constants = {p.name: v for p, v in zip(task.inputs, inputs, strict=True) if p.role == "constant"}
            write = starter or partial(_playbook_starter, constants=constants)
            _write_starter(task, folder, found.sites[0].subgraph(), profile.model, write)
        except (UnprintableNode, ReferenceMismatch) as error:
            say(f"{task.name} was not extracted: {error}")
            continue
        tasks.append(task)
    return tasks


def load_inputs(task: Task, device: str | None = None) -> list[Tensor | None]:
    """What the model fed the task, in contract order, with the ports' strides; None where it was left out."""
    from safetensors.torch import load_file

    saved = load_file(task.dir / "inputs.safetensors", device=device or task.device)
    values: list[Tensor | None] = []
    for port in task.inputs:
        pair = saved.get(port.name + RE_IM)
        value = torch.view_as_complex(pair) if pair is not None else saved.get(port.name)
        values.append(None if value is None else lay_out(value, port.stride))
    return values


def lay_out(value: Tensor, stride: Iterable[int]) -> Tensor:
    """A copy of ``value`` with the given strides (0 for an expanded dimension)."""
    stride = tuple(stride)
    base = value[tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)]
    copy = torch.empty_strided(base.shape, stride, dtype=value.dtype, device=value.device)
    return copy.copy_(base).expand(value.shape)


def _playbook_starter(task: Task, gm: fx.GraphModule, constants: dict[str, Tensor]) -> str | None:
    from .playbook.starters import starter_for  # heavy: only when something is written

    return starter_for(task, gm, constants)


# --- values -----------------------------------------------------------------------------------------------


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps copies of the values of some nodes, as they were when they were made.

    Those of ``late`` are kept as they are at the end: regions read them behind the last write to them.
    """

    def __init__(self, gm: fx.GraphModule, wanted: set[fx.Node], late: set[fx.Node]) -> None:
        super().__init__(gm)
        self.wanted, self.late = wanted, late
        self.values: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.late:
            self.values[n] = value.detach()
        elif n in self.wanted:
            self.values[n] = lay_out(value.detach(), value.stride())
        return value

    def record(self, *args: Any) -> None:
        """Run the graph once."""
        with torch.no_grad():
            self.run(*args)
        for n in self.late:
            self.values[n] = lay_out(self.values[n], self.values[n].stride())


def _capture(regions: Iterable[Region]) -> dict[Region, tuple[list[Tensor], list[Tensor]]]:
    """The real inputs, in contract order, and outputs of each region, from one run of each graph."""
    by_graph: dict[Graph, list[Region]] = defaultdict(list)
    for region in regions:
        by_graph[region.graph].append(region)
    found: dict[Region, tuple[list[Tensor], list[Tensor]]] = {}
    for graph, members in by_graph.items():
        wanted = {n for region in members for n in [*region.activations, *region.outputs]}
        recorder = _Recorder(graph.gm, wanted, {n for region in members for n in region.late_inputs})
        recorder.record(*fresh_arguments(graph))
        for region in members:
            activations = [recorder.values[n] for n in region.activations]
            statics = [value.detach() for value in region.static_values()]
            found[region] = ([*activations, *statics], [recorder.values[n] for n in region.outputs])
    return found


def _task(profile: Profile, found: RegionProfile, rank: int, inputs: list[Tensor]) -> Task:
    region = found.sites[0]
    ports, outputs = region.ports()
    ports = [_bounded(port, value) for port, value in zip(ports, inputs, strict=True)]
    return Task(
        rank=rank,
        family=region.family,
        fingerprint=found.fingerprint,
        device=profile.device.torch_name,
        call_count=found.call_count,
        module_paths=found.module_paths,
        inputs=ports,
        outputs=outputs,
        share=found.share,
        device_time_us=found.time_us,
        flops=found.flops,
        bytes=found.bytes,
        roofline_us=found.roofline_us,
        head_room=found.head_room,
        amdahl_bound=found.amdahl_bound,
        allow_tf32=profile.allow_tf32,
        allow_conv_tf32=tf32().convolutions,
    )


def _bounded(port: Port, value: Tensor) -> Port:
    """Whole-number activations without a bound of their own stay within what the model fed them."""
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if port.high is not None or not whole or value.numel() == 0:
        return port
    return Port(port.name, port.shape, port.dtype, port.stride, port.role, max(1, int(value.max()) + 1))


# --- files ------------------------------------------------------------------------------------------------


def _folder(tasks: Path, task: Task) -> Path:
    """The task's folder.  A region that was extracted before keeps its folder and its number."""
    earlier = sorted(tasks.glob(f"[0-9]*-{task.family}-{task.fingerprint[:8]}"))
    if earlier:
        task.rank = int(earlier[0].name.split("-")[0])
        return earlier[0]
    taken = {int(p.name.split("-")[0]) for p in tasks.glob("[0-9]*-*-*")}
    while task.rank in taken:
        task.rank += 1
    return tasks / task.name


def _write(
    task: Task,
    folder: Path,
    region: Region,
    inputs: list[Tensor],
    outputs: list[Tensor],
    model: str,
    limit_bytes: int,
) -> None:
    """Write all but kernel.py, and check the reference against the model's own values."""
    from safetensors.torch import save_file

    gm = region.subgraph()
    values = dict(zip([port.name for port in task.inputs], inputs, strict=True))
    stored, task.inputs_left_out = _fitting(task.inputs, values, limit_bytes)
    text = reference_text(task, gm, values, stored, model)  # may raise, before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {_key(name, values[name]): _storable(values[name]) for name in stored},
        folder / "inputs.safetensors",
        metadata={"fingerprint": task.fingerprint},
    )
    (folder / "inputs.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    (folder / "reference.py").write_text(text, encoding="utf-8")
    task.save(folder)
    laid_out = [lay_out(value, port.stride) for value, port in zip(inputs, task.inputs, strict=True)]
    check_reference(folder / "reference.py", laid_out, outputs)


def _write_starter(task: Task, folder: Path, gm: fx.GraphModule, model: str, starter: Starter) -> None:
    kernel = folder / "kernel.py"
    (folder / "attempts").mkdir(exist_ok=True)
    if not kernel.exists():
        text = starter(task, gm) or torch_kernel_text(task, gm, model)
        kernel.write_text(text, encoding="utf-8")


def _fitting(ports: list[Port], values: dict[str, Tensor], limit: int) -> tuple[list[str], list[str]]:
    """Names that fit into ``limit`` bytes and names that don't: what a wrong guess would spoil goes first."""
    order = ("constant", "buffer", "activation", "parameter")
    kept: set[str] = set()
    used = 0
    for port in sorted(ports, key=lambda p: (order.index(p.role), values[p.name].nbytes)):
        size = values[port.name].numel() * values[port.name].element_size()
        if used + size <= limit:
            kept.add(port.name)
            used += size
    return [p.name for p in ports if p.name in kept], [p.name for p in ports if p.name not in kept]


def _key(name: str, value: Tensor) -> str:
    return name + RE_IM if value.is_complex() else name


def _storable(value: Tensor) -> Tensor:
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.cpu().clone(memory_format=torch.contiguous_format)


def check_reference(path: Path, inputs: list[Tensor], expected: list[Tensor]) -> None:
    """Run a reference on the model's inputs and on its own; raise `ReferenceMismatch` if it is not the same.

    Runs in this process: a reference is written by autokernel, from the user's own model.
    """
    spec = importlib.util.spec_from_file_location(f"autokernel_reference_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.no_grad():
        try:
            spec.loader.exec_module(module)
            model = module.Model(*module.get_init_inputs())
            results = _as_list(model(*inputs))
            own = _as_list(model(*module.get_inputs()))
        except (
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
            NameError,
            AttributeError,
            SyntaxError,
        ) as error:
            raise ReferenceMismatch(f"its reference fails: {type(error).__name__}: {error}") from error
    if len(results) != len(expected) or len(own) != len(expected):
        raise ReferenceMismatch(f"its reference returns {len(results)} values, the model has {len(expected)}")
    for index, (result, wanted, other) in enumerate(zip(results, expected, own, strict=True)):
        for value in (result, other):
            if value.shape != wanted.shape or value.dtype != wanted.dtype:
                got = f"{tuple(value.shape)} {value.dtype}"
                raise ReferenceMismatch(
                    f"output {index} is {got}, in the model {tuple(wanted.shape)} {wanted.dtype}"
                )
        error = relative_error(result, wanted)
        if not error <= _SAME.get(wanted.dtype, 1e-5):
            raise ReferenceMismatch(f"output {index} of its reference is off by {error:.2e} (relative)")


def relative_error(result: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of ``wanted``; infinite where NaN or infinity differ."""
    if torch.equal(result, wanted):
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return float("inf")
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = result.to(kind), wanted.to(kind)
    odd = ~b.isfinite()
    if not torch.equal(~a.isfinite(), odd) or not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()):
        return float("inf")
    scale = float(b[~odd].abs().square().sum().sqrt())
    difference = float((a - b)[~odd].abs().square().sum().sqrt())
    return difference / scale if scale else difference


def _as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]
