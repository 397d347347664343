"""The tasks that the red team's kernels run on, and three that must be refused before any kernel is tried.

The good ones are small, with real weights, float32, and of a kind with the cheats: a norm, two matrix
products on one input, and a masked softmax one of whose rows is masked altogether (its answer is NaN).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from judge_tasks import LINEARS, RMS_NORM, make_task

from autokernel.records import Task

SOFTMAX = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, mask):
        return torch.softmax(x.masked_fill(mask, float("-inf")), -1)
"""
POINTWISE = """
import torch
class Model(torch.nn.Module):
    def forward(self, {}):
        return {}
"""


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rms(folder: Path, device: str) -> Task:
    inputs = {"x": (_normal(64, 256), "activation"), "weight": (1 + 0.1 * _normal(256), "parameter")}
    return make_task(folder, RMS_NORM, inputs, family="norm", device=device)


def linear(folder: Path, device: str) -> Task:
    inputs = {
        "x": (_normal(64, 128), "activation"),
        "wa": (_normal(96, 128) / 11, "parameter"),
        "wb": (_normal(32, 128) / 11, "parameter"),
    }
    return make_task(folder, LINEARS, inputs, family="sibling_linears", device=device)


def softmax(folder: Path, device: str) -> Task:
    mask = torch.ones(128, 512, dtype=torch.bool).triu(384)
    mask[7] = True
    inputs = {"x": (_normal(128, 512), "activation"), "mask": (mask, "constant")}
    return make_task(folder, SOFTMAX, inputs, family="softmax", device=device)


def _pointwise(folder: Path, device: str, text: str) -> Task:
    inputs = {"x": (_normal(64, 64), "activation"), "y": (_normal(64, 65)[:, :64].contiguous(), "activation")}
    return make_task(folder, POINTWISE.format("x, y", text), inputs, family="pointwise", device=device)


def constant_output(folder: Path, device: str) -> Task:
    """Whatever goes in, the same comes out."""
    return _pointwise(folder, device, "(x * y > -1e30).to(x.dtype)")


def output_independent_of_an_input(folder: Path, device: str) -> Task:
    """One input claims to matter, and doesn't."""
    return _pointwise(folder, device, "torch.tanh(x) + 0 * y")


def zero_initialised_weights(folder: Path, device: str) -> Task:
    """A projection as some initialisers leave it: zeros are the right answer."""
    inputs = {
        "x": (_normal(64, 128), "activation"),
        "wa": (torch.zeros(96, 128), "parameter"),
        "wb": (torch.zeros(32, 128), "parameter"),
    }
    return make_task(folder, LINEARS, inputs, family="sibling_linears", device=device)


def tiny_eps(folder: Path, device: str) -> Task:
    """An eps that matters in a row of zeros only."""
    inputs = {"x": (_normal(64, 256), "activation"), "weight": (1 + 0.1 * _normal(256), "parameter")}
    return make_task(folder, RMS_NORM.replace("1e-5", "1e-12"), inputs, family="norm", device=device)


def two_outputs(folder: Path, device: str) -> Task:
    """Two results with equal values, each a tensor of its own."""
    text = POINTWISE.format("x", "x * 2, x + x")
    return make_task(folder, text, {"x": (_normal(64, 256), "activation")}, family="pointwise", device=device)


def relu(folder: Path, device: str) -> Task:
    text = POINTWISE.format("x", "torch.relu(x) * 2")
    return make_task(folder, text, {"x": (_normal(64, 256), "activation")}, family="pointwise", device=device)


def digamma(folder: Path, device: str) -> Task:
    """Elementwise, and expensive."""
    text = POINTWISE.format("x", "torch.special.digamma(x * x + 1.5)")
    return make_task(
        folder, text, {"x": (_normal(128, 256), "activation")}, family="pointwise", device=device
    )


def sine(folder: Path, device: str) -> Task:
    """Elementwise, and as hard for large numbers as for small ones."""
    text = POINTWISE.format("x", "torch.sin(x)")
    return make_task(folder, text, {"x": (_normal(64, 256), "activation")}, family="pointwise", device=device)


def gated(folder: Path, device: str) -> Task:
    """A linear layer whose rows differ by many orders of magnitude."""
    text = POINTWISE.format(
        "x, gate, weight", "torch.nn.functional.linear(x, weight) * torch.exp(-8 * gate * gate)"
    )
    inputs = {
        "x": (_normal(128, 96), "activation"), "gate": (_normal(128, 1), "activation"),
        "weight": (_normal(80, 96) / 10, "parameter"),
    }  # fmt: skip
    return make_task(folder, text, inputs, family="linear", device=device)


def causal(folder: Path, device: str) -> Task:
    """Attention written out by hand: the products with what the mask leaves out are zero times a value."""
    text = "(q @ k.mT / 8).masked_fill(m, float('-inf')).softmax(-1) @ v"
    inputs = {
        name: (_normal(2, 64, 64 + i)[..., :64].contiguous(), "activation") for i, name in enumerate("qkv")
    }
    mask = {"m": (torch.ones(64, 64, dtype=torch.bool).triu(1), "constant")}
    return make_task(
        folder, POINTWISE.format("q, k, v, m", text), inputs | mask, family="attention", device=device
    )


GOOD: dict[str, Callable[[Path, str], Task]] = {"rms": rms, "linear": linear, "softmax": softmax}
MORE: dict[str, Callable[[Path, str], Task]] = {
    "tiny_eps": tiny_eps, "two_outputs": two_outputs, "relu": relu, "causal": causal,
    "digamma": digamma, "gated": gated, "sine": sine,
}  # fmt: skip
"""Tasks for kinds of cheats that the list does not have."""
FAULTY: dict[str, Callable[[Path, str], Task]] = {
    "constant_output": constant_output,
    "output_independent_of_an_input": output_independent_of_an_input,
    "zero_initialised_weights": zero_initialised_weights,
}
