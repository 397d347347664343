"""Regions of the zoo's models as tasks, and a judge's word on what a strategy makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import zoo
from judge_tasks import make_task
from torch import Tensor

from autokernel.capture.graph import capture
from autokernel.extraction import lay_out
from autokernel.judge import Judge
from autokernel.proposers.proposal import Proposal
from autokernel.records import Port, Task
from autokernel.reference_text import body, variables
from autokernel.regions.partition import partition
from autokernel.regions.region import Region

REFERENCE = """
import math
import operator
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def forward(self, {arguments}):
        {lines}
"""


def first_region(name: str, family: str) -> Region:
    """The first region of that family in a model of the zoo."""
    model, inputs = zoo.make(name)
    graphs = capture(model, (), inputs)
    return next(r for g in graphs for r in partition(g).regions if r.family == family)


def task_of(region: Region, folder: Path) -> Task:
    """A task folder for ``region``, with random activations and the model's own parameters."""
    gm, (ports, _) = region.subgraph(), region.ports()
    names = variables(gm)
    arguments = [names[n] for n in gm.graph.nodes if n.op == "placeholder"]
    lines = body(gm, names, "'cpu'")
    text = REFERENCE.format(arguments=", ".join(arguments), lines="\n        ".join(lines))
    statics = iter(region.static_values())
    values = {
        p.name: (lay_out(_random(p), p.stride) if p.role == "activation" else next(statics).detach(), p.role)
        for p in ports
    }
    high = {p.name: p.high for p in ports if p.high is not None}
    return make_task(folder / "task", text, values, family=region.family, high=high)


def _random(port: Port) -> Tensor:
    if port.dtype == "bool":
        return torch.rand(port.shape) < 0.8
    if port.dtype.startswith("int"):
        return torch.randint(0, port.high or 2, port.shape)
    return torch.randn(port.shape, dtype=getattr(torch, port.dtype))


def judged(judge: Judge, region: Region, proposals: Iterable[Proposal], folder: Path) -> None:
    """Every one of ``proposals`` is correct in the judge's eyes."""
    with judge.open(task_of(region, folder)) as opened:
        for number, proposal in enumerate(proposals):
            path = folder / f"candidate{number}.py"
            path.write_text(proposal.source, encoding="utf-8")
            verdict = opened.judge(path)
            assert verdict.correct, f"{proposal.strategy}: {verdict.reason}"
