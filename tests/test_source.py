"""Model sources: what loads, what it becomes, and the one line that each mistake gets."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import small, small_file

from autokernel.capture.source import SourceSpec, load, try_forward
from autokernel.errors import DeviceMissing, UsageError

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 8)
        self.lin = nn.Linear(8, 4)
        self.register_buffer("freqs", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, tokens):
        return torch.view_as_real(self.lin(self.table(tokens)).float() * self.freqs)

def make():
    return Net()
"""
BUILD = """
def build():
    return Net()

def example_inputs(model):
    return (torch.randint(0, 37, (2, 5)),)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET + BUILD)
    return path


def error_of(spec: SourceSpec, *expected: str) -> str:
    """The message of the UsageError that loading gives: one line that holds all the expected texts."""
    with pytest.raises(UsageError) as caught:
        load(spec)
    text = str(caught.value)
    assert "\n" not in text
    for part in expected:
        assert part in text, text
    return text


# --- what loads -------------------------------------------------------------------------------------------


def test_file_with_build(net: Path) -> None:
    loaded = load(SourceSpec(str(net)))
    assert loaded.name == "net"
    assert not loaded.model.training
    assert loaded.kwargs == {}
    assert loaded.args[0].shape == (2, 5)
    assert try_forward(loaded).shape == (2, 5, 4, 2)


def test_two_processes_build_the_same(net: Path) -> None:
    code = (
        "import sys; from autokernel.capture.source import *\n"
        "l = load(SourceSpec(sys.argv[1]))\n"
        "print(l.identity, l.model.lin.weight.sum().item(), l.args[0].tolist())"
    )
    torch.manual_seed(77)  # whatever happened before must not matter
    loaded = load(SourceSpec(str(net)))
    here = f"{loaded.identity} {loaded.model.lin.weight.sum().item()} {loaded.args[0].tolist()}"
    done = subprocess.run([sys.executable, "-c", code, str(net)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def test_loading_leaves_the_random_state_alone(net: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(SourceSpec(str(net))).fresh_inputs(9)
    assert torch.equal(torch.rand(3), expected)


def test_class_name_and_shape(net: Path) -> None:
    loaded = load(SourceSpec(str(net), class_name="Net", input_shapes=("3,7",)))
    tokens = loaded.args[0]
    assert tokens.shape == (3, 7) and tokens.dtype == torch.int64
    highest = max(int(loaded.fresh_inputs(seed)[0][0].max()) for seed in range(30))
    assert highest == 36  # the whole embedding is used, and nothing beyond


SEVERAL = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 8)
        self.lin = nn.Linear(16, 8)

    def forward(self, ids, features):
        return self.table(ids) + self.lin(features)[:, None]

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 8)

    def forward(self, x, scale):
        return self.table(x) * scale[..., None]  # whole numbers would do, and are not meant

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, mask, keep):
        return torch.where(keep, self.lin(x), 0.0).masked_fill(~mask, -1.0)

class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(11, 4))

    def forward(self, x, which):
        return x @ self.rows[which].mT + self.rows.index_select(0, which).sum()

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(29, 4)
        self.places = nn.Embedding(50, 4)

    def forward(self, x, where, *, training=False):
        return self.words(x.view(-1, 5)) + self.places(input=where)
"""


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "below"),
    [
        ("Mixed", ("3,5", "3,16"), ("int64", "float32"), (37, None)),
        ("Scaled", ("3,5", "3,5"), ("int64", "float32"), (37, None)),
        ("Masked", ("3,8", "3,8", "3,8"), ("float32", "bool", "bool"), (None, None, None)),
        ("Gathered", ("2,3,4", "6"), ("float32", "int64"), (None, 11)),
        ("Words", ("10", "2"), ("int64", "int64"), (29, 50)),
    ],
)
def test_types_by_what_the_model_takes(
    tmp_path: Path, name: str, shapes: tuple[str, ...], dtypes: tuple[str, ...], below: tuple[int | None, ...]
) -> None:
    path = tmp_path / "several.py"
    path.write_text(SEVERAL)
    loaded = load(SourceSpec(str(path), class_name=name, input_shapes=shapes))
    assert [str(a.dtype).removeprefix("torch.") for a in loaded.args] == list(dtypes)
    assert loaded._highs == list(below)
    try_forward(loaded)
    loaded(*loaded.fresh_inputs(3)[0])


