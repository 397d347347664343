"""Qwen3-0.6B as transformers has it, random weights, on (1, 512) token ids; no cache.

The sizes are those of the published configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        rms_norm_eps=1e-6, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 151936, (1, 512))}
