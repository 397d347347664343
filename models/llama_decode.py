"""One decode step of the model in llama.py: one new token against a cache of keys and values.

The caches are allocated once at their full length, as Meta's reference release and gpt-fast do it.  A
step writes the new key and value into them in place, attends to the whole cache, and masks what lies
after ``position``.  Weights are named as in llama.py, and its checkpoints fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = tuple[Tensor, Tensor]


@dataclass
class Config:
    vocab_size: int = 32000
    context: int = 2048
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    width: int = 768
    hidden: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    batch: int = 1
    cache_length: int = 512


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.type_as(x) * self.weight


def precompute_freqs_cis(head_dim: int, length: int, theta: float) -> Tensor:
    """Unit complex rotations, (length, head_dim / 2) complex64."""
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(length).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, q_.shape[1], 1, q_.shape[3])
    q_out = torch.view_as_real(q_ * freqs_cis).flatten(3)
    k_out = torch.view_as_real(k_ * freqs_cis).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    if repeats == 1:
        return x
    batch, length, heads, dim = x.shape
    x = x[:, :, :, None, :].expand(batch, length, heads, repeats, dim)
    return x.reshape(batch, length, heads * repeats, dim)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, position: Tensor, freqs_cis: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.head_dim)
        k = self.wk(x).view(batch, length, self.kv_heads, self.head_dim)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head_dim)
        q, k = apply_rotary_emb(q, k, freqs_cis)
        keys, values = cache
        keys.index_copy_(1, position, k)
        values.index_copy_(1, position, v)
        repeats = self.heads // self.kv_heads
        keys, values = repeat_kv(keys, repeats), repeat_kv(values, repeats)
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(q, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        out = torch.matmul(weights, values).transpose(1, 2).contiguous().view(batch, length, -1)
        return self.wo(out)


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, position: Tensor, freqs_cis: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), position, freqs_cis, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class LlamaDecode(nn.Module):
    freqs_cis: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        freqs = precompute_freqs_cis(config.width // config.heads, config.context, config.rope_theta)
        self.register_buffer("freqs_cis", freqs, persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, position: Tensor, caches: list[Cache]) -> tuple[Tensor, list[Cache]]:
        """``tokens`` (batch, 1) and ``position`` (1,) int64 -> logits (batch, 1, vocab) and ``caches``.

        ``caches`` holds keys and values per layer, each (batch, cache_length, kv_heads, head_dim), filled
        up to ``position``.  They are written at ``position`` in place, and handed back.
        """
        x = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[position]
        hidden = torch.arange(caches[0][0].shape[1], device=tokens.device) > position
        mask = torch.zeros(hidden.shape, device=tokens.device, dtype=x.dtype)
        mask = mask.masked_fill(hidden, float("-inf"))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, position, freqs_cis, mask, cache)
        return self.output(self.norm(x)), caches


def build() -> nn.Module:
    return LlamaDecode(Config()).eval()


def example_inputs(model: nn.Module) -> tuple[Tensor, Tensor, list[Cache]]:
    """The last step that fits: every place but one is filled."""
    config = model.config
    shape = (config.batch, config.cache_length, config.kv_heads, config.width // config.heads)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.layers)]
    for keys, values in caches:
        keys[:, -1] = 0.0
        values[:, -1] = 0.0
    tokens = torch.randint(0, config.vocab_size, (config.batch, 1))
    return tokens, torch.tensor([config.cache_length - 1]), caches