def test_number_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "several.py"
    path.write_text(SEVERAL)
    for shapes in (("3,5",), ("3,5",) * 3):
        error_of(
            SourceSpec(str(path), class_name="Mixed", input_shapes=shapes),
            f"{len(shapes)} --input-shape for Mixed.forward, which takes ids, features",
        )


def test_no_choice_of_types_works(tmp_path: Path) -> None:
    path = tmp_path / "several.py"
    path.write_text(SEVERAL)
    spec = SourceSpec(str(path), class_name="Mixed", input_shapes=("3,5", "3,17"))
    error_of(spec, "the model fails on --input-shape: RuntimeError", "(several.py line 12)")


def test_shape_with_a_type(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.e = nn.Embedding(5, 4)\n"
        "    def forward(self, x, ids, mask):\n        return x + self.e(ids) * mask[..., None]\n"
    )
    shapes = ("2,3,4", "2,3:int32", "2,3:bool")
    loaded = load(SourceSpec(str(path), class_name="Two", input_shapes=shapes))
    assert [a.dtype for a in loaded.args] == [torch.float32, torch.int32, torch.bool]
    assert int(loaded.args[1].max()) < 5


def test_module_and_callable(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.parent)
    loaded = load(SourceSpec("net:make"))
    assert loaded.name == "make"
    assert loaded.args[0].shape == (2, 5)
    assert load(SourceSpec("torch.nn:Identity", input_shapes=("2,3",))).args[0].dtype == torch.float32


def test_dict_inputs_are_keywords(tmp_path: Path) -> None:
    path = tmp_path / "kw.py"
    path.write_text(NET + BUILD.replace("return (torch", "return dict(tokens=torch").replace("5)),)", "5)))"))
    loaded = load(SourceSpec(str(path)))
    assert loaded.args == () and list(loaded.kwargs) == ["tokens"]
    assert try_forward(loaded).shape == (2, 5, 4, 2)


def test_dtype_casts_real_floats_only(tmp_path: Path) -> None:
    loaded = small("llama", tmp_path, dtype="float16")
    assert loaded.model.output.weight.dtype == torch.float16
    assert loaded.model.freqs_cis.dtype == torch.complex64
    assert loaded.args[0].dtype == torch.int64
    assert loaded.model.freqs_cis.imag.abs().max() > 0.1


def test_without_dtype_the_model_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double())\n"
        "def example_inputs(model):\n    return torch.ones(2, 3, dtype=torch.bfloat16)\n"
    )
    model = load(SourceSpec(str(path))).model
    assert [p.dtype for p in model.parameters()][::2] == [torch.bfloat16, torch.float64]


def test_tied_weights_stay_tied_through_dtype(tmp_path: Path) -> None:
    model = small("gpt2", tmp_path, dtype="bfloat16").model
    assert model.lm_head.weight is model.wte.weight
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()


def test_folder_is_on_the_path_only_while_loading(tmp_path: Path) -> None:
    before = list(sys.path)
    small("nano", tmp_path)
    assert sys.path == before


