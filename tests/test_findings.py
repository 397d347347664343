"""Findings: each kind is found where it is, with its line and its time, and not where it isn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import graphs_of, small
from torch import nn
from torch.nn import functional as F

from autokernel.capture.graph import capture
from autokernel.capture.graph_breaks import GraphBreak
from autokernel.findings import FINDERS, Evidence, attention, find
from autokernel.findings.attention import chosen_backend, flash_refuses, is_causal, masks_nothing
from autokernel.hardware import Ceilings, Device
from autokernel.profile_records import Finding, Profile
from autokernel.profiling import profile
from autokernel.regions.partition import partition

HERE = Path(__file__)
CPU = Device("test", "AVX512", "cpu")
GPU = Device("test", "sm_90", "cuda", 0)
CEILINGS = Ceilings(1e11, {"float32": 1e12}, launch_us=0.001)


def line_of(mark: str) -> str:
    """This file and the line of it that ends with ``# at: mark``."""
    (line,) = [n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# at: {mark}")]
    return f"{HERE}:{line}"


class Model(nn.Module):
    """Runs a function on its own two linears, a buffer and the inputs."""

    table: torch.Tensor

    def __init__(self, step: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.step = step
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.step(self, *inputs)


def evidence(step: Callable[..., torch.Tensor], *inputs: torch.Tensor, **given: Any) -> Evidence:
    """What a profile would measure, with 10 µs for every op that does not only look at memory."""
    graphs = capture(Model(step).eval(), inputs)
    times = {n: 10.0 for g in graphs for n in g.nodes if n.op in ("call_function", "call_method")}
    total = sum(times.values())
    made = Evidence([partition(g) for g in graphs], times, CPU, CEILINGS, total, total)
    return replace(made, **given)


def kind(name: str, found: Evidence) -> list[Finding]:
    return [one for one in find(found) if one.kind == name]


def only(name: str, found: Evidence) -> Finding:
    (one,) = kind(name, found)
    assert one.remedy and one.time_us > 0
    return one


X = torch.randn(4, 16)


# --- the whole model --------------------------------------------------------------------------------------


def plain(m: Model, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x))


def test_a_plain_model_has_no_findings() -> None:
    assert find(evidence(plain, X)) == []


def test_graph_breaks_cost_what_was_measured_outside() -> None:
    breaks = [
        GraphBreak("it prints", "model.py", 3, "print(x)", "forward", None, 2),
        GraphBreak("it branches"),
    ]
    one = only("graph break", evidence(plain, X, breaks=breaks, outside_us=500.0))
    assert (one.time_us, one.up_to, one.count, one.source) == (500.0, True, 3, "model.py:3")
    assert "3 times" in one.cause and "model.py:3" in one.cause and "it branches" in one.cause


@pytest.mark.parametrize(("device", "wall", "found"), [(GPU, 100.0, 1), (GPU, 22.0, 0), (CPU, 100.0, 0)])
def test_launch_bound_is_a_gpu_that_waits(device: Device, wall: float, found: int) -> None:
    given = evidence(plain, X, device=device, wall_us=wall)
    launches = kind("launch-bound", given) if device is CPU else list(FINDERS["launch-bound"](given))
    assert len(launches) == found
    assert all(one.time_us == 80.0 and "20%" in one.cause for one in launches)


# --- attention --------------------------------------------------------------------------------------------

Q = torch.randn(1, 2, 8, 16)
ONES = torch.ones(8, 8, dtype=torch.bool)


def free(m: Model, q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def causal(m: Model, q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def masked(m: Model, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  # at: masked


def built(m: Model, q: torch.Tensor) -> torch.Tensor:
    mask = (torch.arange(8)[:, None] >= 0).expand(1, 1, 8, 8)  # at: built
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_attention_that_is_well_served_is_no_finding() -> None:
    assert kind("attention backend", evidence(free, Q)) == []
    assert kind("attention backend", evidence(causal, Q)) == []


@pytest.mark.parametrize(
    ("mask", "words", "remedy", "at_stake"),
    [
        (ONES, "masks nothing on these inputs", "attn_mask=None", 10.0),
        (torch.zeros(8, 8), "masks nothing on these inputs", "attn_mask=None", 10.0),
        (ONES.tril(), "equal to a causal one", "is_causal=True", 10.0 * (1 - 36 / 64)),
        (torch.zeros(8, 8).masked_fill(~ONES.tril(), -1e9), "equal to a causal", "is_causal", 10.0 * 28 / 64),
        (ONES.tril(1), "reads for every score", "knows the mask", 10.0),
        (torch.randn(8, 8), "reads for every score", "knows the mask", 10.0),
    ],
)
def test_masks_of_attention(mask: torch.Tensor, words: str, remedy: str, at_stake: float) -> None:
    one = only("attention backend", evidence(masked, Q, mask))
    assert words in one.cause and remedy in one.remedy and one.up_to
    assert one.time_us == pytest.approx(at_stake)
    assert one.source == line_of("masked")


def test_a_mask_that_the_graph_makes_is_found_where_it_is_made() -> None:
    one = only("attention backend", evidence(built, Q))
    assert "masks nothing;" in one.cause and "stride 0" in one.cause
    assert one.source == line_of("built")


def test_torch_is_asked_what_it_takes() -> None:
    def given(**more: Any) -> dict[str, Any]:
        (graph,) = capture(Model(lambda m, q: F.scaled_dot_product_attention(q, q, q, **more)), (Q,))
        (node,) = [n for n in graph.nodes if "attention" in str(n.target)]
        return {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}

    assert chosen_backend(given(), "cpu") == "FLASH_ATTENTION"
    assert chosen_backend(given(dropout_p=0.5), "cpu") == "MATH"  # torch's CPU kernel drops nothing
    assert chosen_backend({}, "cpu") is None
    assert flash_refuses(given(), "cpu") == []
    assert flash_refuses(given(), "cuda") == [attention._FLOAT32]


def test_flash_refusals_name_what_can_be_changed() -> None:
    def reasons(q: torch.Tensor, device: str = "cuda", **more: Any) -> str:
        (graph,) = capture(Model(lambda m, q: F.scaled_dot_product_attention(q, q, q, **more)), (q,))
        (node,) = [n for n in graph.nodes if "attention" in str(n.target)]
        named = {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}
        return "; ".join(flash_refuses(named, device))

    half = Q.bfloat16()
    assert reasons(half) == ""
    assert "at most 256, this is 512" in reasons(torch.randn(1, 1, 4, 512, dtype=torch.bfloat16))
    assert "four dimensions, these have 3" in reasons(half[0])
    assert "not dense" in reasons(half.transpose(-1, -2))


def test_masks_by_value() -> None:
    low = torch.zeros(8, 8).masked_fill(~ONES.tril(), float("-inf"))
    shape = torch.empty(1, 2, 8, 16)
    assert masks_nothing(ONES) and masks_nothing(torch.zeros(3)) and not masks_nothing(low)
    assert is_causal(low, shape) and is_causal(ONES.tril().expand(2, 2, 8, 8), shape)
    assert not is_causal(low + 0.5 * ONES.tril(), shape)  # adds something to what it keeps
    assert not is_causal(ONES, shape) and not is_causal(ONES.tril()[:4], shape)


# --- memory traffic ---------------------------------------------------------------------------------------


def copied(m: Model, x: torch.Tensor) -> torch.Tensor:
    return m.a(x.transpose(0, 1).contiguous().exp().transpose(0, 1))  # at: copied


def needed(m: Model, x: torch.Tensor) -> torch.Tensor:
    return m.a(x.transpose(0, 1).contiguous().view(4, 16))


def test_a_copy_that_its_readers_do_not_need() -> None:
    one = only("copy", evidence(copied, X))
    assert one.source == line_of("copied") and "only exp reads" in one.cause and one.time_us == 10.0
    assert kind("copy", evidence(needed, X)) == []
    assert kind("copy", evidence(lambda m, x: m.a(x.contiguous().exp()), X)) == []  # nothing is copied


def grouped(m: Model, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = k[:, :, None].expand(1, 2, 2, 8, 16).reshape(1, 4, 8, 16)  # at: grouped
    return F.scaled_dot_product_attention(q, k, k)


def interleaved(m: Model, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = k.repeat_interleave(2, 1)  # at: interleaved
    return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize(("step", "mark"), [(grouped, "grouped"), (interleaved, "interleaved")])
def test_heads_that_are_written_out(step: Callable[..., torch.Tensor], mark: str) -> None:
    one = only("copy", evidence(step, torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)))
    assert one.source == line_of(mark) and "2 times" in one.cause and "enable_gqa" in one.remedy


def cast_weight(m: Model, x: torch.Tensor) -> torch.Tensor:
    return x @ m.table.to(torch.bfloat16)  # at: weight


def back_and_forth(m: Model, x: torch.Tensor) -> torch.Tensor:
    return x.float().reshape(16, 4).to(torch.bfloat16).relu()  # at: back


def twice(m: Model, x: torch.Tensor) -> torch.Tensor:
    first = x.float().sum(-1)
    return first + x.float().mean(-1)  # at: twice


def in_float32(m: Model, x: torch.Tensor) -> torch.Tensor:
    return x.float().softmax(-1).to(torch.bfloat16)


def test_casts() -> None:
    half = X.bfloat16()
    weight = only("cast", evidence(cast_weight, half))
    assert "a buffer is cast from float32 to bfloat16 at each call" in weight.cause
    assert weight.source == line_of("weight")
    back = only("cast", evidence(back_and_forth, half))
    assert "nothing computed in between" in back.cause and back.time_us == 20.0
    assert back.source == line_of("back")
    again = only("cast", evidence(twice, half))
    assert "once more" in again.cause and again.time_us == 10.0 and again.source == line_of("twice")
    assert kind("cast", evidence(in_float32, half)) == []  # a softmax in float32 is what the user wants


def positions(m: Model, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(16, 16).tril()  # at: static
    return x @ mask


def test_work_that_no_input_changes() -> None:
    one = only("static work", evidence(positions, X))
    assert one.source == line_of("static") and "ones, tril" in one.cause
    assert (one.time_us, one.count, one.up_to) == (20.0, 2, False)


def chain(m: Model, x: torch.Tensor) -> torch.Tensor:
    return ((x + 1).exp() * 2).sigmoid()  # at: chain


def test_ops_that_could_be_one() -> None:
    one = only("unfused ops", evidence(chain, torch.randn(4, 256)))
    assert one.source == line_of("chain") and "4 ops (add, exp, mul, sigmoid)" in one.cause
    # 4 reads and 4 writes of 4 kB against one of each
    assert "move 32.8 kB, where one kernel would move 8.19 kB" in one.cause
    assert one.up_to and one.time_us == pytest.approx(40.0 * 0.75)
    assert kind("unfused ops", evidence(lambda m, x: (x @ x.T).exp(), X)) == []


# --- products ---------------------------------------------------------------------------------------------


def test_products_that_are_too_small() -> None:
    slow_start = replace(CEILINGS, launch_us=5.0)
    one = only("small products", evidence(plain, X, ceilings=slow_start))
    least = (16 * 16 + 16 + 2 * 4 * 16) * 4 / 1e11 * 1e6
    assert "4×16 by 16×16" in one.cause and one.up_to
    assert one.count == 2 and one.time_us == pytest.approx(2 * (10.0 - least))
    row = only("small products", evidence(lambda m, x: m.a(x), X[:1]))
    assert "one row" in row.cause and "1×16 by 16×16" in row.cause
    assert kind("small products", evidence(plain, X)) == []


def siblings(m: Model, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) - m.b(x)  # at: siblings


def test_linears_on_one_input() -> None:
    one = only("sibling linears", evidence(siblings, X))
    least = (2 * (16 * 16 + 16) + 3 * 4 * 16) * 4 / 1e11 * 1e6
    assert "2 linears (16 + 16 columns)" in one.cause and one.source == line_of("siblings")
    assert one.time_us == pytest.approx(20.0 - least)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({"float32": 1e12, "bfloat16": 4e12}, 1),
        ({"float32": 1e12, "bfloat16": 1.1e12}, 0),
        ({"float32": 1e12}, 0),
    ],
)
def test_float32_where_16_bit_is_faster(rates: dict[str, float], found: int) -> None:
    given = evidence(plain, X, device=GPU, wall_us=20.0, ceilings=Ceilings(1e11, rates))
    ones = kind("float32", given)
    assert len(ones) == found
    for one in ones:
        assert one.time_us == pytest.approx(20.0 * 0.75) and "4.0 times" in one.cause
        assert "change of numerics" in one.remedy
    half = evidence(lambda m, x: x @ x.T, X.bfloat16(), device=GPU, ceilings=Ceilings(1e11, rates))
    assert kind("float32", half) == []


# --- together ---------------------------------------------------------------------------------------------


def test_findings_come_by_time_and_small_ones_not() -> None:
    both = evidence(siblings, X, breaks=[GraphBreak("x")], outside_us=5.0)
    assert [one.kind for one in find(both)] == ["sibling linears", "graph break"]
    assert [one.kind for one in find(replace(both, outside_us=0.1))] == ["sibling linears"]


def test_equal_layers_are_one_finding_in_the_profile(tmp_path: Path) -> None:
    loaded = small("llama", tmp_path)
    found = profile(loaded, graphs_of(loaded), ceilings=CEILINGS)
    times = [one.time_us for one in found.findings]
    assert times and times == sorted(times, reverse=True)
    (qkv,) = [f for f in found.findings if f.kind == "sibling linears" and f.cause.startswith("3 linears")]
    assert qkv.count == 2 and qkv.modules == ["layers.0.attention.wq", "layers.1.attention.wq"]
    assert qkv.source.startswith(f"{tmp_path}/llama_full.py:")
    assert all(0 < one.time_us <= max(found.total_us, found.wall_us) for one in found.findings)
    found.save(tmp_path)
    again = Profile.load(tmp_path)
    assert again.findings == found.findings and again.to_json() == found.to_json()
    assert json.loads((tmp_path / "profile.json").read_text())["findings"][0]["cause"]
    lines = found.summary()
    start = lines.index("Why it is slow, by the time at stake in one pass:")
    assert len(lines) - start - 1 == len(found.findings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_drives_attention_off_flash_on_a_gpu() -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(128, device="cuda")[:, None] >= 0).expand(2, 1, 128, 128)
    (graph,) = capture(Model(masked).cuda().eval(), (q, mask))
    (node,) = [n for n in graph.nodes if "attention" in str(n.target)]
    given = {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}
    assert chosen_backend(given, "cuda") not in (None, "FLASH_ATTENTION")


@pytest.mark.slow
def test_what_transformers_bert_gives_attention() -> None:
    """A library's own mask, of ones only, is found, with the library's line that makes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100
    )
    model = transformers.BertModel(config).eval()
    ids, ones = torch.randint(0, 100, (2, 32)), torch.ones(2, 32, dtype=torch.long)
    graphs = capture(model, (ids,), {"attention_mask": ones})
    times = {n: 10.0 for g in graphs for n in g.nodes if n.op in ("call_function", "call_method")}
    total = sum(times.values())
    parts = [partition(g) for g in graphs]
    one = only("attention backend", Evidence(parts, times, CPU, CEILINGS, total, total))
    assert "2×1×32×32 mask" in one.cause and "masks nothing" in one.cause
    assert "masking_utils.py:" in one.source and one.count == 2
    assert one.modules == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
