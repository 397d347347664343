"""Decoder-only transformer where every second MLP is a top-2 mixture of SwiGLU experts.

Routing is done the usual eager way: softmax -> topk -> loop over experts -> torch.where -> gather tokens
-> index_add_ back. Returns the logits together with the load-balancing loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int, max_len: int = 512, base: float = 10000.0) -> None:
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        freqs = torch.outer(torch.arange(max_len).float(), inv_freq)
        emb = torch.cat([freqs, freqs], dim=-1)
        self.register_buffer("cos", emb.cos(), persistent=False)
        self.register_buffer("sin", emb.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = q.shape[-2]
        cos, sin = self.cos[:n], self.sin[:n]
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        assert dim % n_heads == 0 and n_heads % n_kv_heads == 0
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.head_dim = dim // n_heads
        self.q_proj = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rope(q, k)
        rep = self.n_heads // self.n_kv_heads
        if rep > 1:
            k = k.repeat_interleave(rep, dim=1)
            v = v.repeat_interleave(rep, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, dim: int, hidden: int, n_experts: int, top_k: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.top_k = top_k
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList([SwiGLU(dim, hidden) for _ in range(n_experts)])
        self.shared = SwiGLU(dim, hidden // 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, selected = torch.topk(probs, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)

        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token_idx, slot = torch.where(selected == i)
            if token_idx.numel() == 0:
                continue
            y = expert(x[token_idx]) * weights[token_idx, slot, None]
            out.index_add_(0, token_idx, y)
        out = out + self.shared(x)

        # Switch-style balance loss: fraction of routed tokens times mean router prob, per expert
        frac = F.one_hot(selected, self.n_experts).float().sum(1).mean(0) / self.top_k
        aux = self.n_experts * torch.sum(frac * probs.mean(0))
        return out.view(shape), aux


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, use_moe: bool, n_experts: int, top_k: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(dim)
        self.attn = CausalSelfAttention(dim, n_heads, n_heads // 2)
        self.ffn_norm = RMSNorm(dim)
        self.use_moe = use_moe
        self.ffn = MoE(dim, 2 * dim, n_experts, top_k) if use_moe else SwiGLU(dim, 3 * dim)

    def forward(self, x: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, Tensor | None]:
        x = x + self.attn(self.attn_norm(x), rope)
        h = self.ffn_norm(x)
        if self.use_moe:
            y, aux = self.ffn(h)
            return x + y, aux
        return x + self.ffn(h), None


class MoETransformer(nn.Module):
    def __init__(
        self,
        vocab_size: int = 512,
        dim: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        n_experts: int = 8,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tok_emb = nn.Embedding(vocab_size, dim)
        self.rope = RotaryEmbedding(dim // n_heads)
        self.layers = nn.ModuleList(
            [Block(dim, n_heads, i % 2 == 1, n_experts, top_k) for i in range(n_layers)]
        )
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        assert tokens.dtype == torch.long
        x = self.tok_emb(tokens)
        aux_losses = []
        for layer in self.layers:
            x, aux = layer(x, self.rope)
            if aux is not None:
                aux_losses.append(aux)
        aux_loss = torch.stack(aux_losses).mean() if aux_losses else x.new_zeros(())
        return self.lm_head(self.norm(x)), aux_loss


def build() -> nn.Module:
    torch.manual_seed(0)
    return MoETransformer()


def example_inputs(model: nn.Module) -> tuple:
    gen = torch.Generator().manual_seed(1)
    return (torch.randint(0, model.vocab_size, (2, 96), generator=gen),)
