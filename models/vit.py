"""ViT-B/16 (86M): an image classifier over 196 patches of 16 x 16 and a class token.

Structure and names are those of timm's VisionTransformer, as DeiT and MAE build on it: patches by a
strided convolution, learned positions, pre-norm blocks, queries, keys and values from one linear, and
attention written out by hand with the queries scaled first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    image: int = 224
    patch: int = 16
    classes: int = 1000
    layers: int = 12
    heads: int = 12
    width: int = 768
    hidden: int = 3072
    norm_eps: float = 1e-6
    batch: int = 8


class PatchEmbed(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, kernel_size=config.patch, stride=config.patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = (config.width // config.heads) ** -0.5
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        x = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.hidden)
        self.fc2 = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        patches = (config.image // config.patch) ** 2
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.randn(1, 1, config.width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, config.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.classes)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.normal_(module.bias, std=0.02)  # as in trained weights: a zero bias hides a lost one

    def forward(self, images: Tensor) -> Tensor:
        """``images`` (batch, 3, image, image) -> logits (batch, classes)."""
        x = self.patch_embed(images)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.blocks(x + self.pos_embed)
        return self.head(self.norm(x)[:, 0])


def build() -> nn.Module:
    return ViT(Config()).eval()


def example_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    config = model.config
    return (torch.randn(config.batch, 3, config.image, config.image),)
