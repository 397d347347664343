"""Models of transformers and timm as sources: what loads, with which inputs, and what each mistake says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel.capture.source import LoadedModel, SourceSpec, load, try_forward
from autokernel.errors import UsageError

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": 99, "max_position_embeddings": 40}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 16}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 99,
}  # fmt: skip
WHISPER = {
    "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SPEECH = {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}

# Class -> its config's class, what that is made with, and the inputs that the model should get.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", TEXT, {"input_ids": (1, 40), "attention_mask": (1, 40)}),
    "RobertaForMaskedLM": ("RobertaConfig", TEXT, {"input_ids": (1, 38), "attention_mask": (1, 38)}),
    "LlamaForCausalLM": (
        "LlamaConfig",
        {**TEXT, "max_position_embeddings": 4096, "num_key_value_heads": 1},
        {"input_ids": (1, 128), "attention_mask": (1, 128), "use_cache": False},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 99},
        {
            "input_ids": (1, 128),
            "attention_mask": (1, 128),
            "decoder_input_ids": (1, 128),
            "use_cache": False,
        },
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**IMAGE, "num_channels": 1},
        {"pixel_values": (1, 1, 32, 32)},
    ),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8},
        {"input_ids": (1, 40), "attention_mask": (1, 40), "pixel_values": (1, 3, 32, 32)},
    ),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config",
        {**SMALL, **SPEECH},
        {"input_values": (1, 16000)},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**SEQ2SEQ, **WHISPER},
        {"input_features": (1, 8, 24), "decoder_input_ids": (1, 20), "use_cache": False},
    ),
}


def make(folder: Path, name: str, **more: Any) -> Any:
    """Save a small model of the class ``name`` in ``folder``, and return it."""
    transformers = pytest.importorskip("transformers")
    config, given, _ = MODELS[name]
    torch.manual_seed(1)
    model = getattr(transformers, name)(getattr(transformers, config)(**given, **more)).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    make(tmp_path / "Bert", "BertForMaskedLM")
    return tmp_path / "Bert"


@pytest.fixture
def edit(bert: Path) -> Callable[..., None]:
    """Change entries of the config."""

    def edit(**entries: Any) -> None:
        path = bert / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return edit


def error_of(spec: SourceSpec, *expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(spec)
    text = str(caught.value)
    assert "\n" not in text
    for part in expected:
        assert part in text, text


def forms(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


# --- Hugging Face folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_model(tmp_path: Path, name: str) -> None:
    original = make(tmp_path, name)
    loaded = load(SourceSpec(str(tmp_path)))
    assert type(loaded.model) is type(original) and not loaded.model.training
    assert loaded.args == () and forms(loaded.kwargs) == MODELS[name][2]
    for key, value in original.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], value)
    with torch.no_grad():
        expected, got = original(**loaded.kwargs), try_forward(loaded)
    torch.testing.assert_close(expected[0], got[0])
    assert "past_key_values" not in got
    check_fresh_inputs(loaded)


def check_fresh_inputs(loaded: LoadedModel) -> None:
    (_, first), (_, again), (_, other) = (loaded.fresh_inputs(seed) for seed in (1, 1, 2))
    assert forms(first) == forms(other) == forms(loaded.kwargs)
    differ = False
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[key])
            assert value.dtype == other[key].dtype == loaded.kwargs[key].dtype
            differ |= not torch.equal(value, other[key])
            assert not key.endswith("ids") or 0 <= int(value.min()) <= int(value.max()) < 99
    assert differ


def test_two_loads_are_the_same_and_a_worker_repeats_them(bert: Path, tmp_path: Path) -> None:
    loaded = load(SourceSpec(str(bert)))
    with torch.no_grad():
        loaded.model.bert.embeddings.word_embeddings.weight.fill_(0.25)  # tied to the decoder's
    torch.save(loaded.model.state_dict(), tmp_path / "w.pt")
    spec = SourceSpec.from_json(json.loads(json.dumps(loaded.spec.to_json())))
    again = load(spec, weights=tmp_path / "w.pt")
    assert again.identity == loaded.identity and again.name == loaded.name == "bert"
    assert (again.model.cls.predictions.decoder.weight == 0.25).all()
    assert torch.equal(try_forward(again)[0], try_forward(loaded)[0])


def test_sharded_weights(tmp_path: Path) -> None:
    original = make(tmp_path / "a", "LlamaForCausalLM")
    original.save_pretrained(tmp_path / "b", max_shard_size="4KB")
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file()
    whole, parts = (load(SourceSpec(str(tmp_path / f))) for f in "ab")
    assert torch.equal(try_forward(whole)[0], try_forward(parts)[0])
    shard = min((tmp_path / "b").glob("model-*.safetensors"))
    shard.unlink()
    error_of(SourceSpec(str(tmp_path / "b")), "index.json names files that are not there", shard.name)


def test_pickled_weights(bert: Path) -> None:
    from safetensors.torch import load_file

    before = load(SourceSpec(str(bert)))
    file = bert / "model.safetensors"
    state = load_file(file)
    file.unlink()
    torch.save(state, bert / "pytorch_model.bin")
    assert torch.equal(try_forward(load(SourceSpec(str(bert))))[0], try_forward(before)[0])
    torch.save(before.model, bert / "pytorch_model.bin")  # a module, whose loading would run code
    error_of(SourceSpec(str(bert)), "pytorch_model.bin is not a file of plain weights")


def test_random_weights_where_there_are_none(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bert / "model.safetensors").unlink()
    first = load(SourceSpec(str(bert)))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has no weights: they are random" in said
    torch.manual_seed(9)
    assert torch.equal(try_forward(load(SourceSpec(str(bert))))[0], try_forward(first)[0])
    (bert / "adapter_model.safetensors").touch()
    error_of(SourceSpec(str(bert)), "has adapter_model.safetensors, but neither model.safetensors")


def test_dtype_is_the_config_s_or_the_one_asked_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{**TEXT, "num_key_value_heads": 1}, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "w")
    config.save_pretrained(tmp_path / "none")
    for name in ("w", "none"):
        own, asked = (load(SourceSpec(str(tmp_path / name), dtype=d)).model for d in (None, "float64"))
        assert {p.dtype for p in own.parameters()} == {torch.bfloat16}
        assert {p.dtype for p in asked.parameters()} == {torch.float64}
        assert own.model.rotary_emb.inv_freq.dtype == torch.float32  # rounded, it would turn the wrong way


def test_images_have_the_dtype_of_the_weights(tmp_path: Path) -> None:
    make(tmp_path, "ViTForImageClassification")
    loaded = load(SourceSpec(str(tmp_path), dtype="float16"))
    assert loaded.kwargs["pixel_values"].dtype == torch.float16


def test_shapes_go_to_the_inputs_in_order(tmp_path: Path) -> None:
    make(tmp_path, "CLIPModel")
    loaded = load(SourceSpec(str(tmp_path), input_shapes=("3,7:int32", "2,3,32,32")))
    expected = {"input_ids": (3, 7), "attention_mask": (3, 7), "pixel_values": (2, 3, 32, 32)}
    assert forms(loaded.kwargs) == expected
    assert loaded.kwargs["input_ids"].dtype == torch.int32
    try_forward(loaded)
    spec = SourceSpec(str(tmp_path), input_shapes=("1,7",) * 3)
    error_of(spec, "3 --input-shape for 2 inputs (input_ids, pixel_values)")


def test_classes(tmp_path: Path) -> None:
    make(tmp_path, "LlamaForCausalLM")
    loaded = load(SourceSpec(str(tmp_path), class_name="LlamaModel"))
    assert type(loaded.model).__name__ == "LlamaModel"
    assert loaded.identity != load(SourceSpec(str(tmp_path))).identity
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "NotInTransformers"))
    assert type(load(SourceSpec(str(tmp_path))).model).__name__ == "LlamaModel"  # AutoModel's choice
    error_of(SourceSpec(str(tmp_path), class_name="LlamaForCause"), "no model class", "LlamaForCausalLM")
    error_of(SourceSpec(str(tmp_path), class_name="ViTModel"), "ViTModel is for another kind of model")


def test_identity_is_of_config_and_weights(bert: Path, edit: Callable[..., None], tmp_path: Path) -> None:
    base = load(SourceSpec(str(bert))).identity
    moved = bert.rename(tmp_path / "Elsewhere")
    assert load(SourceSpec(str(moved))).identity == base
    moved.rename(bert)
    edit(transformers_version="4.0.0")
    assert load(SourceSpec(str(bert))).identity == base
    edit(layer_norm_eps=1e-3)
    changed = load(SourceSpec(str(bert))).identity
    assert changed != base
    make(bert, "BertForMaskedLM", layer_norm_eps=1e-3, pad_token_id=3)
    assert load(SourceSpec(str(bert))).identity not in (base, changed)


def test_checkpoint_over_a_folder(bert: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", "BertForMaskedLM", pad_token_id=5)
    loaded = load(SourceSpec(str(bert), checkpoint=str(tmp_path / "other")))
    weight = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(loaded.model.state_dict()[weight], other.state_dict()[weight])


# --- what is wrong with a folder --------------------------------------------------------------------------


def test_folders_that_are_none(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    error_of(SourceSpec(str(tmp_path)), "is a folder without config.json")
    (tmp_path / "gpt.py").touch()
    error_of(SourceSpec(str(tmp_path)), f"for a model file say {tmp_path.name}/gpt.py")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "config.json is not JSON"),
        ("[1]", "config.json holds a list"),
        ("{}", "config.json has no model_type"),
        ('{"architecture": "resnet18"}', "say timm:resnet18"),
        ('{"model_type": "brt"}', "model_type 'brt', which transformers doesn't know: did you mean"),
        ('{"model_type": "own", "auto_map": {"AutoModel": "code.Own"}}', "which autokernel never runs"),
        ('{"model_type": "bert", "quantization_config": {}}', "its weights are quantized"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "config.json can't be used"),
        ('{"model_type": "bert", "hidden_size": 7, "num_attention_heads": 2}', "can't be built: ValueError"),
        ('{"model_type": "bert", "attn_implementation": "some/kernel"}', "asks for foreign code"),
        ('{"model_type": "clip", "text_config": {"attn_implementation": "a/b"}}', "asks for foreign code"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path: Path, text: str, part: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    error_of(SourceSpec(str(tmp_path)), part)


def test_weights_that_do_not_fit(bert: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = bert / "model.safetensors"
    state = load_file(file)
    weight = "bert.embeddings.position_embeddings.weight"
    save_file({**state, weight: state[weight][:5].clone()}, file)
    error_of(SourceSpec(str(bert)), "do not fit BertForMaskedLM", "1 of another shape", weight, "(5, 16) in")
    del state[weight]
    save_file({**state, "odd": torch.ones(1)}, file)
    error_of(SourceSpec(str(bert)), "1 missing, first bert.embeddings.position", "1 unexpected, first odd")
    file.write_bytes(file.read_bytes()[:-100])
    error_of(SourceSpec(str(bert)), "model.safetensors is damaged or cut off")


def test_weights_that_are_not_used_are_named(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    file = bert / "model.safetensors"
    save_file({**load_file(file), "odd": torch.ones(1)}, file)
    load(SourceSpec(str(bert)))
    assert "BertForMaskedLM has no use for 1 weights, first odd" in capsys.readouterr().err


def test_a_forward_that_raises(bert: Path) -> None:
    loaded = load(SourceSpec(str(bert), input_shapes=("1,500",)))
    with pytest.raises(UsageError, match=r"fails on --input-shape: \w+Error: .*\(modeling_bert.py line"):
        try_forward(loaded)


def test_inputs_that_cannot_be_made_up(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.PatchTSTConfig(d_model=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8)
    transformers.PatchTSTModel(config).save_pretrained(tmp_path)
    error_of(SourceSpec(str(tmp_path)), "forward of PatchTSTModel needs past_values", "example_inputs(model)")


def test_a_file_in_the_folder(bert: Path) -> None:
    error_of(SourceSpec(str(bert / "model.safetensors")), "give the folder that it is in")


# --- names on the Hub -------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with nothing in it, and no network."""
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_name_from_the_cache(cache: Path) -> None:
    repository, commit = cache / "models--Org--Tiny-0.5B", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / commit
    make(snapshot, "BertForMaskedLM")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    loaded = load(SourceSpec("hf:Org/Tiny-0.5B"))
    assert loaded.name == "tiny-0.5b" and "input_ids" in loaded.kwargs
    assert loaded.identity == load(SourceSpec(str(snapshot))).identity
    assert load(SourceSpec(f"hf:{snapshot}")).identity == loaded.identity
    weights = snapshot / "model.safetensors"
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    weights.unlink()
    error_of(SourceSpec("hf:Org/Tiny-0.5B"), "names files that are not there", "model-1.safetensors")
    (snapshot / "model.safetensors.index.json").unlink()
    error_of(SourceSpec("hf:Org/Tiny-0.5B"), "its weights are not in the cache", "HF_HUB_OFFLINE")


