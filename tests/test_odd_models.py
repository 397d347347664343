"""Odd models: with kernels put back they give their own answers, or the original code runs and it is said.

In each test every region has a kernel that runs the region's own torch ops, so that only putting back can go
wrong.  Where weights matter the kernels prepack copies of them.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from test_strategies import context_of
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import autokernel
from autokernel.capture.graph import Graph, capture
from autokernel.capture.nodes import is_opaque, storages, written_storages
from autokernel.capture.source import SourceSpec, load
from autokernel.errors import UsageError
from autokernel.extraction import lay_out, relative_error
from autokernel.integrate.artifact import open_artifact, write_artifact
from autokernel.integrate.executors import EXECUTORS
from autokernel.integrate.kernels import Kernel
from autokernel.integrate.loaded import loaded_call, unload
from autokernel.integrate.merges import parameter_merges
from autokernel.playbook.strategies import attention_sdpa, merge_linears
from autokernel.reference_text import torch_kernel_text
from autokernel.regions.code import UnprintableNode
from autokernel.regions.partition import partition
from autokernel.regions.region import Region


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- putting kernels into a model -------------------------------------------------------------------------


def own_ops(region: Region) -> str:
    context = context_of(region)
    return torch_kernel_text(context.task, context.subgraph, "an odd model")


def packed(region: Region) -> str:
    """The region's own ops on copies of its weights, as kernels have them that want another layout."""
    return own_ops(region) + "\n\ndef prepack(*weights):\n    return tuple(w.clone() for w in weights)\n"


def by_strategy(*strategies: Any) -> Callable[[Region], str]:
    def write(region: Region) -> str:
        for strategy in strategies:
            if region.family in strategy.FAMILIES:
                proposal = next(iter(strategy.propose(context_of(region))), None)
                if proposal is not None:
                    return proposal.source
        return own_ops(region)

    return write


def values_of(graph: Graph) -> dict[fx.Node, Any]:
    """What every node gives in the captured call, as it was when it was made.

    What lies in memory that the graph writes is given as it is at the end: regions read it behind the writes.
    """
    values: dict[fx.Node, Any] = {}
    late: dict[fx.Node, Tensor] = {}
    written = written_storages(graph.nodes)

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            plain = isinstance(value, Tensor) and not is_opaque(n)
            values[n] = lay_out(value, value.stride()) if plain else value
            if plain and storages(n) & written:
                late[n] = value
            return value

    with torch.no_grad():
        Keep(graph.gm).run(*copy.deepcopy(graph.example_inputs))
        return values | {n: lay_out(value, value.stride()) for n, value in late.items()}


@torch.no_grad()
def stands_alone(region: Region, values: dict[fx.Node, Any]) -> bool:
    """Whether the region's own ops can be written down and give the model's values by themselves.

    Extraction leaves out the others (an exotic op, dropped weights, a product under autocast) and says so.
    """
    space: dict[str, Any] = {}
    try:
        exec(own_ops(region), space)
    except UnprintableNode:
        return False
    results = space["kernel_fn"](*(values[n] for n in region.inputs))
    results = results if isinstance(results, tuple) else (results,)
    wanted = [values[n] for n in region.outputs]
    return all(
        r.dtype == w.dtype and relative_error(r, w) < 1e-3 for r, w in zip(results, wanted, strict=True)
    )


def artifact_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    folder: Path,
    kernel: Callable[[Region], str] = own_ops,
    executor: str = "plain",
    merge: bool = False,
) -> tuple[Path, int]:
    """A run folder with a kernel for every region of the model, and how many call sites they have."""
    twin = model if merge else copy.deepcopy(model)  # merges go by the identity of parameters
    graphs = capture(twin, *copy.deepcopy((args, kwargs)))
    values = {graph: values_of(graph) for graph in graphs}
    groups: dict[str, list[Region]] = {}
    for graph in graphs:
        for fingerprint, regions in partition(graph).by_fingerprint().items():
            groups.setdefault(fingerprint, []).extend(regions)
    kept, sites = [], 0
    folder.mkdir(exist_ok=True)
    for i, group in enumerate(groups.values()):
        task = context_of(group[0]).task
        task.rank, task.call_count = i, len(group)
        source = folder / f"{task.name}.py"
        if not stands_alone(group[0], values[group[0].graph]):
            continue
        source.write_text(kernel(group[0]), encoding="utf-8")
        kept.append((task, source))
        sites += len(group)
    merges = parameter_merges(twin, graphs, kept) if merge else {}
    write_artifact(folder / "run" / "optimized", kept, executor, {}, merges)
    return folder / "run", sites


