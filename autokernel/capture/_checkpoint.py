"""Laying a file of weights over a model.  Only plain tensors are read; nothing in a file is executed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")
_PREFIXES = ("_orig_mod.", "module.")  # what torch.compile and DistributedDataParallel put before every name
_SAMPLE = 1 << 20


def read(path: Path) -> dict[str, Tensor]:
    """Name -> tensor on the CPU.  Raises `UsageError` when the file is absent or not plain weights."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        what = "is a folder, not a file of weights" if path.is_dir() else "no such file"
        raise UsageError(f"--checkpoint {path}: {what}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"--checkpoint {path} is not a readable safetensors file: {error}") from error
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"--checkpoint {path} is not a file of plain weights, and loading it could run code in it: "
            "save model.state_dict() with torch.save or safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"--checkpoint {path} can't be read as weights: {reason}") from error
    return _strip(_unwrap(path, value))


def _unwrap(path: Path, value: Any) -> dict[str, Tensor]:
    import torch

    for key in _WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
            break
    if not isinstance(value, dict):
        raise UsageError(
            f"--checkpoint {path} holds a {type(value).__name__}, not a dict of names and tensors"
        )
    odd = [str(k) for k, v in value.items() if not (isinstance(k, str) and isinstance(v, torch.Tensor))]
    if odd or not value:
        found = f"{len(odd)} entries that are not tensors, first {odd[0]}" if odd else "no tensors"
        raise UsageError(f"--checkpoint {path} has {found}: save model.state_dict() by itself")
    return value


def _strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name[len(prefix) :]: tensor for name, tensor in state.items()}
    return state


def lay_over(model: nn.Module, checkpoint: str) -> None:
    """Copy the checkpoint's values into ``model``, keeping the model's own dtypes and devices.

    Every parameter and persistent buffer must be in the file, and nothing else; a tensor that shares
    memory with one that is there (tied weights) may be absent.
    """
    import torch

    path = Path(checkpoint)
    state = read(path)
    own = model.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}
    present = {_memory(own[name]) for name in state if name in own}
    missing = [n for n, t in own.items() if n not in state and (t.numel() == 0 or _memory(t) not in present)]
    unexpected = [name for name in state if name not in own]
    misshaped = [n for n in own if n in state and own[n].shape != state[n].shape]
    faults = []
    if missing:
        faults.append(_list("missing", missing))
    if unexpected:
        faults.append(_list("unexpected", unexpected))
    if misshaped:
        name = misshaped[0]
        shapes = f"{tuple(state[name].shape)} in the file, {tuple(own[name].shape)} in the model"
        faults.append(f"{_list('of another shape', misshaped)} ({shapes})")
    if faults:
        raise UsageError(
            f"--checkpoint {path} does not fit the model: {'; '.join(faults)} "
            f"(the model has {len(own)} tensors, the file {len(state)})"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _list(what: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"{len(names)} {what}, first {names[0]}"


def fingerprint(checkpoint: str) -> str:
    """A hash of the file: all of it up to 64 MB, beyond that its size and 64 samples of 1 MB."""
    path = Path(checkpoint)
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    whole = 64 * _SAMPLE
    step = _SAMPLE if size <= whole else (size - _SAMPLE) // 63
    with path.open("rb") as file:
        for index in range(64):
            file.seek(index * step)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
