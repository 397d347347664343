"""Task folders: what they hold runs by itself and equals the model."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import SMALL, graphs_of, small
from torch import fx

from autokernel.capture.source import LoadedModel, SourceSpec, load
from autokernel.extraction import (
    ReferenceMismatch,
    check_reference,
    extract,
    lay_out,
    load_inputs,
    relative_error,
)
from autokernel.hardware import Ceilings
from autokernel.profile_records import Profile
from autokernel.profiling import profile
from autokernel.records import Task

CEILINGS = Ceilings(1e11, {"float32": 1e12, "float16": 1e12})


def profile_of(loaded: LoadedModel) -> Profile:
    return profile(loaded, graphs_of(loaded), ceilings=CEILINGS)


def own_ops(task: Task, gm: fx.GraphModule) -> None:
    """A starter that writes nothing, so that kernel.py holds the region's own ops."""


def refuse(line: str) -> None:
    raise AssertionError(line)


def module_of(path: Path) -> dict[str, object]:
    scope: dict[str, object] = {"__name__": "under_test", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope


def tensors(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile_of(small("nano", tmp_path_factory.mktemp("nano")))


@pytest.fixture(scope="module", params=SMALL)
def extracted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Profile, list[Task]]:
    folder = tmp_path_factory.mktemp(request.param)
    found = profile_of(small(request.param, folder))
    return found, extract(found, folder / "run", starter=own_ops, say=refuse)


def test_every_region_becomes_a_task(extracted: tuple[Profile, list[Task]]) -> None:
    found, tasks = extracted
    assert [t.fingerprint for t in tasks] == [r.fingerprint for r in found.regions]
    for task in tasks:
        assert {p.name for p in task.dir.iterdir()} == {
            "task.json", "reference.py", "inputs.safetensors", "kernel.py", "attempts",
        }  # fmt: skip
        again = Task.load(task.dir)
        assert again == task
        assert task.dir.name == task.name
        assert task.inputs_left_out == []


def test_references_equal_the_model_at_every_site(extracted: tuple[Profile, list[Task]]) -> None:
    """Checked against a run of the whole graph, at all call sites, through the files alone."""
    found, tasks = extracted
    values: dict[fx.Node, torch.Tensor] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            values[n] = super().run_node(n)
            return values[n]

    for part in found.partitions:
        with torch.no_grad():
            Keep(part.graph.gm, garbage_collect_values=False).run(*part.graph.example_inputs)
    checked = 0
    for task, kind in zip(tasks, found.regions, strict=True):
        reference = module_of(task.dir / "reference.py")["Model"]()  # type: ignore[operator]
        kernel = module_of(task.dir / "kernel.py")["kernel_fn"]
        for region in kind.sites:
            inputs = [values[n] for n in region.inputs]
            with torch.no_grad():
                for function in (reference, kernel):
                    results = tensors(function(*inputs))  # type: ignore[operator]
                    for result, node in zip(results, region.outputs, strict=True):
                        assert relative_error(result, values[node]) < 1e-6
                        checked += 1
    assert checked >= 2 * sum(r.call_count for r in found.regions)


def test_references_run_by_themselves(extracted: tuple[Profile, list[Task]], tmp_path: Path) -> None:
    _, tasks = extracted
    task = next(t for t in tasks if t.family == "attention")
    done = subprocess.run(
        [sys.executable, str(task.dir / "reference.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert str(task.outputs[0].shape) in done.stdout and "nan" not in done.stdout


def test_references_are_readable(extracted: tuple[Profile, list[Task]]) -> None:
    _, tasks = extracted
    for task in tasks:
        text = (task.dir / "reference.py").read_text()
        tree = ast.parse(text)
        assert "torch._C" not in text and "autokernel" not in text and "l_self_" not in text
        assert 'DEVICE = "cpu"' in text and 'torch.device("cpu")' not in text
        assert [n.name for n in tree.body if isinstance(n, ast.ClassDef)] == ["Model"]
        assert {"get_inputs", "get_init_inputs"} <= {
            n.name for n in tree.body if isinstance(n, ast.FunctionDef)
        }
        docstring = ast.get_docstring(tree) or ""
        assert all(str(port.shape) in docstring for port in [*task.inputs, *task.outputs])
        assert task.module_paths[0] in docstring


def test_get_inputs_match_the_ports(extracted: tuple[Profile, list[Task]]) -> None:
    _, tasks = extracted
    for task in tasks:
        scope = module_of(task.dir / "reference.py")
        inputs = scope["get_inputs"]()  # type: ignore[operator]
        again = scope["get_inputs"]()  # type: ignore[operator]
        for value, other, port in zip(inputs, again, task.inputs, strict=True):
            assert tuple(value.shape) == port.shape
            assert str(value.dtype) == f"torch.{port.dtype}"
            assert [s for n, s in zip(port.shape, value.stride(), strict=True) if n > 1] == [
                s for n, s in zip(port.shape, port.stride, strict=True) if n > 1
            ]
            random = port.role in ("activation", "parameter")
            assert torch.equal(value, other) != random
            if port.high is not None:
                assert int(value.min()) >= 0 and int(value.max()) < port.high


def test_saved_inputs_come_back_as_they_were(extracted: tuple[Profile, list[Task]]) -> None:
    found, tasks = extracted
    for task, kind in zip(tasks, found.regions, strict=True):
        values = load_inputs(task)
        statics = kind.sites[0].static_values()
        assert all(v is not None for v in values)
        for value, wanted in zip(values[len(task.activations) :], statics, strict=True):
            assert value is not None and torch.equal(value, wanted) and value.stride() == wanted.stride()
        for value, port in zip(values, task.inputs, strict=True):
            assert value is not None and value.stride() == port.stride


def test_complex_buffers_keep_their_values(tmp_path: Path) -> None:
    found = profile_of(small("llama", tmp_path))
    (task,) = [t for t in extract(found, tmp_path / "run", starter=own_ops, say=refuse) if t.family == "rope"]
    (port,) = [p for p in task.inputs if p.dtype == "complex64"]
    value = module_of(task.dir / "reference.py")["get_inputs"]()[task.inputs.index(port)]  # type: ignore[operator]
    assert value.is_complex() and torch.allclose(value.abs(), torch.ones(()))


def test_a_second_extraction_keeps_numbers_and_kernels(nano: Profile, tmp_path: Path) -> None:
    first = extract(nano, tmp_path / "run", starter=own_ops, top=3, say=refuse)
    (first[0].dir / "kernel.py").write_text("# edited\n")
    other = replace(nano, regions=nano.regions[::-1])  # another ranking
    second = extract(other, tmp_path / "run", starter=own_ops, say=refuse)
    names = {t.fingerprint: t.name for t in second}
    assert all(names[t.fingerprint] == t.name for t in first)
    assert len({t.rank for t in second}) == len(second) == len(nano.regions)
    assert (first[0].dir / "kernel.py").read_text() == "# edited\n"


def test_the_size_of_saved_inputs_is_bounded(nano: Profile, tmp_path: Path) -> None:
    limit = 10_000
    tasks = extract(nano, tmp_path / "run", starter=own_ops, limit_bytes=limit, say=refuse)
    assert any(t.inputs_left_out for t in tasks)
    for task in tasks:
        data = json.loads((task.dir / "task.json").read_text())
        assert data["inputs_left_out"] == task.inputs_left_out
        values = load_inputs(task)
        assert [p.name for p, v in zip(task.inputs, values, strict=True) if v is None] == task.inputs_left_out
        assert sum(v.nbytes for v in values if v is not None) <= limit
        # A mask is worth more than an activation, which can be drawn.
        roles = {p.role for p in task.inputs if p.name in task.inputs_left_out}
        assert "constant" not in roles


def test_the_starter_is_asked_for_and_may_decline(nano: Profile, tmp_path: Path) -> None:
    asked: list[str] = []

    def starter(task: Task, gm: fx.GraphModule) -> str | None:
        asked.append(task.family)
        assert len([n for n in gm.graph.nodes if n.op == "placeholder"]) == len(task.inputs)
        return "# a starter\n" if task.family == "norm" else None

    for task in extract(nano, tmp_path / "run", starter=starter, say=refuse):
        text = (task.dir / "kernel.py").read_text()
        assert (text == "# a starter\n") == (task.family == "norm")
        assert task.family == "norm" or 'BACKEND = "torch"' in text
    assert len(asked) == len(nano.regions)


def test_kernels_never_hand_back_their_inputs(tmp_path: Path) -> None:
    """A region whose result is a view of its input gets a kernel that copies it."""
    path = tmp_path / "m.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class M(nn.Module):\n"
        "    def forward(self, x):\n        y = x.float()\n        return y, (y * 2).relu(), y.view(-1)\n"
        "def build():\n    return M()\n"
        "def example_inputs(m):\n    return torch.randn(4, 4)\n"
    )
    found = profile_of(load(SourceSpec(str(path))))
    for task in extract(found, tmp_path / "run", starter=own_ops, say=refuse):
        x = torch.randn(4, 4)
        results = tensors(module_of(task.dir / "kernel.py")["kernel_fn"](x))  # type: ignore[operator]
        places = [x.data_ptr(), *(r.data_ptr() for r in results)]
        assert len(set(places)) == len(places)


def test_strides_survive() -> None:
    base = torch.randn(3, 4, 5)
    for value in (base, base.transpose(0, 2), base[:, :1].expand(3, 4, 5), base[:, ::2]):
        copy = lay_out(value, value.stride())
        assert torch.equal(copy, value) and copy.stride() == value.stride()
        assert copy.data_ptr() != value.data_ptr()


# --- the check of references ------------------------------------------------------------------------------

REFERENCE = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return {result}
def get_inputs():
    return [torch.ones(3)]
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("x * 2", None),
        ("x * 2.001", "off by"),
        ("x * 2 + float('nan')", "off by inf"),
        ("(x * 2)[:2]", "output 0 is"),
        ("(x * 2).double()", "output 0 is"),
        ("(x * 2, x)", "returns 2 values"),
        ("x + nothing", "NameError"),
    ],
)
def test_a_reference_that_differs_is_found(tmp_path: Path, result: str, message: str | None) -> None:
    path = tmp_path / "reference.py"
    path.write_text(REFERENCE.format(result=result))
    x = torch.tensor([1.0, -2.0, 3.0])
    if message is None:
        check_reference(path, [x], [x * 2])
    else:
        with pytest.raises(ReferenceMismatch, match=message):
            check_reference(path, [x], [x * 2])


def test_a_region_that_cannot_be_written_is_reported(
    nano: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import autokernel.extraction as extraction

    real = extraction.reference_text

    def broken(task: Task, *rest: object) -> str:
        text = real(task, *rest)  # type: ignore[arg-type]
        return (
            text.replace("softmax", "sigmoid").replace(", dim=-1", "") if task.family == "attention" else text
        )

    monkeypatch.setattr(extraction, "reference_text", broken)
    said: list[str] = []
    tasks = extract(nano, tmp_path / "run", starter=own_ops, say=said.append)
    assert len(said) == 1 and "attention" in said[0] and "not extracted" in said[0] and "off by" in said[0]
    assert len(tasks) == len(nano.regions) - 1


def test_relative_error() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0
    assert relative_error(x * 1.1, x) == pytest.approx(0.1, rel=1e-5)
    inf = torch.tensor([1.0, float("inf")])
    assert relative_error(inf, inf.clone()) == 0
    assert relative_error(-inf, inf) == float("inf")
    assert relative_error(x, inf) == float("inf")
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