def alike(got: Any, want: Any) -> None:
    """The same structure, types, dtypes and (within rounding) values."""
    assert type(got) is type(want)
    if isinstance(want, Tensor) and is_traceable_wrapper_subclass(want):
        names = want.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        alike([getattr(got, n) for n in names], [getattr(want, n) for n in names])
    elif isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            alike(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            alike(a, b)
    elif dataclasses.is_dataclass(want):
        alike(vars(got), vars(want))
    else:
        assert got == want


def fresh(value: Any) -> Any:
    """Inputs of the same shapes, dtypes and strides with other values."""

    def again(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            return lay_out(torch.randn(leaf.shape, dtype=leaf.dtype), leaf.stride())
        order = torch.randperm(leaf.numel())
        return lay_out(leaf.reshape(-1)[order].reshape(leaf.shape), leaf.stride())

    return pytree.tree_map(again, value)


class Pair:
    """A model with kernels in it and a copy without."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict, run: Path, sites: int, capsys) -> None:
        self.args, self.kwargs, self.run, self.sites = args, kwargs, run, sites
        self.plain = copy.deepcopy(model)
        self.model = autokernel.load(run)(model)
        self.capsys = capsys

    def same(self, *args: Any, seed: int = 1, **kwargs: Any) -> Any:
        """One call of each on the same inputs: outputs, what became of the inputs, and all state agree."""
        results = []
        for model in (self.model, self.plain):
            given = copy.deepcopy((args, kwargs))
            torch.manual_seed(seed)
            out = model(*given[0], **given[1])
            results.append((out, given, dict(model.state_dict())))
        alike(*results)
        return results[0][0]

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        for model in (self.model, self.plain):
            torch.manual_seed(5)
            change(model)

    @property
    def engaged(self) -> int:
        return sum(loaded_call(self.model).engagement.sites.values())

    @property
    def reasons(self) -> list[str]:
        return loaded_call(self.model).engagement.reasons

    def said(self) -> str:
        """What has been said since the last time."""
        return self.capsys.readouterr().err


Put = Callable[..., Pair]


@pytest.fixture
def put(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Put:
    def put(
        model: nn.Module, *args: Any, named: dict[str, Any] | None = None, name: str = "m", **how: Any
    ) -> Pair:
        run, sites = artifact_of(model, args, named or {}, tmp_path / name, **how)
        return Pair(model, args, named or {}, run, sites, capsys)

    return put


@torch.no_grad()
def works(pair: Pair, sites: int | None = None) -> None:
    """On the captured inputs and on fresh ones, with all kernels engaged (``sites``, or some)."""
    assert pair.sites == sites if sites is not None else pair.sites
    sites = pair.sites
    pair.same(*pair.args, **pair.kwargs)
    args, kwargs = fresh((pair.args, pair.kwargs))
    pair.same(*args, **kwargs)
    assert pair.engaged == sites and not pair.reasons
    if sites:
        assert f"{sites} call sites engaged" in pair.said()


class Net(nn.Module):
    """Norm, two linears and a residual: what most tests need."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module from its forward function and its parts."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Odd.forward = forward  # type: ignore[method-assign]
    return Odd().eval()


# --- writes in place --------------------------------------------------------------------------------------


def test_inplace_activations(put: Put) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(2),
        nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(inplace=True), nn.LayerNorm(16),
    ).eval()  # fmt: skip
    pair = put(model, torch.randn(2, 3, 8, 8))
    works(pair)


def test_inplace_residual(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.a(h)
        y += h
        y = self.b(y)
        y *= 2.0
        return torch.tanh(y) + x

    pair = put(module(forward, norm=nn.LayerNorm(16), a=nn.Linear(16, 16), b=nn.Linear(16, 16)),
               torch.randn(4, 16))  # fmt: skip
    works(pair)


def test_views_written_later(put: Put) -> None:
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(x)
        y = x[:, :2]
        before = y * 3.0
        x += 1.0
        return torch.sigmoid(y) + before, self.a(x.clone()).relu()

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16))
    works(pair)


