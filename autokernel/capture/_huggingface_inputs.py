"""Example inputs for a model of transformers, from its config and the signature of its ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ._inputs import Shape, draw, floating_dtype

TOKENS = 128
AUDIO_SAMPLES = 16_000
IMAGE_SIZE = 224
# Where a config may say it, in this order; the first that has it counts.
_PARTS = ("vision_config", "audio_config", "speech_config", "encoder", "backbone_config")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")
_MEDIA = ("image", "video", "audio", "speech")


@dataclass(frozen=True)
class Need:
    """One input: its sizes, and the bound (exclusive) of whole numbers; floating without one."""

    sizes: tuple[int, ...]
    high: int | None = None


def example(model: Any, shapes: Sequence[Shape], label: str) -> Callable[[Any], dict[str, Any]]:
    """``example_inputs`` for ``model``: keyword inputs drawn from torch's generator.

    ``shapes`` go to the inputs in their order (a mask follows its ids).  Raises `UsageError` when ``forward``
    needs something that can't be made up, or there are more shapes than inputs.
    """
    import torch

    takes = inspect.signature(model.forward).parameters
    needs = _needs(model, takes)
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [n for n, p in takes.items() if p.default is p.empty and p.kind not in free and n not in needs]
    if unknown or not needs:
        what = f"needs {', '.join(unknown)}" if unknown else "has no input of a known name"
        raise UsageError(
            f"{label}: forward of {type(model).__name__} {what}, for which autokernel knows no example: "
            "write a .py file with build() and example_inputs(model)"
        )
    if len(shapes) > len(needs):
        raise UsageError(
            f"{label}: {len(shapes)} --input-shape for {len(needs)} inputs ({', '.join(needs)}): "
            "give at most one for each, in that order"
        )
    given = dict(zip(needs, shapes, strict=False))

    def example_inputs(model: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        for name, need in needs.items():
            shape = given.get(name)
            dtype = torch.int64 if need.high is not None else floating_dtype(model)
            if shape is not None and shape.dtype is not None:
                dtype = getattr(torch, shape.dtype)
            inputs[name] = draw(shape.sizes if shape else need.sizes, dtype, need.high)
            if name == "input_ids" and "attention_mask" in takes:
                inputs["attention_mask"] = torch.ones(inputs[name].shape, dtype=torch.int64)
        if "use_cache" in takes:
            inputs["use_cache"] = False
        return inputs

    return example_inputs


def _needs(model: Any, takes: Mapping[str, inspect.Parameter]) -> dict[str, Need]:
    """The inputs of one plain call, in the order of ``forward``'s parameters."""
    config, needs = model.config, {}
    # A chat model takes images or sound where its text has places for them, and runs on text alone.
    chat = any(
        _number(config, f"{what}_token_{end}") is not None for what in _MEDIA for end in ("id", "index")
    )
    for name, sizes in (("pixel_values", _image), ("input_features", _features), ("input_values", _sound)):
        if name in takes:
            asked = takes[name].default is inspect.Parameter.empty or name == model.main_input_name
            if asked or "input_ids" not in takes or not chat:
                needs[name] = Need(sizes(config))
    if "input_ids" in takes and not (config.is_encoder_decoder and needs):
        text = _text_config(config, decoder=False)
        choices = (2,) if type(model).__name__.endswith("ForMultipleChoice") else ()
        needs["input_ids"] = Need((1, *choices, _length(text, model)), _vocabulary(text, model))
    if "decoder_input_ids" in takes and config.is_encoder_decoder:
        text = _text_config(config, decoder=True)
        needs["decoder_input_ids"] = Need((1, _length(text, model)), _vocabulary(text, model))
    return {name: needs[name] for name in takes if name in needs}


def _number(config: Any, *names: str) -> int | None:
    """The first of ``names`` that the config, or else one of its parts, has as a whole number."""
    for part in (config, *(getattr(config, name, None) for name in _PARTS)):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _text_config(config: Any, *, decoder: bool) -> Any:
    names = ("decoder", "text_config", "generator") if decoder else ("text_config", "text_encoder", "encoder")
    found = (getattr(config, name, None) for name in names)
    return next((part for part in found if hasattr(part, "vocab_size")), config)


def _vocabulary(text: Any, model: Any) -> int:
    size = getattr(text, "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows if isinstance(rows, int) else 2


def _length(text: Any, model: Any) -> int:
    """128 tokens, or as many as the model has positions for."""
    found = [getattr(text, name, None) for name in _LENGTHS]
    limits = [n for n in found if isinstance(n, int) and n > 0]
    # RoBERTa and its kin number positions from the padding token's id on.
    taken = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return max(1, min([TOKENS, *(n - max(taken, default=0) for n in limits)]))


def _image(config: Any) -> tuple[int, ...]:
    """``(1, channels, height, width)``, with the frames before the channels for a model of videos."""
    size: Any = None
    for part in (config, *(getattr(config, name, None) for name in _PARTS)):
        size = size or getattr(part, "image_size", None) or getattr(part, "input_size", None)
    if isinstance(size, dict):
        size = (size.get("height", IMAGE_SIZE), size.get("width", IMAGE_SIZE))
    height, width = size if isinstance(size, list | tuple) else (size or IMAGE_SIZE,) * 2
    frames = _number(config, "num_frames")
    return (
        1,
        *([frames] if frames else []),
        _number(config, "num_channels", "in_channels") or 3,
        height,
        width,
    )


def _features(config: Any) -> tuple[int, ...]:
    """A spectrogram as the model's own feature extractor lays it out."""
    mel = _number(config, "num_mel_bins")
    positions = _number(config, "max_source_positions")
    per_frame = _number(config, "input_feat_per_channel", "feature_projection_input_dim")
    if per_frame is not None:  # Speech2Text, Wav2Vec2-BERT: frames of features
        return 1, TOKENS, per_frame
    if mel is not None and positions is not None:  # Whisper: its first layers halve the frames
        return 1, mel, 2 * positions
    side = _number(config, "spec_size")
    if mel is not None and side is not None:  # CLAP: an image of one channel, which it folds into a square
        return 1, 1, side * (side // mel), mel
    return 1, TOKENS, mel or 80


def _sound(config: Any) -> tuple[int, ...]:
    """A second of sound, or a spectrogram for a model that is made for one."""
    mel, frames = _number(config, "num_mel_bins"), _number(config, "max_length")
    if mel is not None and frames is not None:  # the Audio Spectrogram Transformer
        return 1, frames, mel
    channels = _number(config, "audio_channels")
    return (1, channels, AUDIO_SAMPLES) if channels else (1, AUDIO_SAMPLES)
