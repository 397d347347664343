"""Hugging Face models: ``hf:ORG/NAME`` from the Hub or its cache, and folders with config.json and weights.

The class is transformers' own, by ``architectures`` in the config.  Code in a model's repository is never
run, and weights are read as `_checkpoint` reads them: nothing in them is executed either.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import _checkpoint, _hub, _huggingface_inputs
from ._inputs import Shape
from ._messages import Source, close_to, library, one_line, user_code
from ._modules import Built

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_CODE_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")


def build(
    source: Source,
    class_name: str | None,
    shapes: Sequence[Shape],
    dtype: torch.dtype | None,
    *,
    offline: bool,
    silent: bool,
) -> Built:
    """Build the model of a folder or of a name on the Hub, in ``dtype`` or else in its config's.

    A folder without weights gets random ones, under torch's seed.  ``offline``: take from the cache and don't
    ask the Hub; ``silent``: say nothing on stderr.  Raises `UsageError` for whatever is wrong.
    """
    label = source.label
    if source.path is not None:
        _check_folder(source.path, label)  # a wrong folder needs no library
    transformers = library(source)
    folder = source.path or _from_hub(source, offline)
    raw = _read_config(folder, label)
    with _quiet(transformers), user_code(f"{label}: {CONFIG} can't be used", source):
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    kind = _class_of(transformers, config, class_name, label)
    weights = _weights(folder, label)
    with _quiet(transformers), user_code(f"{label}: {kind.__name__} can't be built", source):
        if weights is None:
            model = kind._from_config(config, **({} if dtype is None else {"dtype": dtype}))
            _say(f"{label} has no weights: they are random, so only speed means something", silent)
        else:
            model = _with_weights(kind, config, dtype, weights, label, silent)
    contents = {
        "config": {k: v for k, v in raw.items() if k not in ("transformers_version", "_name_or_path")},
        "class": kind.__name__,
        "weights": _checkpoint.fingerprint(str(weights)) if weights else None,
    }
    return Built(model, _huggingface_inputs.example(model, shapes, label), contents, cast=False)


def _say(text: str, silent: bool) -> None:
    if not silent:
        print(text, file=sys.stderr)


# --- files ------------------------------------------------------------------------------------------------


def _from_hub(source: Source, offline: bool) -> Path:
    """The folder of a model in the Hub's cache, downloaded if need be (never with HF_HUB_OFFLINE=1)."""
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache  # pyright: ignore[reportMissingImports]

    name, label = source.attribute or "", source.label
    revision: str | None = None
    unreachable = offline or not _hub.reachable()

    def get(file: str) -> Path | None:
        nonlocal unreachable
        cached = try_to_load_from_cache(name, file, revision=revision) if revision else None
        if cached is not None:
            return Path(cached) if isinstance(cached, str) else None  # else it is known not to exist
        try:
            return Path(hf_hub_download(name, file, revision=revision, local_files_only=unreachable))
        except errors.LocalEntryNotFoundError:
            unreachable = True
            return None
        except errors.EntryNotFoundError:
            return None

    with _hub_errors(label):
        config = get(CONFIG)
        if config is None:
            why = "is not in the cache, and the Hub can't be asked" if unreachable else f"has no {CONFIG}"
            raise UsageError(f"{label} {why}{_hub.UNREACHABLE if unreachable else ''}")
        folder = config.parent
        revision = folder.name  # a commit: all files are of the same state
        for file in _checkpoint.NAMES:
            if get(file) is not None:
                return folder
            index = get(f"{file}.index.json")
            if index is not None:
                with contextlib.suppress(
                    ValueError, KeyError, AttributeError, TypeError
                ):  # said on reading it
                    for shard in dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values()):
                        get(shard)
                return folder
    if unreachable:
        raise UsageError(
            f"{label}: its weights are not in the cache, and the Hub can't be asked{_hub.UNREACHABLE}"
        )
    raise UsageError(f"{label} has no weights in {' or '.join(_checkpoint.NAMES)}")


