"""Architectures of transformers and timm in tiny random configurations, as a user would load them.

A line is a name, the kind of model, and a function that gives the model and its inputs.  Nothing is
downloaded.  ``python tests/zoo.py`` prints what becomes of each (`tests/test_zoo.py` asserts it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    kind: str
    make: Callable[[], tuple[nn.Module, Inputs]]
    library: str = "transformers"


def ids(*shape: int, high: int = 99) -> Tensor:
    return torch.randint(3, high, shape)


def text(model: str, config: str, *, length: int = 24, cache: bool | None = None, **changes: Any) -> Entry:
    return Entry("", lambda: _text(model, config, length, cache, changes))


def _text(model: str, config: str, length: int, cache: bool | None, changes: dict[str, Any]) -> Any:
    import transformers

    made = getattr(transformers, config)(**changes)
    network = getattr(transformers, model)(made)
    inputs: Inputs = {"input_ids": ids(2, length), "attention_mask": torch.ones(2, length, dtype=torch.int64)}
    if cache is not None:
        inputs["use_cache"] = cache
    return network, inputs


BERT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = BERT | {
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = LLAMA | {"sliding_window": 16}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip


def _pixels(model: str, config: str, size: int = 32, batch: int = 2, **changes: Any) -> Entry:
    def make() -> tuple[nn.Module, Inputs]:
        import transformers

        made = getattr(transformers, config)(**changes)
        return getattr(transformers, model)(made), {"pixel_values": torch.randn(batch, 3, size, size)}

    return Entry("", make)


VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
       "image_size": 32, "patch_size": 8}  # fmt: skip


def _t5() -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(config), {
        "input_ids": ids(2, 20), "decoder_input_ids": ids(2, 12), "use_cache": False,
    }  # fmt: skip


def _bart() -> tuple[nn.Module, Inputs]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 15:] = 0
    return BartForConditionalGeneration(config), {
        "input_ids": ids(2, 20), "attention_mask": mask, "decoder_input_ids": ids(2, 12), "use_cache": False,
    }  # fmt: skip


def _whisper() -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=30, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 16, 60), "decoder_input_ids": ids(2, 12), "use_cache": False,
    }  # fmt: skip


def _wav2vec2() -> tuple[nn.Module, Inputs]:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    return Wav2Vec2Model(config), {"input_values": torch.randn(2, 400)}


def _clip() -> tuple[nn.Module, Inputs]:
    from transformers import CLIPConfig, CLIPModel

    half = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = CLIPConfig(
        text_config=half | {"vocab_size": 99, "max_position_embeddings": 32, "projection_dim": 16,
                            "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config=half | {"image_size": 32, "patch_size": 8, "projection_dim": 16},
        projection_dim=16,
    )  # fmt: skip
    return CLIPModel(config), {"input_ids": ids(3, 16), "pixel_values": torch.randn(2, 3, 32, 32)}


def _siglip() -> tuple[nn.Module, Inputs]:
    from transformers import SiglipConfig, SiglipModel

    half = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = SiglipConfig(
        text_config=half | {"vocab_size": 99, "max_position_embeddings": 16, "pad_token_id": 0,
                            "bos_token_id": 1, "eos_token_id": 2},
        vision_config=half | {"image_size": 32, "patch_size": 8},
    )  # fmt: skip
    return SiglipModel(config), {"input_ids": ids(3, 16), "pixel_values": torch.randn(2, 3, 32, 32)}


def _with_past() -> tuple[nn.Module, Inputs]:
    """A decode step: one token, and a cache that holds the ones before."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids(1, 9), past_key_values=cache, use_cache=True)
    return model, {"input_ids": ids(1, 1), "past_key_values": cache, "use_cache": True}


def _mamba() -> tuple[nn.Module, Inputs]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2)
    return MambaForCausalLM(config), {"input_ids": ids(2, 12), "use_cache": False}


