"""transformers' own BERT-base, random weights, on (8, 512) token ids and nothing else.

Traced without an attention mask it makes one that masks nothing, and with that scaled_dot_product_attention
takes a slow path that eager does not take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(attn_implementation="sdpa")).eval()


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 30522, (8, 512))}