def test_writes_whose_result_nobody_reads(put: Put) -> None:
    """``x.add_(1)`` as a statement of its own, on an input, a buffer and a view that is read later."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1.0)
        self.calls.add_(1)
        h = torch.tanh(x)
        y = h[:, :2]
        h.mul_(2.0)
        return torch.sigmoid(self.a(x)), y + self.calls

    pair = put(module(forward, a=nn.Linear(16, 16), calls=torch.zeros(())), torch.randn(4, 16))
    works(pair)
    assert pair.model.calls == 2


def test_a_function_that_writes_and_whose_result_nobody_reads(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        torch.relu_(x)
        F.hardtanh(x, -0.5, 0.5, inplace=True)
        torch.mul(x, 2.0, out=self.doubled)
        return torch.sigmoid(self.a(x))

    pair = put(module(forward, a=nn.Linear(16, 16), doubled=torch.zeros(4, 16)), torch.randn(4, 16))
    works(pair)


def test_a_read_stays_behind_the_write_before_it(put: Put) -> None:
    """A region runs when its last input is there.  What waits for it may be a write that others rely on."""

    def forward(self, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        n = torch.relu(a)
        x[:, 0] = n[:, 0]
        read = x.cumprod(1)
        return torch.sigmoid(n + torch.matmul(a, a)), read

    pair = put(module(forward), torch.randn(4, 4), torch.randn(4, 4))
    works(pair)


def test_autocast_inside(put: Put) -> None:
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            low = self.a(x)
        return low, torch.tanh(self.a(x))

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16))
    works(pair)


def test_autocast_holds_what_it_held(put: Put) -> None:
    """The product inside waits for a region that waits for the product outside."""

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        n = torch.relu(a)
        with torch.autocast("cpu", torch.bfloat16):
            low = torch.matmul(n, a)
        return torch.sigmoid(n + torch.matmul(a, a)), low

    pair = put(module(forward), torch.randn(4, 4))
    with torch.no_grad():
        pair.same(*pair.args)  # by the original code: the region would lie on both sides


def test_a_key_value_cache(put: Put) -> None:
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        self.cache[:, position] = k
        return torch.softmax(q @ self.cache.transpose(-1, -2), -1) @ self.cache

    model = module(forward, q=nn.Linear(16, 16), k=nn.Linear(16, 16), cache=torch.zeros(2, 8, 16))
    pair = put(model, torch.randn(2, 1, 16), torch.tensor([3]))
    with torch.no_grad():
        for i in range(4):
            pair.same(torch.randn(2, 1, 16), torch.tensor([i]))
    assert pair.engaged == pair.sites > 0


def test_a_model_that_writes_to_its_input(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        x *= 2.0
        return self.a(x.clone()).tanh()

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16))
    works(pair)


def test_a_model_that_keeps_a_buffer(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mean = self.mean.lerp_(x.mean(0), 0.1)
        return torch.tanh(self.a(x - mean)) * self.calls

    model = module(forward, a=nn.Linear(16, 16), calls=torch.zeros(()), mean=torch.zeros(16))
    pair = put(model, torch.randn(4, 16))
    works(pair)
    assert pair.model.calls == 2


def test_a_model_that_replaces_a_buffer(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.a(x + self.last))
        return self.last * 2.0

    pair = put(module(forward, a=nn.Linear(16, 16), last=torch.zeros(4, 16)), torch.randn(4, 16))
    with torch.no_grad():
        for _ in range(3):
            pair.same(*pair.args)
    assert pair.engaged >= pair.sites > 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_running_statistics_read_beside_their_update(when: str, put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        old = self.mean * 1.0
        y = F.batch_norm(x, self.mean, self.var, training=self.training)
        return torch.tanh(y + (old if when == "before" else self.mean))

    model = module(forward, mean=torch.zeros(16), var=torch.ones(16))
    pair = put(model, torch.randn(4, 16), kernel=own_ops if when == "before" else packed)
    works(pair, 1)
    pair.both(nn.Module.train)
    with torch.no_grad():
        pair.same(*pair.args)


# --- structure --------------------------------------------------------------------------------------------


def test_tied_weights(put: Put) -> None:
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))

    embed, head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
    head.weight = embed.weight
    pair = put(module(forward, embed=embed, head=head, norm=nn.LayerNorm(16)), torch.randint(0, 40, (2, 6)),
               kernel=packed)  # fmt: skip
    works(pair, 3)
    assert pair.model.head.weight is pair.model.embed.weight
    pair.both(lambda m: m.embed.weight.data.copy_(torch.randn(40, 16)))
    pair.both(lambda m: m.head.weight.requires_grad_(False).mul_(2.0))
    with torch.no_grad():
        pair.same(*pair.args)


def test_merging_keeps_parameters_tied_that_share_memory(put: Put) -> None:
    """Two parameters over one memory: what is written through one is read through the other."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x) + self.twin(x.tanh())

    linears = {n: nn.Linear(16, 16, bias=False) for n in ("gate", "up", "twin")}
    linears["twin"].weight.data = linears["gate"].weight.data
    pair = put(module(forward, **linears), torch.randn(4, 16), kernel=by_strategy(merge_linears), merge=True)
    works(pair)
    with torch.no_grad():
        pair.model.gate.weight.mul_(3.0)
    assert torch.equal(pair.model.gate.weight, pair.model.twin.weight)


def test_a_shared_module(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x

    pair = put(module(forward, block=Net()), torch.randn(4, 16), kernel=packed)
    works(pair)
    with torch.no_grad():
        pair.both(lambda m: m.block.up.weight.mul_(2.0))
        pair.same(*pair.args)


def test_an_input_of_a_region_that_is_also_an_output(put: Put) -> None:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x)
        y = torch.tanh(h)
        z = self.b(y)
        return x, h, y, z, y + z

    pair = put(module(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16)), torch.randn(4, 16))
    works(pair)


def test_no_parameters(put: Put) -> None:
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x * 2.0, -1) + torch.tanh(y)

    pair = put(module(forward), torch.randn(4, 16), torch.randn(4, 16))
    works(pair)
    assert pair.sites


@pytest.mark.parametrize(
    "lonely", [nn.Linear(16, 8), nn.GELU(), nn.LayerNorm(16)], ids=lambda m: type(m).__name__
)
def test_a_single_layer_is_a_model(lonely: nn.Module, put: Put) -> None:
    works(put(lonely.eval(), torch.randn(4, 16)), 1)


def test_a_model_that_returns_its_input(put: Put) -> None:
    model = nn.Identity()
    pair = put(model, torch.randn(4, 16))
    works(pair, 0)
    x = torch.randn(4, 16)
    assert pair.model(x) is x


# --- graph breaks -----------------------------------------------------------------------------------------


