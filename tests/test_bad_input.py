"""Bad input from end to end: each kind is one line that says what to do, exit code 2, and no traceback.

The single checks of loading are in test_source.py; here are the kinds that were found by trying.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autokernel.capture import _hub
from autokernel.capture.graph import capture, nothing_found
from autokernel.capture.nest import of_its_own
from autokernel.capture.source import SourceSpec, load, try_forward
from autokernel.cli import main
from autokernel.errors import UsageError

HEAD = """\
import sys, os, threading
import torch
from torch import nn
import torch.nn.functional as F
"""
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        {forward}
def build():
    {build}
def example_inputs(model):
    return {inputs}
"""
GOOD = {"forward": "return F.gelu(self.a(x))", "build": "return Net()", "inputs": "torch.randn(2, 8)"}


def source(before: str = "", **parts: str) -> str:
    return HEAD + before + NET.format(**{**GOOD, **parts})


Profile = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Profile:
    """Run a verb on m.py with the given text: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autokernel"])

    def run(text: str, *arguments: str, verb: str = "profile") -> tuple[int, str, str]:
        Path("m.py").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as caught:
            main([verb, "m.py", "--device", "cpu", *arguments])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


def line(result: tuple[int, str, str]) -> str:
    """The one line of an error."""
    code, out, err = result
    lines = [text for text in err.splitlines() if text.startswith("autokernel: ")]
    assert code == 2 and len(lines) == 1 and out == "" and "Traceback" not in err, (code, out, err)
    return lines[0]


# --- model files ------------------------------------------------------------------------------------------

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "exits": ("import sys; sys.exit(3)\n", ("can't be imported: it calls sys.exit(3)", "m.py line 1")),
    "a base exception": (
        source("class E(BaseException): pass\n", forward="raise E('odd')"),
        ("fails on its example inputs: E: odd",),
    ),
    "closes a generator": (source(forward="raise GeneratorExit"), ("GeneratorExit: no message",)),
    "an error without words": (
        source("class E(Exception):\n    def __str__(self): return 1 / 0\n", forward="raise E()"),
        ("E: <exception str() failed>", "m.py line"),
    ),
    "control characters": (source(forward="raise ValueError('\\x1b[31mred\\a')"), ("ValueError: [31mred (",)),
    "a place once": ("x = (\n", ("SyntaxError: '(' was never closed (m.py line 1)",)),
    "relative import": ("from . import x\n", ("given as package.module:callable",)),
    "the class": (source(build="return Net"), ("returned the class Net", "call it")),
    "weights": (source(build="return Net().state_dict()"), ("an OrderedDict", "--checkpoint")),
    "a coroutine": (
        source().replace("def build", "async def build"),
        ("returned a coroutine, not an nn.Module",),
    ),
    "an async forward": (source().replace("def forward", "async def forward"), ("forward is async",)),
    "inputs without data": (
        source(inputs="torch.ones(2, 8, device='meta')"),
        ("tensors without data (meta device)",),
    ),
    "a scripted model": (
        source(build="return torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))"),
        ("scripted or traced", "build the model that it was made from"),
    ),
    "modules that can't be compared": (
        source("class E(nn.Linear):\n    __hash__ = None\n", build="return nn.Sequential(E(8, 8))"),
        ("can't be made ready on cpu", "unhashable"),
    ),
    "nothing to optimize": (source(forward="return x"), ("there is nothing to optimize",)),
    "a generator": (source(forward="yield F.gelu(self.a(x))"), ("nothing to optimize", "Generators")),
    "torch.compile refuses": (
        source(
            "@torch.library.custom_op('bad_input::op', mutates_args=())\n"
            "def op(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n",
            forward="return op(self.a(x))",
        ),
        ("runs by itself, but not under torch.compile", "no fake impl"),
    ),
    "torch.compile fails": (
        source(
            forward="try:\n            assert x.sum() > 1e9\n        except AssertionError:\n"
            "            x = x * 2\n        return F.gelu(self.a(x))"
        ),
        ("runs by itself, but not under torch.compile",),
    ),
    "no room for weights": (
        source(build="return nn.Linear(2_000_000, 2_000_000)"),
        ("build() failed: out of memory (14901.16 GiB more were needed): build a smaller model",),
    ),
    "no room in numpy": (
        source(forward="import numpy; return x * numpy.ones(10**13).sum()"),
        ("out of memory (72.8 TiB more were needed)", "--input-shape"),
    ),
    "more than 64 bits": (source(forward="return x.new_empty(2**62, 8)"), ("out of memory",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_model_files(kind: str, profile: Profile) -> None:
    text, parts = FILES[kind]
    said = line(profile(text))
    for part in parts:
        assert part in said, said


def test_nothing_to_extract(profile: Profile) -> None:
    said = line(profile(source(forward="return x.view(-1)"), verb="extract"))
    assert "nothing to extract" in said and "autokernel profile" in said


def test_dynamo_switched_off() -> None:
    with torch._dynamo.config.patch(disable=True):
        found = capture(nn.Linear(2, 2), (torch.ones(1, 2),))
        assert not found and "TORCH_COMPILE_DISABLE" in nothing_found(found)


ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "more digits than Python reads": (["--input-shape", "9" * 5000], "more than fits any memory"),
    "more than a size may be": (["--input-shape", "99999999999999999999,8"], "more than fits any memory"),
    "more elements than there are bytes": (["--input-shape", "9000000000000000000,8"], "more than fits"),
    "shapes are what fails": (["--input-shape", "2,9"], "the model fails on --input-shape: RuntimeError"),
    "no such class": (["--class-name", "Nope"], "pass --class-name with one of its modules (Net)"),
    "a model instead of a class": (["--class-name", "made"], "write a build() that makes it"),
    "an empty device": (["--device", ""], "cpu, cuda or cuda:N"),
    "a file for JSON in no folder": (["--json-out", "nowhere/x.json"], "can't write nowhere/x.json"),
    "a folder for JSON": (["--json-out", "."], "can't write ."),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments(kind: str, profile: Profile) -> None:
    arguments, part = ARGUMENTS[kind]
    assert part in line(profile(source() + "made = Net()\n", *arguments))
    assert not Path("runs/m/profile.json").exists()


def test_a_name_longer_than_a_file_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["profile", "a" * 5000 + ".py"])
    assert caught.value.code == 2 and "no such model file" in capsys.readouterr().err


def test_classes_that_a_file_brings_in_are_named(profile: Profile) -> None:
    assert "(Linear, Conv2d)" in line(profile("from torch.nn import Linear, Conv2d\n", "--class-name", "X"))


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("", "no model is given"),
        ("m.py:Net", "m.py --class-name Net"),
        ("a" * 5000, "no such file"),
        ("./nodir", "no such file or folder"),
        ("nodir/", "no such"),
        ("/nodir/x", "no such file or folder"),
        ("https://huggingface.co/org/name", "is hf:org/name"),
        ("HF:", "names no model"),
    ],
)
def test_sources_that_are_none(model: str, part: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$") as caught:
        load(SourceSpec(model))
    assert part in str(caught.value)


def test_two_ways_to_say_what_to_call() -> None:
    with pytest.raises(UsageError, match="leave --class-name out"):
        load(SourceSpec("torch.nn:Identity", class_name="ReLU", input_shapes=("1,2",)))


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("Unsupported dtype Half", "in float16: try --dtype float32"),
        ("linalg.inv: Low precision dtypes not supported. Got BFloat16", "in bfloat16: try --dtype float32"),
        ("expected m1 and m2 to have the same dtype, but got: c10::Half != float", "--dtype changes weights"),
        ("bad size Exception raised from f at x.cpp:75 (most recent call first): frame #0", "bad size (m.py"),
    ],
)
def test_what_torch_says_of_number_types(error: str, part: str, profile: Profile) -> None:
    assert part in line(profile(source(forward=f"raise RuntimeError({error!r})")))


# --- what a file does besides -----------------------------------------------------------------------------


def test_what_the_model_prints_is_not_in_the_result(profile: Profile) -> None:
    noisy = source("print('x' * 100_000)\n", forward="print('in forward'); return F.gelu(self.a(x))")
    code, out, err = profile(noisy, "--json")
    assert code == 0 and json.loads(out)["regions"]
    assert "in forward" in err and "x" * 100_000 in err


def test_a_file_with_a_command_line_of_its_own(profile: Profile) -> None:
    assert profile(source("import argparse; argparse.ArgumentParser().parse_args()\n"))[0] == 0
    assert sys.argv[1] == "profile"


def test_a_file_that_goes_to_another_folder(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    assert profile(source("os.chdir('else')\n"))[0] == 0
    assert Path.cwd() == tmp_path and Path("runs/m/profile.json").exists()


@pytest.mark.parametrize("build", ["torch.compile(Net(), backend='eager')", "compiled(Net())"])
def test_a_model_that_comes_compiled(build: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text(
        source("def compiled(m):\n    m.compile(backend='eager')\n    return m\n", build=f"return {build}")
    )
    loaded = load(SourceSpec(str(tmp_path / "m.py")))
    assert type(loaded.model).__name__ == "Net" and loaded.model._compiled_call_impl is None
    assert "compiled already" in capsys.readouterr().err
    assert len(capture(loaded.model, loaded.args)) == 1


def test_an_exported_model(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        source(build="return torch.export.export(Net(), (torch.ones(2, 8),)).module()")
    )
    assert try_forward(load(SourceSpec(str(tmp_path / "m.py")))).shape == (2, 8)


@pytest.mark.parametrize("what", ["threading.Lock()", "open(__file__)", "(i for i in range(3))"])
def test_inputs_of_which_there_is_no_second_one(what: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        source(
            "class Batch:\n    def __init__(self): self.x, self.held = torch.ones(2, 8), " + what + "\n",
            forward="return F.gelu(self.a(x.x))",
            inputs="(Batch(),)",
        )
    )
    loaded = load(SourceSpec(str(tmp_path / "m.py")))
    own = of_its_own(loaded.args)[0]
    assert own is not loaded.args[0] and own.held is loaded.args[0].held and own.x is loaded.args[0].x
    assert try_forward(loaded).shape == (2, 8)


@pytest.mark.parametrize("name", ["fp16", "torch.float16", "Half"])
def test_number_types_by_other_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(source())
    spec = SourceSpec(str(tmp_path / "m.py"), dtype=name, input_shapes=(f"2,8:{name}",))
    assert load(spec).args[0].dtype == torch.float16


# --- weights ----------------------------------------------------------------------------------------------


def plain_state() -> dict[str, Any]:
    return {f"a.{k}": v for k, v in nn.Linear(8, 8).state_dict().items()}


BAD_TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "without data": (lambda: torch.empty(8, 8, device="meta"), "1 without data, first a.weight"),
    "sparse": (lambda: torch.eye(8).to_sparse(), "1 sparse, first a.weight"),
    "complex": (lambda: torch.ones(8, 8, dtype=torch.complex64), "1 of complex numbers, first a.weight"),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_tensors_that_can_not_be_laid_over(kind: str, profile: Profile, tmp_path: Path) -> None:
    make, part = BAD_TENSORS[kind]
    torch.save(plain_state() | {"a.weight": make()}, tmp_path / "w.pt")
    assert part in line(profile(source(), "--checkpoint", "w.pt"))


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "w.pt": (b"", "is an empty file"),
    "w.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "w.bin": (b"<!DOCTYPE html>", "is not a file of weights"),
    "w.pth": (b"\x80\x02]q\x00(K\x01", "--checkpoint w.pth"),
    "w.index.json": (b"[" * 100_000, "is not an index of weights"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_weights(name: str, profile: Profile, tmp_path: Path) -> None:
    content, part = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    assert part in line(profile(source(), "--checkpoint", name))


def test_a_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    """Wherever a download stops, and whatever torch.load makes of the rest, it is one line."""
    (tmp_path / "m.py").write_text(source())
    torch.save(plain_state(), tmp_path / "new.pt")
    torch.save(plain_state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for whole in ("new.pt", "old.pt"):
        content = (tmp_path / whole).read_bytes()
        for size in range(1, len(content), max(1, len(content) // 60)):
            (tmp_path / "w.pt").write_bytes(content[:size])
            with pytest.raises(UsageError, match=r"^--checkpoint [^\n]+$"):
                load(SourceSpec(str(tmp_path / "m.py"), checkpoint=str(tmp_path / "w.pt")))


def test_a_scripted_model_is_no_file_of_weights(profile: Profile, tmp_path: Path) -> None:
    torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8)).save(str(tmp_path / "w.pt"))
    assert "is a scripted model, not weights" in line(profile(source(), "--checkpoint", "w.pt"))


def test_weights_over_lazy_layers(profile: Profile, tmp_path: Path) -> None:
    lazy = source(build="return nn.Sequential(nn.LazyLinear(8), nn.GELU())")
    state = {"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8)}
    (tmp_path / "m.py").write_text(lazy)
    torch.save(state, tmp_path / "w.pt")
    loaded = load(SourceSpec(str(tmp_path / "m.py"), checkpoint=str(tmp_path / "w.pt")))
    try_forward(loaded)
    assert (loaded.model[0].weight == 1).all()
    del state["0.weight"]
    torch.save(state, tmp_path / "w.pt")
    assert "1 missing, first 0.weight" in line(profile(lazy, "--checkpoint", "w.pt"))


# --- libraries --------------------------------------------------------------------------------------------


def test_a_folder_that_is_none_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"is a folder without config\.json"):
        load(SourceSpec(str(tmp_path)))


@pytest.mark.parametrize("named", [7, "BertModel", [3]])
def test_architectures_that_are_no_names(named: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": named}))
    with pytest.raises(UsageError, match="not a list of class names"):
        load(SourceSpec(str(tmp_path)))


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a Hub whose server takes no connection."""
    hub = pytest.importorskip("huggingface_hub")
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "https://127.0.0.1:9")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("model", "library"), [("hf:org/nothing", "transformers"), ("timm:resnet18.a1_in1k", "timm")]
)
def test_names_without_network_fail_at_once(model: str, library: str) -> None:
    pytest.importorskip(library)
    from huggingface_hub import constants

    began = time.monotonic()
    with pytest.raises(UsageError, match="not in the cache, and the Hub can't be asked") as caught:
        load(SourceSpec(model))
    assert time.monotonic() - began < 8 and "\n" not in str(caught.value)  # the Hub's client alone takes 20
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("no_network")
def test_only_a_proxy_knows_what_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _hub.reachable()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert _hub.reachable()
