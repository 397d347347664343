"""Convolutions in channels_last compute what they did, and give back the layout that they were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judged_regions import first_region, judged
from test_strategies import Convolutions, check, narrow, proposals, regions_of
from torch import Tensor, nn

from autokernel.judge import Judge
from autokernel.playbook.strategies import channels_last
from autokernel.regions.region import Region


def conv_region(model: nn.Module, *inputs: Tensor) -> Region:
    (region,) = [r for r in regions_of(model, *inputs) if r.family == "conv"]
    return region


@pytest.mark.parametrize(
    ("after", "options", "fires"),
    [
        ("relu", {}, ["", ",onednn"]),
        ("residual relu", {"groups": 2}, ["", ",onednn"]),
        ("scale", {"bias": False}, [""]),
    ],
)  # fmt: skip
def test_a_norm_is_folded_and_the_layout_comes_back(after: str, options: dict, fires: list[str]) -> None:
    torch.manual_seed(2)
    model = Convolutions("conv2d", after, **options).eval()
    x = torch.randn(2, 6, 9, 9)
    region = conv_region(model, x, torch.randn_like(model.conv(x)))
    found = proposals(channels_last, region)
    assert [p.strategy for p in found] == [f"channels-last,fold-batch-norm{f}" for f in fires]
    for proposal in found:
        (narrow if "onednn" in proposal.strategy else check)(region, proposal)
        assert "return weight_.contiguous(memory_format=torch.channels_last)" in proposal.source


def test_a_convolution_alone() -> None:
    region = conv_region(nn.Conv2d(4, 6, 1, bias=False).eval(), torch.randn(2, 4, 5, 5))
    (proposal,) = proposals(channels_last, region)
    check(region, proposal)
    narrow(region, proposal)


def test_other_ranks_and_what_is_channels_last_are_left_alone() -> None:
    assert proposals(channels_last, conv_region(nn.Conv1d(4, 6, 3).eval(), torch.randn(2, 4, 9))) == []
    already = nn.Conv2d(4, 6, 3).eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    assert proposals(channels_last, conv_region(already, x)) == []


@pytest.mark.slow
def test_judged_on_a_region_of_a_resnet(tmp_path: Path, cpu_judge: Judge) -> None:
    region = first_region("timm resnet18", "conv")
    found = proposals(channels_last, region)
    assert [p.strategy for p in found] == [
        "channels-last,fold-batch-norm", "channels-last,fold-batch-norm,onednn"
    ]  # fmt: skip
    judged(cpu_judge, region, found, tmp_path)