def test_a_print_between(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        print("between")
        return torch.tanh(self.a(x))

    model = module(forward, a=Net())
    pair = put(model, torch.randn(4, 16), kernel=packed)
    works(pair)
    assert (
        len(loaded_call(pair.model).engagement.sites) >= 3 and loaded_call(pair.model).engagement.graphs == 2
    )


def test_control_flow_on_values(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if x.sum() > 0:
            return torch.tanh(self.b(y))
        return torch.sigmoid(self.b(y)) * 2.0

    model = module(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    x = torch.randn(4, 16).abs()
    pair = put(model, x)
    with torch.no_grad():
        pair.same(x)
        assert pair.engaged == pair.sites > 0
        pair.same(-x)  # a branch that was never captured
        pair.same(x)
    assert pair.engaged == pair.sites


def test_an_item(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return torch.tanh(self.a(x / scale)) * scale

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16))
    with torch.no_grad():
        pair.same(*pair.args)
        pair.same(torch.randn(4, 16))
        pair.same(torch.randn(4, 16))
    assert pair.engaged or pair.reasons
    assert pair.said()


def test_a_view_stays_a_view_across_a_graph_break(put: Put) -> None:
    """No kernel takes both: the view is taken of what the kernel gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        z = y.view(-1)
        torch._dynamo.graph_break()
        y.add_(1.0)
        return z * 2.0

    pair = put(module(forward), torch.randn(4, 16))
    works(pair)


def test_outputs_share_memory_as_they_did(put: Put) -> None:
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return y, y.view(-1)

    pair = put(module(forward), torch.randn(4, 16))
    works(pair, sites=0)
    with torch.no_grad():
        for model in (pair.plain, pair.model):
            y, z = model(torch.randn(4, 16))
            y.zero_()
            assert not z.any()


# --- modes ------------------------------------------------------------------------------------------------


def test_complex_buffers_at_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rotary.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Rotary(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.q = nn.Linear(16, 16)\n"
        "        angles = torch.arange(6.0)[:, None] * torch.arange(8.0)\n"
        "        self.register_buffer('turn', torch.polar(torch.ones(6, 8), angles))\n"
        "    def forward(self, x):\n"
        "        z = torch.view_as_complex(self.q(x).float().reshape(2, 6, 8, 2))\n"
        "        return torch.view_as_real(z * self.turn).flatten(2).type_as(x)\n"
        "def build():\n    return Rotary()\n"
        "def example_inputs(model):\n    return torch.randn(2, 6, 16)\n"
    )
    loaded = load(SourceSpec(str(path), dtype="float16"))
    assert loaded.model.turn.dtype == torch.complex64 and loaded.model.turn.imag.abs().max() > 0.5
    run, sites = artifact_of(loaded.model, loaded.args, {}, tmp_path / "m", packed)
    pair = Pair(loaded.model, loaded.args, {}, run, sites, capsys)
    works(pair, 2)


def test_train_mode(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(torch.tanh(self.norm(self.a(x))), 0.5, self.training))

    model = module(forward, a=nn.Linear(16, 16), norm=nn.LayerNorm(16), b=nn.Linear(16, 16)).train()
    pair = put(model, torch.randn(8, 16), kernel=packed)
    works(pair)
    pair.both(nn.Module.eval)
    with torch.no_grad():
        pair.same(*pair.args)


def test_batch_norm_in_train_mode(put: Put) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()).train()
    pair = put(model, torch.randn(8, 16))
    works(pair)
    assert pair.model[1].num_batches_tracked == 2


def test_dropped_weights_are_drawn_once(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        weight = F.dropout1d(self.a.weight, 0.5, training=self.training)
        return F.linear(torch.tanh(F.linear(x, weight)), weight)

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(8, 16))
    works(pair)
    pair.both(nn.Module.train)
    with torch.no_grad():
        pair.same(*pair.args)


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled by Inductor runs as it is, which takes no seconds."""
    monkeypatch.setitem(EXECUTORS, "inductor", EXECUTORS["plain"])


@pytest.mark.usefixtures("no_inductor")
def test_gradients_on(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16))
    for model in (pair.plain, pair.model):
        model(*pair.args).square().sum().backward()
    for a, b in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert not pair.engaged and "gradients are enabled" in pair.reasons[0]
    assert "NO kernel engaged" in pair.said()


def test_gradients_need_no_compiler(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is "plain" where there is no compiler: then nothing may ask for one."""
    pair = put(Net().eval(), torch.randn(4, 16))

    def inductor(*_: Any) -> Any:
        raise AssertionError("Inductor was asked for")

    monkeypatch.setitem(EXECUTORS, "inductor", inductor)
    pair.same(*pair.args)


@pytest.mark.usefixtures("no_inductor")
def test_frozen_weights_need_no_gradients(put: Put) -> None:
    pair = put(Net().eval().requires_grad_(False), torch.randn(4, 16))
    pair.same(*pair.args)
    assert pair.engaged == pair.sites
    x = torch.randn(4, 16, requires_grad=True)
    grads = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (pair.model, pair.plain)]
    torch.testing.assert_close(*grads)
    assert "gradients are enabled" in pair.reasons[0] and "gradients" in pair.said()


@pytest.mark.parametrize("kernel", [own_ops, packed])
def test_inference_mode_then_no_grad(kernel: Callable[[Region], str], put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=kernel)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            pair.same(*pair.args)
    assert pair.engaged >= pair.sites and not pair.reasons
    with torch.no_grad():
        pair.both(lambda m: m.up.weight.mul_(2.0))
        pair.same(*pair.args)


def test_weights_made_in_inference_mode(put: Put) -> None:
    with torch.inference_mode():
        pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
        pair.same(*pair.args)
        assert pair.engaged == pair.sites
        pair.both(lambda m: setattr(m.up, "weight", nn.Parameter(torch.randn(32, 16), requires_grad=False)))
        pair.same(*pair.args)


# --- inputs -----------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6, 16),
    "transposed": lambda: torch.randn(6, 4, 16).transpose(0, 1),
    "sliced": lambda: torch.randn(4, 6, 40)[:, :, 3:19],
    "strided": lambda: torch.randn(4, 6, 32)[:, :, ::2],
    "expanded": lambda: torch.randn(1, 6, 16).expand(4, 6, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_that_are_not_contiguous(layout: str, put: Put) -> None:
    pair = put(Net().eval(), LAYOUTS[layout](), kernel=packed)
    works(pair)
    with torch.no_grad():
        pair.same(LAYOUTS["transposed" if layout == "contiguous" else "contiguous"]())
        pair.same(*pair.args)


def test_other_layouts_than_the_captured_one(put: Put) -> None:
    pair = put(Net().eval(), LAYOUTS["contiguous"](), kernel=packed)
    with torch.no_grad():
        for make in [*LAYOUTS.values()] * 2:
            pair.same(make())
    assert pair.engaged


def test_a_batch_of_one_then_more(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(1, 6, 16), kernel=packed)
    works(pair)
    with torch.no_grad():
        for batch in (3, 1, 5):
            pair.same(torch.randn(batch, 6, 16))
    assert pair.engaged == pair.sites and "the original code runs" in pair.said()


def test_another_batch_then_one(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 6, 16), kernel=packed)
    works(pair)
    with torch.no_grad():
        for batch in (1, 3, 4, 2):
            pair.same(torch.randn(batch, 6, 16))
    assert pair.engaged == pair.sites and "the original code runs" in pair.said()


def test_no_tokens(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(2, 6, 16), kernel=packed)
    works(pair)
    with torch.no_grad():
        assert pair.same(torch.randn(2, 0, 16)).shape == (2, 0, 16)
        pair.same(torch.randn(2, 6, 16))
    assert pair.engaged == pair.sites


def test_another_dtype_of_input(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 2.0) + 1.0

    pair = put(module(forward), torch.randn(4, 16))
    works(pair, 1)
    with torch.no_grad():
        pair.same(torch.randn(4, 16, dtype=torch.float64))
        pair.same(torch.arange(64).reshape(4, 16))
    assert pair.engaged == 1


@pytest.mark.parametrize("change", ["no tokens", "float64"])
def test_it_is_said_when_nothing_fits_any_more(change: str, put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 6, 16))
    works(pair)
    with torch.no_grad():
        if change == "float64":
            pair.both(nn.Module.double)
        pair.same(torch.randn(4, 0, 16) if change == "no tokens" else torch.randn(4, 6, 16).double())
    assert "the original code runs" in pair.said()


@pytest.mark.parametrize("first", [4, 7])
@pytest.mark.parametrize("marked", [False, True])
def test_kernels_go_on_serving_the_sizes_they_are_for(first: int, marked: bool, put: Put) -> None:
    """However many other sizes come before and between; also where sizes are marked as dynamic."""
    served: list[int] = []

    def counted(kernel: Kernel) -> Kernel:
        function = kernel.function
        kernel.function = lambda *args: served.append(len(args[0])) or function(*args)
        return kernel

    pair = put(Net().eval(), torch.randn(4, 16))
    artifact = open_artifact(pair.run)
    model = autokernel.load(pair.run, quiet=True)(copy.deepcopy(pair.plain))
    for kernel in artifact.kernels.values():
        counted(kernel)
    with torch.no_grad():
        for size in (first, 4, 8, 4, 2, 9, 4, 1, 4):
            x = torch.randn(size, 16)
            if marked and size > 1:
                torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(model(x), pair.plain(x))
    each = len(served) // (5 if first == 4 else 4)
    assert served == [4] * len(served) and each == pair.sites


def test_numbers_as_inputs(put: Put) -> None:
    def forward(self, x: Tensor, scale: float, heads: int, flip: bool) -> Tensor:
        x = self.a(x).reshape(4, heads, -1) * scale
        return torch.tanh(x) if flip else torch.sigmoid(x)

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16), 0.5, 4, True)
    works(pair)
    with torch.no_grad():
        for given in ((0.7, 4, True), (0.7, 2, False), (0.5, 8, True), (1.5, 4, False)):
            pair.same(pair.args[0], *given)


def test_keyword_only_inputs(put: Put) -> None:
    def forward(self, *, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.a(x)
        return torch.tanh(y if mask is None else y.masked_fill(mask, 0.0))

    pair = put(
        module(forward, a=nn.Linear(16, 16)), named={"x": torch.randn(4, 16), "mask": torch.rand(4, 16) > 0.5}
    )
    works(pair)
    with torch.no_grad():
        pair.same(x=torch.randn(4, 16))


def test_inputs_in_a_dict_in_a_tuple(put: Put) -> None:
    def forward(self, x: tuple[dict[str, Any], list[Tensor]], *, more: dict[str, Any]) -> Tensor:
        first, rest = x
        return self.a(first["x"]) * first["deep"][0] + torch.tanh(rest[0] + more["y"]["z"])

    args = (({"x": torch.randn(4, 16), "deep": (torch.randn(16), None)}, [torch.randn(4, 16)]),)
    pair = put(module(forward, a=nn.Linear(16, 16)), *args, named={"more": {"y": {"z": torch.randn(16)}}})
    works(pair)


# --- outputs ----------------------------------------------------------------------------------------------


def test_whole_numbers_and_booleans(put: Put) -> None:
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        return y.argmax(-1), y > 0, (y > 0).sum(-1), ids * 2 + 1, ~(ids == 3), (y * 4.0).to(torch.int32)

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16), torch.arange(8))
    works(pair)


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: Tensor | None = None


class Two(NamedTuple):
    first: Tensor
    second: Any


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda a, b: {"logits": a, "hidden": {"last": b, "none": None}},
    "nested tuple": lambda a, b: (a, (b, [a * 2, (None, 3)])),
    "dataclass": lambda a, b: Result(a),
    "namedtuple": lambda a, b: Two(a, (b, None)),
    "None": lambda a, b: None,
    "list": lambda a, b: [a, b, "text", 2.5],
    "same twice": lambda a, b: (a, a),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_kinds_of_outputs(kind: str, put: Put) -> None:
    build = OUTPUTS[kind]

    def forward(self, x: Tensor) -> Any:
        return build(self.a(x), torch.tanh(x))

    pair = put(module(forward, a=nn.Linear(16, 16)), torch.randn(4, 16))
    works(pair, 0 if kind == "None" else None)


# --- hooks, wrappers --------------------------------------------------------------------------------------


def add_hooks(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))
    model.register_forward_hook(lambda m, args, out: out + 1.0)
    model.up.register_forward_hook(lambda m, args, out: out * 3.0)
    model.norm.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] - 1.0,), kwargs), with_kwargs=True)


def test_hooks_registered_before(put: Put) -> None:
    model = Net().eval()
    add_hooks(model)
    pair = put(model, torch.randn(4, 16), kernel=packed)
    works(pair)


def test_hooks_registered_after_loading(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    pair.both(add_hooks)
    with torch.no_grad():
        pair.same(*pair.args)


@pytest.mark.parametrize(
    "where",
    [
        "model",
        "submodule",
    ],
)
def test_hooks_registered_after_the_first_call(where: str, put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    handles = []

    def hook(model: nn.Module) -> None:
        target = model if where == "model" else model.up
        handles.append(target.register_forward_hook(lambda m, args, out: out + 1.0))

    with torch.no_grad():
        pair.both(hook)
        pair.same(*pair.args)
        for handle in handles:
            handle.remove()
        pair.same(*pair.args)


def test_hooks_on_convolutions_and_their_layout(put: Put) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.SiLU(inplace=True),
    ).eval()
    model[0].register_forward_hook(lambda m, args, out: out * 2.0)
    model[3].register_forward_pre_hook(lambda m, args: (args[0] - 1.0,))
    pair = put(model, torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last), kernel=packed)
    works(pair)
    with torch.no_grad():
        pair.same(torch.randn(2, 3, 9, 9))
        pair.both(lambda m: m.to(memory_format=torch.channels_last))
        pair.same(*pair.args)
        pair.same(torch.randn(2, 3, 9, 9))


def test_lazy_layers(put: Put) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyLinear(8)).eval()

    model = lazy()
    model(torch.randn(1, 16))
    pair = put(model, torch.randn(4, 16), kernel=packed)
    works(pair)
    with pytest.raises(UsageError, match="call it once, then load"):
        autokernel.load(pair.run)(lazy())


def test_a_scripted_model_is_refused(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16))
    for scripted in (torch.jit.script(Net().eval()), torch.jit.trace(Net().eval(), torch.randn(4, 16))):
        with pytest.raises(UsageError, match="scripted"):
            autokernel.load(pair.run)(scripted)


def test_a_compiled_model_is_refused(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16))
    with pytest.raises(UsageError, match="already compiled"):
        autokernel.load(pair.run)(torch.compile(Net().eval()))


def test_a_model_compiled_in_place_is_refused_or_given_back(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16))
    model = Net().eval()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    try:
        autokernel.load(pair.run)(model)
    except UsageError as error:
        assert "compiled" in str(error)
    else:
        assert unload(model)._compiled_call_impl is compiled


def test_a_model_with_a_call_of_its_own(put: Put) -> None:
    """Its ``__call__`` goes round the one that carries the kernels."""

    class Own(Net):
        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x) * 2.0

    plain = Own().eval()
    run = put(Net().eval(), torch.randn(4, 16)).run
    try:
        model = autokernel.load(run)(copy.deepcopy(plain))
    except UsageError as error:
        assert "__call__" in str(error)
        return
    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    assert loaded_call(model).engagement.sites


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(kind: str, put: Put) -> None:
    wrap = getattr(torch.nn.utils.parametrizations, kind)
    model = Net().eval()
    model.up = wrap(model.up).eval()
    pair = put(model, torch.randn(4, 16), kernel=packed)
    works(pair)
    with torch.no_grad():
        for parameter in ("original0", "original"):
            if hasattr(model.up.parametrizations.weight, parameter):
                pair.both(lambda m, n=parameter: getattr(m.up.parametrizations.weight, n).mul_(2.0))
        pair.same(*pair.args)


def test_quantised_linears(put: Put) -> None:
    torchao = pytest.importorskip("torchao.quantization")

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.net(x)) * 1.5 + 0.1

    model = module(forward, net=Net(64, 64))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    works(put(model, torch.randn(4, 64)), 3)  # norm and chains; the products are torchao's


def test_weights_in_a_wrapper(put: Put) -> None:
    """Two tensors behind one: what such a weight does is its own class's business."""
    model = Net().eval()
    model.up.weight = nn.Parameter(TwoTensor(model.up.weight.detach(), model.up.weight.detach().clone()))
    pair = put(model, torch.randn(4, 16))
    with torch.no_grad():
        pair.same(*pair.args)
    assert pair.engaged == pair.sites == 1 and not pair.reasons


def test_sparse_weights(put: Put) -> None:
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu((self.weight @ x.t()).t() * 2.0)

    dense = torch.randn(16, 16)
    pair = put(module(forward, weight=(dense * (dense > 1)).to_sparse()), torch.randn(4, 16))
    assert pair.sites == 0  # Dynamo takes none of it
    with torch.no_grad():
        pair.same(*pair.args)


def test_nested_tensors(put: Put) -> None:
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x, y], layout=torch.jagged)
        return F.gelu(torch.nested.to_padded_tensor(rows, 0.0) * 2.0 + 1.0) + F.silu(x[:1] * y[:1])

    pair = put(module(forward), torch.randn(2, 16), torch.randn(3, 16))
    works(pair, pair.sites)