def test_names_that_are_not_there(cache: Path) -> None:
    error_of(SourceSpec("hf:Org/Nothing"), "is not in the cache, and the Hub can't be asked")
    error_of(SourceSpec("hf:a/b/c"), "is not a name on the Hub: say hf:ORG/NAME")


# --- timm -------------------------------------------------------------------------------------------------


def test_timm(capsys: pytest.CaptureFixture[str]) -> None:
    timm = pytest.importorskip("timm")
    loaded = load(SourceSpec("timm:resnet18", dtype="bfloat16"))
    assert "timm:resnet18 has random weights (timm:resnet18." in capsys.readouterr().err
    assert loaded.name == "resnet18" and loaded.kwargs == {}
    size = timm.get_pretrained_cfg("resnet18").input_size
    assert forms({"x": loaded.args[0]}) == {"x": (1, *size)} and loaded.args[0].dtype == torch.bfloat16
    again = load(SourceSpec("timm:resnet18", dtype="bf16"))
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.model.parameters(), again.model.parameters(), strict=True)
    )
    assert again.identity == loaded.identity != load(SourceSpec("timm:resnet10t")).identity
    assert not torch.equal(loaded.fresh_inputs(1)[0][0], loaded.fresh_inputs(2)[0][0])


def test_timm_with_a_shape() -> None:
    pytest.importorskip("timm")
    loaded = load(SourceSpec("timm:test_resnet", input_shapes=("2,3,64,64",)))
    assert loaded.args[0].shape == (2, 3, 64, 64) and try_forward(loaded).shape[0] == 2


