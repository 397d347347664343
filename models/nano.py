"""A small byte-level language model, sized for a CPU.

Every part is written the way a public model writes it; comments name which.  Nothing is slow on purpose.
The whole is about what people train from scratch on a laptop: a decoder with RMSNorm, rotary positions,
causal attention and a GELU MLP that reads and predicts bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Config:
    vocab_size: int = 256
    context: int = 1024
    layers: int = 4
    heads: int = 6
    width: int = 192
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    batch: int = 1


class RMSNorm(nn.Module):
    """Computes in float32 with separate steps, as LlamaRMSNorm in transformers does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(dtype)


class NewGELU(nn.Module):
    """The tanh form of GELU, spelled out, as NewGELUActivation in transformers' GPT-2 does."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def rotate_half(x: Tensor) -> Tensor:
    """Rotary embedding by slices and a concatenation, as in transformers' Llama."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    """Scores, mask, softmax and sum as separate steps, as nanoGPT does without flash attention.

    Queries, keys and values are three projections of the same input, as in transformers' Llama and BERT.
    """

    mask: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)
        mask = torch.tril(torch.ones(config.context, config.context))
        self.register_buffer("mask", mask.view(1, 1, config.context, config.context), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        dim = width // self.heads
        q = self.q_proj(x).view(batch, length, self.heads, dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.heads, dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.heads, dim).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(dim))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.o_proj(y)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.act = NewGELU()
        self.c_proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Nano(nn.Module):
    inv_freq: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        dim = config.width // config.heads
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.02)  # as in trained weights: a zero bias hides a lost one

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` (batch, length) int64, each below 256 -> logits (batch, length, 256)."""
        x = self.embed(tokens)
        # Angles are made anew on each call, once for all layers, as transformers' LlamaRotaryEmbedding does.
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(positions.float(), self.inv_freq.float())
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def build() -> nn.Module:
    return Nano(Config()).eval()


def example_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    config = model.config
    return (torch.randint(0, config.vocab_size, (config.batch, config.context)),)