# --- Inductor ---------------------------------------------------------------------------------------------


def test_inductor_carries_odd_models_too(put: Put) -> None:
    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        self.calls += 1
        y = x.transpose(0, 1)[:, 1:]
        h = torch.relu_(self.a(y))
        x += 1.0
        return {"out": (self.a(h) * scale + self.calls, None), "top": h.argmax(-1), "x": x, "y": y.sum(-1)}

    model = module(forward, a=nn.Linear(16, 16), calls=torch.zeros(()))
    named = {"scale": torch.randn(16)}
    pair = put(model, torch.randn(3, 4, 16), named=named, kernel=packed, executor="inductor")
    works(pair)
    with torch.no_grad():
        pair.both(lambda m: m.a.weight.mul_(2.0))
        pair.same(*pair.args, **pair.kwargs)


# --- threads ----------------------------------------------------------------------------------------------


def in_threads(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            gate.wait(30)
            job()
        except BaseException as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads)
    if errors:
        raise errors[0]


def caller(model: nn.Module, plain: nn.Module, seed: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(4, 16, generator=generator) for _ in range(20)]

    @torch.no_grad()
    def call() -> None:
        for x in inputs:
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)

    return call


def test_four_threads_call_one_model(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    in_threads(*(caller(pair.model, pair.plain, i) for i in range(4)))
    assert pair.engaged and pair.engaged % pair.sites == 0 and not pair.reasons  # each may compile


def test_two_models_at_once(put: Put) -> None:
    first = put(Net().eval(), torch.randn(4, 16), kernel=packed, name="first")
    second = put(Net(16, 48).eval(), torch.randn(4, 16), kernel=packed, name="second")
    in_threads(*(caller(p.model, p.plain, i) for i, p in enumerate((first, second, first, second))))
    for pair in (first, second):
        assert pair.engaged and pair.engaged % pair.sites == 0 and not pair.reasons


def test_one_artifact_in_two_models(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    plain = Net().eval()
    other = autokernel.load(pair.run, quiet=True)(copy.deepcopy(plain))
    with torch.no_grad():
        torch.testing.assert_close(other(*pair.args), plain(*pair.args))
        pair.same(*pair.args)
    assert sum(loaded_call(other).engagement.sites.values()) == pair.sites == pair.engaged


def test_many_models_in_one_process(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16))
    for _ in range(12):
        plain = Net().eval()
        model = autokernel.load(pair.run, quiet=True)(copy.deepcopy(plain))
        with torch.no_grad():
            torch.testing.assert_close(model(*pair.args), plain(*pair.args))
        assert sum(loaded_call(model).engagement.sites.values()) == pair.sites


# --- weights that change ----------------------------------------------------------------------------------


def new_state(model: nn.Module) -> dict[str, Tensor]:
    return {k: torch.randn_like(v) for k, v in model.state_dict().items()}


def set_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.randn_like(p)


def replace_parameter(model: nn.Module) -> None:
    model.up.weight = nn.Parameter(torch.randn(32, 16))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: [p.add_(torch.randn_like(p)) for p in m.parameters()],
    "load_state_dict": lambda m: m.load_state_dict(new_state(m)),
    "load_state_dict, assigned": lambda m: m.load_state_dict(new_state(m), assign=True),
    "data": set_data,
    "float64": lambda m: m.to(torch.float64),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "module replaced": lambda m: setattr(m, "up", nn.Linear(16, 32)),
    "module of another size": lambda m: (
        setattr(m, "up", nn.Linear(16, 8)),
        setattr(m, "down", nn.Linear(8, 16)),
    ),
    "another kind of module": lambda m: setattr(m, "norm", nn.Identity()),
    "parameter replaced": replace_parameter,
    "bias taken away": lambda m: setattr(m.up, "bias", None),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changed_weights(how: str, put: Put) -> None:
    x = torch.randn(4, 16)
    pair = put(Net().eval(), x, kernel=packed)
    works(pair)
    with torch.no_grad():
        before = pair.plain(x)
        pair.both(CHANGES[how])
        given = x.to(next(pair.plain.parameters()).dtype)
        after = pair.same(given)
        assert how == "float64" or (after.float() - before.float()).abs().max() > 1e-3
        pair.same(given)
        assert unload(pair.model)._compiled_call_impl is None
        alike(pair.model(given), pair.plain(given))


CHAINS = [
    ("bfloat16", "load_state_dict, assigned", "in place"),
    ("parameter replaced", "in place", "load_state_dict, assigned"),
    ("load_state_dict, assigned", "data", "in place"),
    ("float64", "load_state_dict", "module replaced", "in place"),
]


@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_weights_changed_in_one_way_after_another(chain: tuple[str, ...], put: Put) -> None:
    x = torch.randn(4, 16)
    pair = put(Net().eval(), x, kernel=packed)
    works(pair)
    with torch.no_grad():
        for how in chain:
            pair.both(CHANGES[how])
            if how == "module replaced":
                pair.both(nn.Module.float)
            given = x.to(next(pair.plain.parameters()).dtype)
            pair.same(given)
            pair.same(given)


@pytest.mark.parametrize("how", ["fused", "foreach", "neither"])
def test_weights_changed_by_an_optimizer(how: str, put: Put) -> None:
    """A fused step moves neither addresses nor version counters."""
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    flags = {"fused": how == "fused", "foreach": how == "foreach"}
    optimizers = {m: torch.optim.SGD(m.parameters(), 0.1, **flags) for m in (pair.model, pair.plain)}
    for _ in range(2):
        for model, optimizer in optimizers.items():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        with torch.no_grad():
            pair.same(*pair.args)


def test_other_weights_for_one_call(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    with torch.no_grad():
        state = new_state(pair.plain)
        alike(*(torch.func.functional_call(m, state, pair.args) for m in (pair.model, pair.plain)))
        pair.same(*pair.args)


def test_data_set_twice_between_calls(put: Put) -> None:
    """The second tensor may lie where the one lay that was packed."""
    pair = put(nn.Sequential(nn.Linear(16, 16), nn.Tanh()).eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    weight = pair.model[0].weight
    with torch.no_grad():
        weight.data = weight.data * 2.0
        pair.model(*pair.args)
        first = weight.data_ptr()
        for _ in range(1000):
            weight.data = weight.data + 0.1
            if weight.data_ptr() == first:
                break
        else:
            return  # what was packed is held, so that its address is nobody else's
        pair.plain[0].weight.copy_(weight)
        pair.same(*pair.args)


@pytest.mark.parametrize("executor", ["plain", "inductor"])
def test_a_mask_written_after_loading(executor: str, put: Put) -> None:
    """A kernel that was made for a causal mask must not serve another one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(2, 8, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~self.mask, float("-inf"))
        return torch.softmax(scores, -1) @ v

    linears = {n: nn.Linear(16, 16) for n in "qkv"}
    model = module(forward, **linears, mask=torch.ones(8, 8, dtype=torch.bool).tril())
    pair = put(model, torch.randn(2, 8, 16), kernel=by_strategy(attention_sdpa), executor=executor)
    works(pair)
    with torch.no_grad():
        pair.both(lambda m: m.mask.fill_(True))
        pair.same(*pair.args)
        assert "mask holds other values" in pair.said()
        pair.both(lambda m: m.mask.tril_())
        pair.same(*pair.args)
        pair.both(lambda m: m.mask.data.fill_(True))  # leaves no trace
        loaded_call(pair.model).refresh()
        pair.same(*pair.args)


def test_a_copy_of_a_loaded_model(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    twin = copy.deepcopy(pair.model)
    with torch.no_grad():
        twin.up.weight.mul_(2.0)
        pair.same(*pair.args)
        want = copy.deepcopy(pair.plain)
        want.up.weight.mul_(2.0)
        torch.testing.assert_close(twin(*pair.args), want(*pair.args))
        again = autokernel.load(pair.run, quiet=True)(twin)
        torch.testing.assert_close(again(*pair.args), want(*pair.args))
    assert sum(loaded_call(again).engagement.sites.values()) == pair.sites


def test_a_saved_model_is_the_original(put: Put, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).eval()
    pair = put(model, torch.randn(4, 16), kernel=packed)
    works(pair)
    torch.save(pair.model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(again(*pair.args), pair.plain(*pair.args))


def test_loading_twice_and_unloading(put: Put) -> None:
    pair = put(Net().eval(), torch.randn(4, 16), kernel=packed)
    works(pair)
    autokernel.load(pair.run)(pair.model)
    works(pair)
    unload(pair.model)
    with pytest.raises(UsageError, match="no artifact is loaded"):
        unload(pair.model)
    with torch.no_grad():
        pair.same(*pair.args)


def test_an_artifact_of_another_model(put: Put) -> None:
    run = put(Net(24).eval(), torch.randn(4, 24)).run
    pair = Pair(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), (), {}, run, 0, None)
    with torch.no_grad():
        pair.same(torch.randn(4, 16))
    assert not pair.engaged
    summary = loaded_call(pair.model).artifact.summary()
    assert "NO kernel engaged" in summary and "no region with its fingerprint" in summary
