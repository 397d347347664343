"""The shipped models do what their docstrings say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import MODELS, SMALL, graphs_of, small
from torch import Tensor, nn
from torch.nn import functional as F

from autokernel.capture.source import LoadedModel, SourceSpec, load, try_forward

TINY = {
    "bert": "Bert(Config(211, context=24, layers=2, heads=2, width=32, hidden=64, batch=3, length=20))",
    "vit": "ViT(Config(image=32, patch=8, classes=7, layers=2, heads=2, width=32, hidden=64, batch=3))",
    "convnet": "ConvNet(Config(widths=(8, 16), blocks=(2, 1), classes=7, batch=3, image=32))",
    "llama_decode": "LlamaDecode(Config(211, context=64, layers=2, heads=4, kv_heads=2, width=64, hidden=96,"
    " cache_length=24))",
    "custom": "Model(width=32, hidden=64)",
}
"""The other shipped models, small.  Those in SMALL are causal language models, and have more tests."""

FULL = {"bert": 109_482_240, "vit": 86_567_656, "convnet": 11_689_512}
"""Parameters of the public model of that size: BERT-base without its heads, ViT-B/16, ResNet-18."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], LoadedModel]:
    def get(name: str) -> LoadedModel:
        monkeypatch.setitem(SMALL, name, TINY[name])
        return small(name, tmp_path)

    return get


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Parameters so large, norms included, that attention is far from uniform and each of them matters."""
    for parameter in model.parameters():
        parameter.normal_(std=0.3)


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


@pytest.mark.parametrize("name", TINY)
def test_the_seed_decides_all(name: str, tiny: Callable[[str], LoadedModel]) -> None:
    first, second = tiny(name), tiny(name)
    outputs = try_forward(first)
    torch.testing.assert_close(try_forward(second), outputs, rtol=0, atol=0)
    weights, others = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    fresh = first.fresh_inputs(1)
    torch.testing.assert_close(second.fresh_inputs(1), fresh, rtol=0, atol=0)
    with torch.no_grad():
        other = first(*fresh[0], **fresh[1])
    one, another = (x if isinstance(x, Tensor) else x[0] for x in (outputs, other))
    assert one.isfinite().all() and (one - another).abs().max() > 1e-3


@pytest.mark.parametrize("name", TINY)
def test_one_graph_of_a_tiny_one(name: str, tiny: Callable[[str], LoadedModel]) -> None:
    assert len(graphs_of(tiny(name))) == 1


@pytest.mark.parametrize("name", FULL)
def test_the_full_size_is_the_public_one(name: str, tiny: Callable[[str], LoadedModel]) -> None:
    shipped = sys.modules[type(tiny(name).model).__module__]
    with torch.device("meta"):
        assert sum(p.numel() for p in shipped.build().parameters()) == FULL[name]


def torch_layer(parts: dict[str, nn.Module], qkv: list[nn.Linear], *, norm_first: bool) -> nn.Module:
    """torch's own encoder layer with the weights of a layer of ours."""
    eps, hidden = parts["norm1"].eps, parts["linear1"].out_features
    layer = nn.TransformerEncoderLayer(
        32, 2, hidden, activation="gelu", layer_norm_eps=eps, batch_first=True, norm_first=norm_first
    )
    state = {f"{name}.{k}": v for name, part in parts.items() for k, v in part.state_dict().items()}
    for kind in ("weight", "bias"):
        state[f"self_attn.in_proj_{kind}"] = torch.cat([getattr(linear, kind) for linear in qkv])
    layer.load_state_dict(state)
    return layer.eval()


def test_bert_is_torchs_own_encoder(tiny: Callable[[str], LoadedModel]) -> None:
    loaded = tiny("bert")
    model, inputs = loaded.model, loaded.kwargs
    scramble(model)
    inputs["attention_mask"][1, 13:] = 0  # padding
    embeddings = model.embeddings
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        sequence, pooled = model(**inputs)
        x = F.embedding(inputs["input_ids"], embeddings.word_embeddings.weight)
        x = x + F.embedding(inputs["token_type_ids"], embeddings.token_type_embeddings.weight)
        x = embeddings.LayerNorm(x + embeddings.position_embeddings.weight[:20])
        for layer in model.encoder.layer:
            attention = layer.attention
            parts = {
                "self_attn.out_proj": attention.output.dense,
                "linear1": layer.intermediate.dense,
                "linear2": layer.output.dense,
                "norm1": attention.output.LayerNorm,
                "norm2": layer.output.LayerNorm,
            }
            qkv = [attention.self.query, attention.self.key, attention.self.value]
            x = torch_layer(parts, qkv, norm_first=False)(x, src_key_padding_mask=~real)
        assert sequence.shape == (3, 20, 32) and pooled.shape == (3, 32)
        torch.testing.assert_close(sequence[real], x[real], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pooled, model.pooler.dense(x[:, 0]).tanh(), atol=1e-5, rtol=1e-4)
        # The padding's own tokens change nothing; without the mask they would.
        inputs["input_ids"][1, 13:] = (inputs["input_ids"][1, 13:] + 1) % 211
        torch.testing.assert_close(model(**inputs)[0][real], sequence[real])
        inputs["attention_mask"].fill_(1)
        assert (model(**inputs)[0] - sequence)[1, :13].abs().max() > 1e-2


