"""What becomes of other people's models, from capture to a loaded artifact; see `zoo`."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from torch.utils._pytree import tree_leaves

import autokernel
from autokernel.capture.graph import capture
from autokernel.capture.source import LoadedModel, SourceSpec, load
from autokernel.extraction import extract
from autokernel.hardware import Ceilings
from autokernel.integrate.artifact import write_artifact
from autokernel.integrate.loaded import loaded_call, unload
from autokernel.profile_records import Profile
from autokernel.profiling import profile
from autokernel.records import Task

CEILINGS = Ceilings(1e11, {"float32": 1e12})
OUTSIDE = sorted(p.stem for p in (Path(__file__).parent / "outside_models").glob("*.py"))
IN_REGIONS = {  # share of ops, at least; of all others every op lies in a region
    "mixtral": 0.9, "qwen3-moe": 0.9,  # products by groups of rows, counted and sorted
    "mamba": 0.3,  # a scan inside vmap
    "clip": 0.98, "siglip": 0.98,  # the product of two towers
    "swin": 0.95,  # dead code
}  # fmt: skip
FILE = """
import sys
sys.path.insert(0, {here!r})
import zoo

MADE = []


def build():
    MADE[:] = zoo.make({name!r})
    return MADE[0]


def example_inputs(model):
    return MADE[1]
"""


def tensors(value: Any) -> list[Tensor]:
    """All tensors in what a model returned, in order: nests, dataclasses and the libraries' own outputs."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def through(loaded: LoadedModel, run: Path) -> tuple[Profile, list[Task], list[str]]:
    """Capture, profile, extract and load ``loaded``, each region's own code as its kernel, and compare.

    Returns the profile, the tasks, and what was said of regions that were not extracted.
    """
    graphs = capture(loaded.model, loaded.args, loaded.kwargs)
    found = profile(loaded, graphs, ceilings=CEILINGS)
    said: list[str] = []
    tasks = extract(found, run, starter=lambda task, gm: None, say=said.append)
    kept = [(task, task.dir / "kernel.py") for task in tasks]
    write_artifact(run / "optimized", kept, "plain", {}, {})
    fresh = loaded.fresh_inputs(7)
    with torch.no_grad():
        wanted = [tensors(call(loaded.model, given)) for given in ((loaded.args, loaded.kwargs), fresh)]
        model = autokernel.load(run, quiet=True)(loaded.model)
        for given, want in zip(((loaded.args, loaded.kwargs), fresh), wanted, strict=True):
            got = tensors(call(model, given))
            assert len(got) == len(want) > 0
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4, equal_nan=True)
        engaged = sum(loaded_call(model).engagement.sites.values())
        unload(model)
    wanted_sites = sum(t.call_count for t in tasks)
    # Pieces whose sizes depend on the data (an expert's share of the tokens) fit no kernel the next time.
    assert engaged >= wanted_sites or (len(graphs) > 1 and engaged > 0), (engaged, wanted_sites)
    return found, tasks, said


def call(model: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """With caches of its own: a decode step writes to the ones that it is given."""
    import copy

    args, kwargs = copy.deepcopy(given)
    return model(*args, **kwargs)


@pytest.fixture(autouse=True)
def quiet():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def from_zoo(name: str, folder: Path) -> LoadedModel:
    path = folder / "model.py"
    path.write_text(FILE.format(here=str(Path(__file__).parent), name=name), encoding="utf-8")
    return load(SourceSpec(str(path)))


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_from_capture_to_a_loaded_artifact(name: str, tmp_path: Path) -> None:
    pytest.importorskip(zoo.ZOO[name].library)
    found, tasks, said = through(from_zoo(name, tmp_path), tmp_path / "run")
    assert tasks and not any("does not give" in line or "differs" in line for line in said), said
    inside, ops = (sum(c) for c in zip(*(p.coverage() for p in found.partitions), strict=True))
    assert inside >= IN_REGIONS.get(name, 1.0) * ops, (inside, ops)


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTSIDE)
def test_models_of_somebody_who_does_not_know_us(name: str, tmp_path: Path) -> None:
    loaded = load(SourceSpec(str(Path(__file__).parent / "outside_models" / f"{name}.py")))
    _, tasks, said = through(loaded, tmp_path / "run")
    assert tasks and not said, said


def test_the_libraries_are_optional() -> None:
    assert "transformers" not in zoo.__dict__ and importlib.util.find_spec("zoo") is not None
    assert len(zoo.ZOO) >= 30 and {e.library for e in zoo.ZOO.values()} <= {"transformers", "timm"}
    assert sys.modules["zoo"] is zoo
