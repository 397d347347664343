"""timm's ViT-B/16, random weights, on eight images of 224 x 224."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build() -> nn.Module:
    import timm

    return timm.create_model("vit_base_patch16_224", pretrained=False).eval()


def example_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    return (torch.randn(8, 3, 224, 224),)