def test_vit_is_torchs_own_encoder(tiny: Callable[[str], LoadedModel]) -> None:
    loaded = tiny("vit")
    model, (images,) = loaded.model, loaded.args
    scramble(model)
    with torch.no_grad():
        patches = F.unfold(images, 8, stride=8).transpose(1, 2)  # by hand: cut up, then a plain matmul
        x = patches @ model.patch_embed.proj.weight.flatten(1).T + model.patch_embed.proj.bias
        x = torch.cat((model.cls_token.repeat(3, 1, 1), x), dim=1) + model.pos_embed
        for block in model.blocks:
            parts = {
                "self_attn.out_proj": block.attn.proj,
                "linear1": block.mlp.fc1,
                "linear2": block.mlp.fc2,
                "norm1": block.norm1,
                "norm2": block.norm2,
            }
            x = torch_layer(parts, [block.attn.qkv], norm_first=True)(x)
        wanted = model.head(F.layer_norm(x[:, 0], (32,), model.norm.weight, model.norm.bias, 1e-6))
        logits = model(images)
    assert logits.shape == (3, 7)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_convnet_is_itself_with_batch_norm_folded(tiny: Callable[[str], LoadedModel]) -> None:
    loaded = tiny("convnet")
    model, (images,) = loaded.model, loaded.args

    def folded(conv: nn.Conv2d, bn: nn.BatchNorm2d, x: Tensor) -> Tensor:
        scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
        weight = conv.weight * scale[:, None, None, None]
        return F.conv2d(x, weight, bn.bias - bn.running_mean * scale, conv.stride, conv.padding)

    with torch.no_grad():
        x = F.max_pool2d(folded(model.conv1, model.bn1, images).relu(), 3, 2, 1)
        for block in (*model.layer1, *model.layer2):
            identity = x if block.downsample is None else folded(*block.downsample, x)
            x = folded(block.conv1, block.bn1, x).relu()
            x = (folded(block.conv2, block.bn2, x) + identity).relu()
        wanted = model.fc(x.mean((2, 3)))
        given = images.clone()
        logits = model(images)
        assert torch.equal(images, given)  # ReLUs in place stay inside
        assert logits.shape == (3, 7)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        # Each of the four must count, or a folding that forgets one would pass.
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            for name in ("weight", "bias", "running_mean", "running_var"):
                tensor, neutral = getattr(norm, name), float(name in ("weight", "running_var"))
                kept = tensor.clone()
                tensor.fill_(neutral)
                assert (model(images) - logits).abs().max() > 1e-3 * logits.abs().max()
                tensor.copy_(kept)


def test_decode_steps_equal_the_whole_forward(tiny: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    loaded = tiny("llama_decode")
    decode, (_, position, caches) = loaded.model, loaded.args
    full = small("llama", tmp_path)
    (tokens,) = full.args
    scramble(full.model)
    decode.load_state_dict(full.model.state_dict())
    assert position.tolist() == [23] and tokens.shape == (1, 24)
    for keys, values in caches:  # what lies after the position is never seen, however large
        keys.normal_(std=30)
        values.normal_(std=30)
    with torch.no_grad():
        wanted = full.model(tokens)
        for i in range(24):
            before = [[t.clone() for t in cache] for cache in caches]
            logits, returned = decode(tokens[:, i : i + 1], torch.tensor([i]), caches)
            assert logits.shape == (1, 1, 211)
            torch.testing.assert_close(logits[:, 0], wanted[:, i], atol=1e-4, rtol=1e-4)
            for cache, same, old in zip(caches, returned, before, strict=True):
                for tensor, handed_back, was in zip(cache, same, old, strict=True):
                    assert handed_back is tensor
                    changed = (tensor != was).any(-1).any(-1)[0]
                    assert changed.nonzero().flatten().tolist() == [i]
        again, _ = decode(tokens[:, -1:], position, caches)  # a step may be repeated
    torch.testing.assert_close(again, logits)


def test_custom_is_a_template() -> None:
    loaded = load(SourceSpec(str(MODELS / "custom.py")))
    (x,) = loaded.args
    assert try_forward(loaded).shape == x.shape
    assert "change" in (MODELS / "custom.py").read_text()
