"""Two-tower text/feature block: a self-attention encoder over padded source features, and a decoder
whose queries cross-attend to it. Cross attention is written out by hand because we return the
attention map; self attention goes through F.scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class CrossAttentionOutput:
    logits: Tensor
    hidden: Tensor
    attn: Tensor | None = None  # (layers, batch, heads, tgt, src)
    pooled: Tensor | None = None


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    b, t, d = x.shape
    return x.view(b, t, n_heads, d // n_heads).permute(0, 2, 1, 3)


def merge_heads(x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x.permute(0, 2, 1, 3).contiguous().view(b, t, h * d)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over dim 1 of the positions where mask is True."""
    m = mask.unsqueeze(-1).to(x.dtype)
    return (x * m).sum(dim=1) / m.sum(dim=1).clamp(min=1.0)


def sinusoidal_positions(length: int, dim: int) -> Tensor:
    pos = torch.arange(length).unsqueeze(1)
    div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    pe = torch.zeros(length, dim)
    pe[:, 0::2] = torch.sin(pos * div)
    pe[:, 1::2] = torch.cos(pos * div)
    return pe


class SelfAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (split_heads(t, self.n_heads) for t in self.qkv(x).chunk(3, dim=-1))
        attn_mask = key_mask[:, None, None, :] if key_mask is not None else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.dropout if self.training else 0.0, is_causal=causal
        )
        return self.proj(merge_heads(out))


class CrossAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.scale = (dim // n_heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.attn_drop = nn.Dropout(dropout)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        b, s, d = memory.shape
        q = split_heads(self.to_q(x), self.n_heads)
        k, v = self.to_kv(memory).view(b, s, 2, self.n_heads, d // self.n_heads).unbind(dim=2)
        scores = torch.einsum("bhtd,bshd->bhts", q, k) * self.scale
        if memory_mask is not None:
            scores = scores.masked_fill(~memory_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        attn = scores.softmax(dim=-1)
        out = torch.einsum("bhts,bshd->bthd", self.attn_drop(attn), v)
        return self.proj(out.flatten(2)), attn


class FeedForward(nn.Sequential):
    def __init__(self, dim: int, mult: int = 4, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Linear(dim, mult * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mult * dim, dim)
        )


class EncoderLayer(nn.Module):
    def __init__(self, dim: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, n_heads, dropout)
        self.ff = FeedForward(dim, dropout=dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), key_mask=mask)
        return x + self.ff(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({k: nn.LayerNorm(dim) for k in ("self", "cross", "ff")})
        self.self_attn = SelfAttention(dim, n_heads, dropout)
        self.cross_attn = CrossAttention(dim, n_heads, dropout)
        self.ff = FeedForward(dim, dropout=dropout)
        # Flamingo-style tanh gate on the cross attention branch
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.norms["self"](x), causal=True)
        y, attn = self.cross_attn(self.norms["cross"](x), memory, memory_mask)
        x = x + self.gate.tanh() * y
        x = x + self.ff(self.norms["ff"](x))
        return x, attn


class CrossAttentionModel(nn.Module):
    def __init__(
        self,
        vocab_size: int = 400,
        feature_dim: int = 80,
        dim: int = 128,
        n_heads: int = 4,
        enc_layers: int = 2,
        dec_layers: int = 2,
        max_len: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.feature_dim = feature_dim
        self.max_len = max_len
        self.register_buffer("pos", sinusoidal_positions(max_len, dim))
        self.src_proj = nn.Linear(feature_dim, dim)
        self.tgt_emb = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.encoder = nn.ModuleList(EncoderLayer(dim, n_heads, dropout) for _ in range(enc_layers))
        self.enc_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(DecoderLayer(dim, n_heads, dropout) for _ in range(dec_layers))
        self.dec_norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size)

    def encode(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        x = self.src_proj(source)
        x += self.pos[: x.size(1)]
        for layer in self.encoder:
            x = layer(x, source_mask)
        return self.enc_norm(x)

    def forward(
        self,
        target_ids: Tensor,
        source: Tensor,
        source_mask: Tensor | None = None,
        return_attn: bool = False,
    ) -> CrossAttentionOutput:
        """source_mask: (batch, src) bool, True where the source is real and False where it is padding."""
        if source.shape[-1] != self.feature_dim:
            raise ValueError(f"source features must be {self.feature_dim}-d, got {source.shape[-1]}")
        if source_mask is not None:
            assert source_mask.dtype == torch.bool, "source_mask must be bool"
            assert source_mask.shape == source.shape[:2]
        assert max(source.size(1), target_ids.size(1)) <= self.max_len

        memory = self.encode(source, source_mask)
        x = self.tgt_emb(target_ids) + self.pos[: target_ids.size(1)]
        maps = []
        for layer in self.decoder:
            x, attn = layer(x, memory, source_mask)
            if return_attn:
                maps.append(attn)
        x = self.dec_norm(x)
        return CrossAttentionOutput(
            logits=self.lm_head(x),
            hidden=x,
            attn=torch.stack(maps) if return_attn else None,
            pooled=masked_mean(memory, source_mask) if source_mask is not None else memory.mean(1),
        )


def build() -> nn.Module:
    torch.manual_seed(0)
    return CrossAttentionModel()


def example_inputs(model: nn.Module) -> dict:
    gen = torch.Generator().manual_seed(1)
    batch, src_len, tgt_len = 3, 120, 40
    lengths = torch.tensor([120, 87, 45])
    mask = torch.arange(src_len)[None, :] < lengths[:, None]
    source = torch.randn(batch, src_len, model.feature_dim, generator=gen)
    source[~mask] = 0.0
    return {
        "target_ids": torch.randint(1, model.vocab_size, (batch, tgt_len), generator=gen),
        "source": source,
        "source_mask": mask,
        "return_attn": True,
    }
