"""A template for your own model: copy this file, and change what the comments point at."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):  # your model; it may also be imported from your package
    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    """Takes no arguments.  Load trained weights here, or pass them with ``--checkpoint``."""
    return Model().eval()


def example_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    """What ``forward`` is called with: a tuple, or a dict of keyword inputs.

    Use the shapes that you will run: kernels are made for these.  Device and ``--dtype`` are taken care of.
    """
    return (torch.randn(64, model.up.in_features),)  # token ids: torch.randint(0, vocab_size, (1, 512))