def test_helpers_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    values = {}
    for name, size in (("a", 3), ("b", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sizes.py").write_text(f"SIZE = {size}\n")
        (folder / "m.py").write_text(
            "import torch\nfrom torch import nn\nfrom sizes import SIZE\n"
            "def build():\n    return nn.Linear(SIZE, 1)\n"
            "def example_inputs(model):\n    return torch.ones(1, SIZE)\n"
        )
        values[name] = load(SourceSpec(str(folder / "m.py")))
    assert values["a"].model.in_features == 3
    assert values["b"].model.in_features == 5
    assert values["a"].identity != values["b"].identity


def test_a_model_file_may_have_the_name_of_a_library_module(tmp_path: Path) -> None:
    path = tmp_path / "statistics.py"
    path.write_text(NET + BUILD)
    load(SourceSpec(str(path)))
    import statistics

    assert statistics.median([1, 2, 3]) == 2


def test_spec_survives_json() -> None:
    spec = SourceSpec("m.py", "Net", ("1,2", "3"), "float16", "w.pt", "cuda:1")
    assert SourceSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_importing_the_module_does_not_import_torch() -> None:
    code = "import sys; import autokernel.capture.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- fresh inputs -----------------------------------------------------------------------------------------


def test_fresh_inputs_follow_the_seed(net: Path) -> None:
    loaded = load(SourceSpec(str(net)))
    first, again, other = (loaded.fresh_inputs(seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert other.shape == loaded.args[0].shape and other.dtype == loaded.args[0].dtype


def test_fixed_example_inputs_are_drawn_afresh(tmp_path: Path) -> None:
    path = tmp_path / "fixed.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class M(nn.Module):\n    def forward(self, x, ids, keep):\n        return x\n"
        "def build():\n    return M()\n"
        "def example_inputs(model):\n"
        "    return torch.linspace(90, 110, 4000), torch.arange(7), torch.tensor([True, True, False])\n"
    )
    loaded = load(SourceSpec(str(path)))
    (x, ids, keep), _ = loaded.fresh_inputs(3)
    assert not torch.equal(x, loaded.args[0])
    assert abs(float(x.mean()) - 100) < 1 and abs(float(x.std()) - float(loaded.args[0].std())) < 0.5
    assert sorted(ids.tolist()) == list(range(7))
    assert int(keep.sum()) == 2


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_checkpoint_is_laid_over(net: Path, tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    plain = load(SourceSpec(str(net)))
    state = {k: torch.randn_like(v) for k, v in plain.model.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    loaded = load(SourceSpec(str(net), checkpoint=str(path)))
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, state[name])
    assert loaded.identity != plain.identity


def test_checkpoint_of_tied_weights_may_hold_one_of_them(tmp_path: Path) -> None:
    file = small_file("gpt2", tmp_path)
    state = dict(load(SourceSpec(str(file))).model.state_dict())
    del state["lm_head.weight"]
    state["wte.weight"] = torch.full_like(state["wte.weight"], 0.5)
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "w.pt")
    # A wrapper and DistributedDataParallel's prefix are looked through as well.
    model = load(SourceSpec(str(file), checkpoint=str(tmp_path / "w.pt"))).model
    assert model.lm_head.weight.mean().item() == 0.5


def test_checkpoint_that_does_not_fit(net: Path, tmp_path: Path) -> None:
    state = dict(load(SourceSpec(str(net))).model.state_dict())
    state["lin.weight"] = torch.zeros(2, 2)
    state["extra"] = torch.zeros(1)
    del state["table.weight"], state["lin.bias"]
    torch.save(state, tmp_path / "bad.pt")
    spec = SourceSpec(str(net), checkpoint=str(tmp_path / "bad.pt"))
    error_of(
        spec, "2 missing, first table.weight", "1 unexpected, first extra", "1 of another shape", "(2, 2) in"
    )


def test_checkpoint_with_code_in_it(net: Path, tmp_path: Path) -> None:
    torch.save(load(SourceSpec(str(net))).model, tmp_path / "model.pt")  # a whole pickled module
    error_of(SourceSpec(str(net), checkpoint=str(tmp_path / "model.pt")), "plain weights", "state_dict()")


def test_damaged_checkpoints(net: Path, tmp_path: Path) -> None:
    for name in ("w.safetensors", "w.pt"):
        (tmp_path / name).write_bytes(b"not weights at all")
        error_of(SourceSpec(str(net), checkpoint=str(tmp_path / name)), "--checkpoint", name)
    error_of(SourceSpec(str(net), checkpoint="nowhere.pt"), "nowhere.pt", "no such file")
    torch.save([1, 2], tmp_path / "list.pt")
    error_of(SourceSpec(str(net), checkpoint=str(tmp_path / "list.pt")), "holds a list")
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "run.pt")
    error_of(
        SourceSpec(str(net), checkpoint=str(tmp_path / "run.pt")),
        "2 entries that are not tensors, first epoch",
    )


def sharded(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Weights in ``folder``, one file for every tensor, as transformers lays out large models."""
    from safetensors.torch import save_file

    folder.mkdir()
    names = {name: f"model-{i:05}-of-{len(state):05}.safetensors" for i, name in enumerate(state)}
    for name, file in names.items():
        save_file({name: state[name].contiguous()}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def test_sharded_checkpoint(net: Path, tmp_path: Path) -> None:
    plain = load(SourceSpec(str(net)))
    index = sharded({k: torch.randn_like(v) for k, v in plain.model.state_dict().items()}, tmp_path / "w")
    by_index, by_folder = (load(SourceSpec(str(net), checkpoint=str(p))) for p in (index, index.parent))
    for one, other in zip(by_index.model.parameters(), by_folder.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(by_index.model.lin.weight, plain.model.lin.weight)
    assert plain.identity != by_index.identity == by_folder.identity
    shard = index.parent / "model-00000-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    error_of(SourceSpec(str(net), checkpoint=str(index)), "--checkpoint", shard.name, "cut off")
    shard.unlink()
    error_of(SourceSpec(str(net), checkpoint=str(index)), "files that are not there: 1 absent", shard.name)
    for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        error_of(SourceSpec(str(net), checkpoint=str(index)), "is not an index of weights")
    index.unlink()
    error_of(
        SourceSpec(str(net), checkpoint=str(index.parent)), "folder without weights", "model.safetensors"
    )


def test_names_that_begin_like_a_wrapper_s(tmp_path: Path) -> None:
    path = tmp_path / "wrapped.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class W(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.module = nn.Linear(2, 2)\n"
        "    def forward(self, x):\n        return self.module(x)\n"
        "def build():\n    return W()\n"
        "def example_inputs(model):\n    return torch.ones(1, 2)\n"
    )
    state = {k: torch.full_like(v, 3) for k, v in load(SourceSpec(str(path))).model.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    assert (load(SourceSpec(str(path), checkpoint=str(tmp_path / "w.pt"))).model.module.bias == 3).all()


def test_weights_for_worker_processes(net: Path, tmp_path: Path) -> None:
    loaded = load(SourceSpec(str(net), dtype="float16"))
    with torch.no_grad():
        loaded.model.lin.weight.fill_(0.25)
    torch.save(loaded.model.state_dict(), tmp_path / "w.pt")
    other = load(SourceSpec(str(net), dtype="float16"), weights=tmp_path / "w.pt")
    assert bool((other.model.lin.weight == 0.25).all())
    assert other.identity == loaded.identity


# --- identity ---------------------------------------------------------------------------------------------


def test_identity_depends_on_what_is_computed(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(SourceSpec(str(net))).identity
    monkeypatch.chdir(tmp_path)
    assert load(SourceSpec("net.py")).identity == base  # the same file by another path
    assert load(SourceSpec(str(net), dtype="fp16")).identity != base
    assert (
        load(SourceSpec(str(net), dtype="fp16")).identity
        == load(SourceSpec(str(net), dtype="float16")).identity
    )
    assert load(SourceSpec(str(net), class_name="Net")).identity != base
    net.write_text(net.read_text() + "# edited\n")
    assert load(SourceSpec(str(net))).identity != base


def test_identity_covers_helpers_beside_the_file(tmp_path: Path) -> None:
    file = small_file("nano", tmp_path)
    base = load(SourceSpec(str(file))).identity
    helper = tmp_path / "nano_full.py"
    helper.write_text(helper.read_text() + "# edited\n")
    assert load(SourceSpec(str(file))).identity != base


# --- mistakes ---------------------------------------------------------------------------------------------


def test_no_such_file(net: Path) -> None:
    error_of(SourceSpec("nowhere.py"), "nowhere.py", "no such file")
    error_of(SourceSpec(str(net.with_name("nett.py"))), "no such file", "did you mean", "net.py")
    error_of(SourceSpec("nowhere"), "no such file")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("hf:", "names no model"),
        ("timm:", "names no model"),
        ("org/name", "is hf:org/name"),
        ("w.safetensors", "--checkpoint w.safetensors"),
        ("a b:c", "not a model source"),
        ("no_such_package_xyz:f", "can't be imported"),
        ("torch.nn:NoSuchThing", "NoSuchThing"),
        ("torch.nn:Linear", "needs arguments (in_features, out_features)"),
        ("torch:pi", "is a float, not a class or function"),
        ("torch:seed", "not an nn.Module"),
    ],
)
def test_odd_sources(model: str, text: str) -> None:
    error_of(SourceSpec(model, input_shapes=("1,2",)), text)


def test_no_build_says_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(NET)
    error_of(SourceSpec(str(path)), "no build()", "--class-name", "Net")
    error_of(SourceSpec(str(path), class_name="Nett", input_shapes=("1,2",)), "no 'Nett'", "Net")
    path.write_text("x = 1\n")
    error_of(SourceSpec(str(path)), "no build()", "defines no nn.Module")


def test_no_inputs(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(NET)
    error_of(SourceSpec(str(path), class_name="Net"), "no example_inputs", "--input-shape")


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("def build(:\n", ("SyntaxError", "m.py line 1")),
        ("import no_such_module_xyz\n", ("ModuleNotFoundError", "no_such_module_xyz", "m.py line 1")),
        ("def build():\n    return 1/0\n", ("build() failed", "ZeroDivisionError", "m.py line 2")),
        ("import sys\ndef build():\n    sys.exit('bye')\n", ("build() failed", "sys.exit", "bye")),
        ("def build():\n    return 5\n", ("returned an int, not an nn.Module",)),
        ("def build(n):\n    return n\n", ("needs arguments (n)",)),
    ],
)
def test_build_that_fails(tmp_path: Path, code: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "m.py"
    path.write_text(code)
    error_of(SourceSpec(str(path)), *parts)


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (
            "raise ValueError('two\\nlines')",
            ("example_inputs(model) failed", "ValueError: two lines", "m.py line"),
        ),
        ("return 'text'", ("returned a str", "tuple")),
        ("return {1: 2}", ("returned a dict", "names for keys")),
    ],
)
def test_example_inputs_that_fail(tmp_path: Path, code: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "m.py"
    head = "from torch import nn\ndef build():\n    return nn.Identity()\n"
    path.write_text(f"{head}def example_inputs(model):\n    {code}\n")
    error_of(SourceSpec(str(path)), *parts)


def test_model_that_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(NET + BUILD.replace("torch.randint(0, 37, (2, 5))", "torch.ones(2, 5)"))
    loaded = load(SourceSpec(str(path)))
    with pytest.raises(UsageError, match=r"fails on its example inputs: \w+Error: .*\(wrong.py line 13\)"):
        try_forward(loaded)


def test_data_on_the_meta_device(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2, device='meta')\n")
    error_of(SourceSpec(str(path)), "2 parameters or buffers have no data", "first weight")


def test_model_that_does_not_fit(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def to(self: torch.nn.Module, *args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.nn.Module, "to", to)
    error_of(SourceSpec(str(net)), "does not fit on cpu", "its weights need 0.00 GiB", "--dtype", "--device")


GPU_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB of which 1.25 GiB is free."
HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError(GPU_MEMORY), "(2.00 GiB more were needed, 1.25 GiB are free)"),
        (RuntimeError(HOST_MEMORY), "(3.00 GiB more were needed)"),
        (MemoryError(), "out of memory: lower"),
    ],
)
def test_inputs_that_are_too_large(net: Path, error: Exception, text: str) -> None:
    loaded = load(SourceSpec(str(net)))

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        raise error

    loaded.model.forward = forward
    with pytest.raises(UsageError) as caught:
        try_forward(loaded)
    assert text in str(caught.value) and "--input-shape" in str(caught.value)


def test_number_type_that_the_device_lacks(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autokernel.capture import source

    loaded = load(SourceSpec(str(net)))

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("\"some_op\" not implemented for 'Half'")

    loaded.model.forward = forward
    with pytest.raises(UsageError, match="no such operation in float16: try --dtype float32"):
        try_forward(loaded)
    monkeypatch.setattr(torch.cuda, "device", lambda where: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "Old GPU")
    with pytest.raises(UsageError, match="Old GPU has no bfloat16: use --dtype float16"):
        source._move(torch.nn.Linear(2, 2).bfloat16(), torch.device("cuda", 0), loaded._source)


def test_number_types_are_known(net: Path) -> None:
    error_of(SourceSpec(str(net), dtype="float8"), "--dtype 'float8'")


@pytest.mark.parametrize("text", ["", "1,,2", "a,b", "-1,2", "0,3", "1,2:int7", "1.5", "1,2:"])
def test_malformed_shapes(net: Path, text: str) -> None:
    error_of(SourceSpec(str(net), class_name="Net", input_shapes=(text,)), "--input-shape")


@pytest.mark.parametrize(
    ("text", "sizes"), [("1,8", (1, 8)), ("(1, 8)", (1, 8)), ("1x8", (1, 8)), ("4,", (4,))]
)
def test_shapes_as_people_write_them(text: str, sizes: tuple[int, ...]) -> None:
    from autokernel.capture._inputs import parse_shape

    assert parse_shape(text).sizes == sizes


def test_unknown_dtype_and_device(net: Path) -> None:
    error_of(SourceSpec(str(net), dtype="int8"), "--dtype 'int8'", "bfloat16")
    error_of(SourceSpec(str(net), device="tpu"), "--device 'tpu'", "cpu, cuda or cuda:N")
    error_of(SourceSpec(str(net), device="cpu:3"), "--device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there(net: Path) -> None:
    with pytest.raises(DeviceMissing, match="--device cpu"):
        load(SourceSpec(str(net), device="cuda"))