@contextlib.contextmanager
def _hub_errors(label: str) -> Iterator[None]:
    from huggingface_hub import errors  # pyright: ignore[reportMissingImports]

    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(f"{label}: the Hub gives it out only after `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"{label}: the Hub has no such model, or it is private (`hf auth login`)") from error
    except errors.HFValidationError as error:
        raise UsageError(f"{label} is not a name on the Hub: say hf:ORG/NAME") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise UsageError(f"{label} can't be had from the Hub: {one_line(error)}") from error


def _check_folder(folder: Path, label: str) -> None:
    if not (folder / CONFIG).is_file():
        files = sorted(p.name for p in folder.glob("*.py"))
        hint = f"; for a model file say {folder.name}/{files[0]}" if files else ""
        raise UsageError(
            f"{label} is a folder without {CONFIG}: a Hugging Face folder has that and the weights{hint}"
        )


def _read_config(folder: Path, label: str) -> dict[str, Any]:
    """What config.json holds, after looking at what would make transformers fail or fetch code."""
    from transformers import CONFIG_MAPPING  # pyright: ignore[reportMissingImports]

    _check_folder(folder, label)
    try:
        raw = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{label}: {CONFIG} is not JSON: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{label}: {CONFIG} holds a {type(raw).__name__}, not an object")
    named = raw.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(n, str) for n in named)):
        raise UsageError(f"{label}: {CONFIG} has architectures {named!r}, which is not a list of class names")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        hint = f": for a model of timm say timm:{raw['architecture']}" if "architecture" in raw else ""
        raise UsageError(f"{label}: {CONFIG} has no model_type{hint}")
    if kind not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UsageError(
                f"{label}: its model_type {kind!r} needs code from the model's own repository, "
                "which autokernel never runs: write a .py file whose build() makes it"
            )
        close = close_to(kind, CONFIG_MAPPING.keys())
        raise UsageError(f"{label}: {CONFIG} has model_type {kind!r}, which transformers doesn't know{close}")
    if "quantization_config" in raw:
        raise UsageError(
            f"{label}: its weights are quantized, and run by kernels of their own: use the full weights"
        )
    _refuse_foreign_kernels(raw, label)
    return raw


def _refuse_foreign_kernels(raw: dict[str, Any], label: str) -> None:
    """``"attn_implementation": "org/name"`` would download a kernel and run it."""
    for key, value in raw.items():
        if isinstance(value, dict):
            _refuse_foreign_kernels(value, label)
        elif key in _CODE_KEYS and isinstance(value, str) and "/" in value:
            raise UsageError(f"{label}: {CONFIG} asks for foreign code ({key}: {value}): take that line out")


def _weights(folder: Path, label: str) -> Path | None:
    """The weights in ``folder``, None when it has none; `UsageError` when it has only others."""
    found = _checkpoint.find(folder)
    if found is not None:
        return found
    others = sorted(p.name for form in ("*.safetensors", "*.bin", "*.gguf") for p in folder.glob(form))
    others = [name for name in others if name != "training_args.bin"]
    if others:
        wanted = " nor ".join(f"{name} or {name}.index.json" for name in _checkpoint.NAMES)
        raise UsageError(f"{label} has {others[0]}, but neither {wanted}, so its weights can't be told")
    return None


# --- the model --------------------------------------------------------------------------------------------


def _class_of(transformers: Any, config: Any, class_name: str | None, label: str) -> Any:
    """The model's class: the one asked for, that of the config, or what AutoModel takes for the config."""
    base = transformers.PreTrainedModel

    def class_called(name: Any) -> Any:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        return found if inspect.isclass(found) and issubclass(found, base) else None

    if class_name is not None:
        found = class_called(class_name)
        if found is None:
            stem = type(config).__name__.removesuffix("Config")
            names = [n for n in dir(transformers) if n.startswith(stem) and class_called(n) is not None]
            close = difflib.get_close_matches(class_name, names, n=6, cutoff=0.0)
            there = f": it has {', '.join(close)}" if close else ""
            raise UsageError(f"{label}: transformers has no model class {class_name!r}{there}")
        if not issubclass(type(config), found.config_class or object):
            raise UsageError(
                f"{label}: {class_name} is for another kind of model than {type(config).__name__}"
            )
        return found
    for name in config.architectures or ():
        found = class_called(name)
        if found is not None:
            return found
    if type(config) not in transformers.MODEL_MAPPING:
        raise UsageError(f"{label}: transformers has no model for {type(config).__name__}: give --class-name")
    found = transformers.MODEL_MAPPING[type(config)]
    return found[0] if isinstance(found, list | tuple) else found


def _with_weights(
    kind: Any, config: Any, dtype: torch.dtype | None, weights: Path, label: str, silent: bool
) -> Any:
    """The model with its weights; transformers renames and joins them where its class is newer than they.

    Raises `UsageError` when some are missing or of another shape.
    """
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=_checkpoint.read(weights, label if weights.is_dir() else f"{label}: {weights.name}"),
        dtype=dtype or "auto",
        ignore_mismatched_sizes=True,  # said below, with the others
        output_loading_info=True,
    )
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    misshaped = sorted(info["mismatched_keys"])
    if missing or misshaped:
        faults = _checkpoint.mismatch(missing, unexpected, misshaped)
        raise UsageError(f"{label}: its weights do not fit {kind.__name__}: {faults}")
    if unexpected:
        _say(
            f"{label}: {kind.__name__} has no use for {len(unexpected)} weights, first {unexpected[0]}",
            silent,
        )
    return model


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' reports and bars off stderr: what matters in them is said here, in a line."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
