"""Graph breaks: every one is found, with Dynamo's reason and the line of the user's code."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autokernel.capture import graph_breaks
from autokernel.capture.graph import Capture, capture
from autokernel.capture.graph_breaks import GraphBreak, sentence, total
from autokernel.capture.source import LoadedModel, SourceSpec, load
from autokernel.cli import main
from autokernel.hardware import Ceilings
from autokernel.profile_records import Profile
from autokernel.profiling import profile

HERE = Path(__file__)


def line_of(mark: str) -> int:
    """The line of this file that ends with ``# at: mark``."""
    (line,) = [n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# at: {mark}")]
    return line


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class Prints(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        print("between")  # at: print
        return self.b(x)


class Branch(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if x.sum() > 0:  # at: branch
            x = x + 1
        return self.b(x)


class Item(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        scale = x.sum().item()  # at: item
        return self.b(x) * scale


class Unsupported(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        os.getpid(), print("two")  # at: unsupported
        return self.b(x)


class DataShape(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        rows = x.sum(1).nonzero()  # at: shape
        return self.b(x[rows[:, 0]])


class Helper(Two):
    @torch.compiler.disable
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.twice(x)  # at: helper
        return self.b(x)


class Lines(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        print(  # at: lines
            "one",
            "two",
        )
        return self.b(x)


class Loop(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(3):
            x = self.a(x)
            print(step)  # at: loop
        return self.b(x)


class Guarded(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with tempfile.TemporaryFile():  # at: with
            x = self.b(x)
        return x


class Refused(Two):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # at: refused
        return self.b(self.a(x))


class Layer(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.lin, self.number = nn.Linear(8, 8), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        print("in a layer")  # at: layer
        return x * 2


class Numbered(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # at: numbered
        print(self.number)
        return self.lin(x) * self.number


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Sequence(nn.Module):
    def __init__(self, kind: type[Layer], number: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[kind(i) for i in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 1


class Fine(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def captured(model: nn.Module) -> Capture:
    return capture(model.eval(), (torch.randn(2, 8),))


def only(found: Capture) -> GraphBreak:
    (one,) = found.breaks
    return one


@pytest.mark.parametrize(
    ("model", "mark", "words"),
    [
        (Prints, "print", "`print`"),
        (Branch, "branch", "data-dependent branching"),
        (Item, "item", "item()"),
        (DataShape, "shape", "nonzero"),
        (Helper, "helper", "`torch.compiler.disable`"),
        (Lines, "lines", "`print`"),
    ],
)
def test_a_break_has_its_reason_and_its_line(model: type[Two], mark: str, words: str) -> None:
    found = captured(model())
    one = only(found)
    assert len(found) == 2 and [g.calls for g in found] == [1, 1]
    assert (one.file, one.line, one.function) == (str(HERE), line_of(mark), "forward")
    assert one.code == HERE.read_text().splitlines()[line_of(mark) - 1].strip()
    assert words in one.reason and "Explanation" not in one.reason and " at 0x" not in one.reason
    assert one.count == 1 and one.skipped is None
    assert found.outside_us is not None and found.outside_us > 0


def test_two_reasons_on_one_line_are_two_breaks() -> None:
    found = captured(Unsupported())
    assert {(b.file, b.line, b.count) for b in found.breaks} == {(str(HERE), line_of("unsupported"), 1)}
    assert sum("`print`" in b.reason for b in found.breaks) == 1
    assert len(found.breaks) == len({b.reason for b in found.breaks}) == 2


def test_a_break_in_a_loop_gives_up_the_function() -> None:
    found = captured(Loop())
    one = only(found)
    assert (one.line, one.count, one.skipped) == (line_of("loop"), 3, "all of Loop.forward")
    assert "`print`" in one.reason
    assert len(found) == 0
    assert "×3" in str(one) and "all of Loop.forward runs without a graph" in str(one)


def test_a_function_that_is_left_half_way_is_given_up_from_there() -> None:
    found = captured(Guarded())
    assert {b.line for b in found.breaks} == {line_of("with")}
    assert [b.skipped for b in found.breaks] == [None, "the rest of forward"]
    assert {b.count for b in found.breaks} == {1}  # a with statement is left through its first line


def test_a_function_that_dynamo_refuses() -> None:
    found = captured(Refused())
    one = only(found)
    assert len(found) == 0
    assert (one.file, one.line) == (str(HERE), line_of("refused"))
    assert (one.count, one.skipped) == (1, "all of Refused.forward")
    assert "disable" in one.reason


@pytest.mark.parametrize("model", [Layers, lambda: Sequence(Layer, 5)])
def test_a_break_in_a_layer_is_one_place_counted_each_time(model: Any) -> None:
    found = captured(model())
    one = only(found)
    assert (one.line, one.count) == (line_of("layer"), 5)
    assert total(found.breaks) == 5
    assert [g.calls for g in found][:2] == [5, 5]  # compiled once, run once per layer


def test_a_function_that_is_compiled_too_often() -> None:
    found = captured(Sequence(Numbered, 10))
    first, limit = found.breaks
    assert "`print`" in first.reason and first.count == 10
    assert "too many times" in limit.reason
    assert (limit.line, limit.count, limit.skipped) == (line_of("numbered"), 10, "all of Numbered.forward")


def test_a_model_without_breaks() -> None:
    found = captured(Fine())
    assert len(found) == 1 and found.breaks == [] and found.outside_us is None and found[0].calls == 1


class Remembers(Two):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        x.mul_(2)
        print("x")
        return self.b(x)


def test_counting_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Remembers(), torch.ones(2, 8)
    assert capture(model, (x,)).breaks[0].count == 1
    assert model.seen.item() == 1 and torch.equal(x, torch.full((2, 8), 2.0))  # as one run leaves them


def test_the_hooks_are_gone_afterwards() -> None:
    from torch._dynamo import convert_frame, symbolic_convert

    def hooked() -> list[Any]:
        return [
            symbolic_convert.InstructionTranslatorBase.log_graph_break,
            convert_frame.ConvertFrameAssert.__call__,
        ]

    before, trace = hooked(), sys.gettrace()
    with graph_breaks.watch():
        assert hooked() != before
    captured(Prints())
    assert hooked() == before and sys.gettrace() is trace


def test_a_torch_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame, symbolic_convert

    monkeypatch.setattr(symbolic_convert, "InstructionTranslatorBase", None)
    monkeypatch.setattr(convert_frame, "ConvertFrameAssert", None)
    with graph_breaks.watch() as heard:
        assert heard == []
    assert only_unknown(graph_breaks.explained(heard, 2, Prints())).place == ""
    refused = only_unknown(graph_breaks.explained(heard, 0, Refused()))
    assert refused.place == f"{HERE}:{line_of('refused')}"
    assert graph_breaks.explained(heard, 1, Fine()) == []


def only_unknown(found: list[GraphBreak]) -> GraphBreak:
    (one,) = found
    assert one.reason == graph_breaks.UNKNOWN
    return one


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("Kind\n  Explanation: It can't. Do more.\n  Hint: no\n\n  Developer debug context: x", "It can't"),
        ("Kind\n  Explanation: A (e.g. `b`). C.\n", "A (e.g. `b`)"),
        ("Kind\n  Explanation: Skip <function A.f at 0x7f> now (reason: None)\n  Hint: x", "Skip `A.f` now"),
        ("Kind\n  Explanation: op `print` with argument types ['str'] (has_kwargs False)\n", "op `print`"),
        ("generic_jump TensorVariable()", "generic_jump TensorVariable()"),
        ("", graph_breaks.UNKNOWN),
    ],
)
def test_reasons_are_short(text: str, short: str) -> None:
    assert sentence(text) == short


# --- in the profile ---------------------------------------------------------------------------------------


def loaded(tmp_path: Path, body: str) -> LoadedModel:
    path = tmp_path / "m.py"
    inputs = "def example_inputs(model):\n    return (torch.randn(2, 8),)\n"
    path.write_text(
        f"import torch\nfrom test_graph_breaks import *\n\ndef build():\n    return {body}\n{inputs}"
    )
    return load(SourceSpec(str(path)))


def test_profile_counts_and_explains_breaks(tmp_path: Path) -> None:
    model = loaded(tmp_path, "Sequence(Layer, 5)")
    graphs = capture(model.model, model.args, model.kwargs)
    found = profile(model, graphs, ceilings=Ceilings(1e11, {"float32": 1e12}))
    assert [b.line for b in found.graph_breaks] == [line_of("layer")]
    lines = found.summary()
    line = lines[lines.index("5 graph breaks:") + 1]
    assert f"test_graph_breaks.py:{line_of('layer')} " in line and "×5" in line and "`print`" in line
    found.save(tmp_path)
    again = Profile.load(tmp_path)
    assert again.graph_breaks == found.graph_breaks and again.summary() == found.summary()
    assert json.loads((tmp_path / "profile.json").read_text())["graph_breaks"][0]["count"] == 5


def test_a_graph_that_runs_several_times_counts_each_time(tmp_path: Path) -> None:
    model = loaded(tmp_path, "Sequence(Layer, 5)")
    found = profile(
        model, capture(model.model, model.args, model.kwargs), ceilings=Ceilings(1e11, {"float32": 1e12})
    )
    (linear,) = [r for r in found.regions if r.family == "linear"]
    assert linear.call_count == 5


def profiled(tmp_path: Path, body: str, *options: str) -> list[str]:
    loaded(tmp_path, body)  # writes m.py
    return ["profile", str(tmp_path / "m.py"), "--device", "cpu", "--run", str(tmp_path / "run"), *options]


def test_the_command_says_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(profiled(tmp_path, "Prints()", "--json"))
    text = capsys.readouterr().out
    data = json.loads(text)  # what the model prints is elsewhere
    assert ended.value.code == 0
    assert [b["line"] for b in data["graph_breaks"]] == [line_of("print")]
    (finding,) = [f for f in data["findings"] if f["kind"] == "graph break"]
    assert finding["time_us"] == data["outside_us"] and f":{line_of('print')} " in finding["cause"]
    saved = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert saved["findings"] == data["findings"] and saved["graph_breaks"] == data["graph_breaks"]


def test_a_model_without_a_graph_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(profiled(tmp_path, "Refused()"))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "there is nothing to optimize: Dynamo captures none of it" in error
    assert f"test_graph_breaks.py:{line_of('refused')}" in error and "torch.compiler.disable" in error


def test_what_is_compiled_anew_in_every_run_is_captured_once() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            class Fresh:  # guards on it never hold again
                scale = x.mean()

            torch._dynamo.graph_break()
            return by(Fresh, x)

    def by(kind: type, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * kind.scale

    found = capture(Net(), (torch.randn(4, 4),))
    assert [graph.index for graph in found] == list(range(len(found)))
    assert sum("tanh" in str(graph.gm.code) for graph in found) == 1