def test_timm_names() -> None:
    pytest.importorskip("timm")
    error_of(SourceSpec("timm:resnet19"), "timm has no model 'resnet19': did you mean", "resnet18")
    error_of(SourceSpec("timm:resnet18.nothing"), "no weights 'nothing' for resnet18: use one of", "a1_in1k")
    error_of(SourceSpec("timm:resnet18", class_name="Net"), "leave --class-name out")


def test_timm_weights_are_fetched_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    asked: list[tuple[str, bool]] = []

    def create(name: str, pretrained: bool) -> torch.nn.Module:
        asked.append((name, pretrained))
        model = torch.nn.Linear(3, 3)
        model.default_cfg = {"input_size": (3, 8, 3)}  # type: ignore[assignment]
        return model

    monkeypatch.setattr(timm, "create_model", create)
    plain, pretrained = (load(SourceSpec(f"timm:{name}")) for name in ("resnet18", "resnet18.a1_in1k"))
    assert asked == [("resnet18", False), ("resnet18.a1_in1k", True)]
    assert plain.identity != pretrained.identity


# --- libraries that are not installed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "library", "extra"), [("hf:org/name", "transformers", "hf"), ("timm:resnet18", "timm", "timm")]
)
def test_missing_library(monkeypatch: pytest.MonkeyPatch, model: str, library: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    command = f"`uv sync --extra {extra}` or `pip install 'autokernel[{extra}]'`"
    error_of(SourceSpec(model), f"needs {library}, which is not installed", command)
