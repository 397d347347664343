"""BERT-base (110M): an encoder over 512 tokens, returning the sequence and a pooled vector.

Structure and names are those of transformers' BertModel: three embeddings summed, post-norm layers
with dropout, exact GELU, attention written out by hand with an additive mask made from
``attention_mask``, and a tanh pooler on the first token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    vocab_size: int = 30522
    type_vocab_size: int = 2
    context: int = 512
    layers: int = 12
    heads: int = 12
    width: int = 768
    hidden: int = 3072
    norm_eps: float = 1e-12
    dropout: float = 0.1
    batch: int = 8
    length: int = 512


class Embeddings(nn.Module):
    position_ids: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.width, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.context, config.width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("position_ids", torch.arange(config.context).unsqueeze(0), persistent=False)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x))


class SelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.split_heads(self.query(x))
        k = self.split_heads(self.key(x))
        v = self.split_heads(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = self.dropout(F.softmax(scores + mask, dim=-1))
        return torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().view(x.shape)


class Output(nn.Module):
    """What ends both halves of a layer: a projection, the residual, and the norm after it."""

    def __init__(self, width_in: int, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(width_in, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Output(config.width, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Output(config.hidden, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Pooler(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class Bert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, std=0.02)  # as in trained weights: a zero bias hides a lost one

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Three (batch, length) int64 -> sequence (batch, length, width) and pooled (batch, width).

        ``attention_mask`` is 1 for a token and 0 for padding.
        """
        x = self.embeddings(input_ids, token_type_ids)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        x = self.encoder(x, mask)
        return x, self.pooler(x)


def build() -> nn.Module:
    return Bert(Config()).eval()


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    config = model.config
    shape = (config.batch, config.length)
    return {
        "input_ids": torch.randint(0, config.vocab_size, shape),
        "token_type_ids": torch.randint(0, config.type_vocab_size, shape),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