def _detr() -> tuple[nn.Module, Inputs]:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, use_pretrained_backbone=False,
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=8,
    )  # fmt: skip
    return DetrForObjectDetection(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def timm(name: str, size: int = 64, **changes: Any) -> Entry:
    def make() -> tuple[nn.Module, Inputs]:
        import timm as library

        return library.create_model(name, num_classes=10, **changes), {"x": torch.randn(2, 3, size, size)}

    return Entry("vision", make, "timm")


def kind(name: str, entry: Entry) -> Entry:
    return Entry(name, entry.make, entry.library)


MOE = LLAMA | {
    "num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32,
}  # fmt: skip
ZOO: dict[str, Entry] = {
    # encoders
    "bert": kind("encoder", text("BertModel", "BertConfig", **BERT)),
    "distilbert": kind("encoder", text(
        "DistilBertModel", "DistilBertConfig", vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64,
        max_position_embeddings=64,
    )),
    "roberta": kind("encoder", text("RobertaForMaskedLM", "RobertaConfig", **BERT)),
    "albert": kind("encoder", text("AlbertModel", "AlbertConfig", embedding_size=16, **BERT)),
    "electra": kind("encoder", text("ElectraModel", "ElectraConfig", embedding_size=16, **BERT)),
    "deberta-v2": kind("encoder", text(
        "DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=16, norm_rel_ebd="layer_norm", share_att_key=True, **BERT,
    )),
    "modernbert": kind("encoder", text(
        "ModernBertModel", "ModernBertConfig", pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, local_attention=16, **BERT,
    )),
    # decoders
    "gpt2": kind("decoder", text("GPT2LMHeadModel", "GPT2Config", cache=False, **GPT2)),
    "llama": kind("decoder", text("LlamaForCausalLM", "LlamaConfig", cache=False, **LLAMA)),
    "llama with a cache": Entry("decoder", _with_past),
    "mistral": kind("decoder", text("MistralForCausalLM", "MistralConfig", cache=False, **SLIDING)),
    "qwen3": kind("decoder", text("Qwen3ForCausalLM", "Qwen3Config", cache=False, **LLAMA)),
    "gemma2": kind("decoder", text("Gemma2ForCausalLM", "Gemma2Config", cache=False, **SLIDING)),
    "phi": kind("decoder", text("PhiForCausalLM", "PhiConfig", cache=False, **BERT)),
    "gpt-neox": kind("decoder", text("GPTNeoXForCausalLM", "GPTNeoXConfig", cache=False, **BERT)),
    "opt": kind("decoder", text(
        "OPTForCausalLM", "OPTConfig", cache=False, vocab_size=99, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32,
    )),
    "bloom": kind("decoder", text(
        "BloomForCausalLM", "BloomConfig", cache=False, vocab_size=99, hidden_size=32, n_layer=2, n_head=4,
    )),
    # encoder and decoder
    "t5": Entry("encoder–decoder", _t5),
    "bart": Entry("encoder–decoder", _bart),
    # mixtures of experts
    "mixtral": kind("experts", text("MixtralForCausalLM", "MixtralConfig", cache=False, **MOE)),
    "qwen3-moe": kind("experts", text("Qwen3MoeForCausalLM", "Qwen3MoeConfig", cache=False, **MOE)),
    # state space
    "mamba": Entry("state space", _mamba),
    # speech
    "whisper": Entry("speech", _whisper),
    "wav2vec2": Entry("speech", _wav2vec2),
    # vision
    "vit": kind("vision", _pixels("ViTForImageClassification", "ViTConfig", **VIT)),
    "dinov2": kind("vision", _pixels(
        "Dinov2Model", "Dinov2Config", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )),
    "swin": kind("vision", _pixels(
        "SwinModel", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
        num_heads=[2, 4], window_size=4,
    )),
    "segformer": kind("vision", _pixels(
        "SegformerForSemanticSegmentation", "SegformerConfig", size=64, num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[4, 2], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32,
    )),
    # text and image
    "clip": Entry("text and image", _clip),
    "siglip": Entry("text and image", _siglip),
    # detection
    "detr": Entry("detection", _detr),
    "yolos": kind("detection", _pixels(
        "YolosForObjectDetection", "YolosConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, image_size=[32, 32], patch_size=8, num_detection_tokens=6,
    )),
    "timm resnet18": timm("resnet18"),
    "timm mobilenetv3": timm("mobilenetv3_small_050"),
    "timm efficientnet": timm("efficientnet_b0"),
    "timm convnext": timm("convnext_atto"),
    "timm vit": timm("vit_tiny_patch16_224", img_size=64, depth=2),
    "timm mixer": timm("mixer_s32_224", size=224),
    "timm regnet": timm("regnetx_002"),
}  # fmt: skip


def make(name: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = ZOO[name].make()
    return model.eval(), inputs
