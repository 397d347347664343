"""The shipped models do what their docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import MODELS, SMALL, graphs_of, small
from torch.nn import functional as F

from autokernel.capture.source import SourceSpec, load, try_forward


@pytest.mark.parametrize("name", SMALL)
def test_it_is_a_causal_language_model(name: str, tmp_path: Path) -> None:
    loaded = small(name, tmp_path)
    (tokens,) = loaded.args
    with torch.no_grad():
        logits = loaded.model(tokens)
        assert logits.shape == (*tokens.shape, loaded.model.config.vocab_size)
        assert logits.isfinite().all()
        # A later token changes nothing before it, and something from there on.
        changed = tokens.clone()
        changed[:, 10] = (changed[:, 10] + 1) % loaded.model.config.vocab_size
        other = loaded.model(changed)
    torch.testing.assert_close(other[:, :10], logits[:, :10])
    assert (other[:, 10:] - logits[:, 10:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("name", SMALL)
def test_it_learns(name: str, tmp_path: Path) -> None:
    """A few steps on one batch lower the loss: gradients reach what they should."""
    model = small(name, tmp_path).model.train()
    (tokens,) = small(name, tmp_path).args
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_one_graph(name: str, tmp_path: Path) -> None:
    assert len(graphs_of(small(name, tmp_path))) == 1


def test_nano_runs_at_its_full_size() -> None:
    loaded = load(SourceSpec(str(MODELS / "nano.py")))
    assert try_forward(loaded).shape == (1, 1024, 256)
    assert sum(p.numel() for p in loaded.model.parameters()) < 5_000_000


def test_nano_attention_is_attention(tmp_path: Path) -> None:
    """Written by hand, it equals torch's own on the same queries, keys and values."""
    model = small("nano", tmp_path).model
    attention = model.blocks[0].attn
    x = torch.randn(2, 12, 32)
    half = torch.outer(torch.arange(12.0), model.inv_freq)
    angles = torch.cat((half, half), dim=-1)
    with torch.no_grad():
        q, k, v = (
            p(x).view(2, 12, 2, 16).transpose(1, 2)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rotation = torch.polar(torch.ones_like(half), half)

        def rotate(t: torch.Tensor) -> torch.Tensor:  # the two halves as real and imaginary parts
            turned = torch.complex(t[..., :8], t[..., 8:]) * rotation
            return torch.cat((turned.real, turned.imag), dim=-1)

        wanted = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        wanted = attention.o_proj(wanted.transpose(1, 2).reshape(2, 12, 32))
        torch.testing.assert_close(attention(x, angles.cos(), angles.sin()), wanted, atol=1e-5, rtol=1e-4)


def test_nano_norm_and_gelu_are_the_usual_ones(tmp_path: Path) -> None:
    model = small("nano", tmp_path).model
    x = torch.randn(3, 32) * 3
    with torch.no_grad():
        norm = model.blocks[0].attn_norm
        torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, norm.eps))
        torch.testing.assert_close(model.blocks[0].mlp.act(x), F.gelu(x, approximate="tanh"))


def test_nano_names_where_each_part_comes_from() -> None:
    text = (MODELS / "nano.py").read_text()
    for public in ("LlamaRMSNorm", "NewGELUActivation", "nanoGPT", "LlamaRotaryEmbedding", "BERT"):
        assert public in text
