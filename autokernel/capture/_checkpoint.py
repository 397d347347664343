"""Reading files of weights, and laying them over a model.  Nothing in a file is executed."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ._messages import one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")
_PREFIXES = ("_orig_mod.", "module.")  # what torch.compile and DistributedDataParallel put before every name
NAMES = ("model.safetensors", "pytorch_model.bin")  # what transformers calls them, whole or as an index
_SAMPLE = 1 << 20


def find(folder: Path) -> Path | None:
    """The file of weights in ``folder``, or the index of several; None when it has neither."""
    names = (name + end for name in NAMES for end in ("", ".index.json"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def files(path: Path, label: str) -> list[Path]:
    """The files that ``path`` stands for: itself, those that an index names, or those of a folder.

    Raises `UsageError`, which begins with ``label``, when one of them is not there.
    """
    if path.is_dir():
        found = find(path)
        if found is None:
            wanted = " or ".join([*NAMES, *(f"{name}.index.json" for name in NAMES)])
            raise UsageError(f"{label} is a folder without weights: it has no {wanted}")
        path = found
    if not path.is_file():
        raise UsageError(f"{label}: no such file")
    if path.suffix != ".json":
        return [path]
    try:
        names = list(dict.fromkeys(json.loads(path.read_bytes())["weight_map"].values()))
        shards = [path.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{label}: {path.name} is not an index of weights (JSON with a weight_map)"
        ) from error
    absent = [name for name, shard in zip(names, shards, strict=True) if not shard.is_file()]
    if absent:
        raise UsageError(f"{label}: {path.name} names files that are not there: {_list('absent', absent)}")
    return shards


def read(path: Path, label: str | None = None) -> dict[str, Tensor]:
    """Name -> tensor on the CPU, of all files that ``path`` stands for.

    Raises `UsageError`, which begins with ``label``, when one is absent or holds not plain weights.
    """
    label = label or f"--checkpoint {path}"
    state: dict[str, Tensor] = {}
    for file in files(path, label):
        state |= _read_file(file, label if file == path else f"{label}: {file.name}")
    return state


def _read_file(path: Path, label: str) -> dict[str, Tensor]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_beginning(path, label)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{label} is damaged or cut off, not a safetensors file: {error}") from error
    try:
        with warnings.catch_warnings():  # of protocols and archives: what matters is said here
            warnings.simplefilter("ignore")
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{label} is not a file of plain weights, and loading it could run code in it: "
            "save model.state_dict() with torch.save or safetensors"
        ) from error
    except _UNREADABLE as error:
        if "TorchScript" in str(error):
            raise UsageError(
                f"{label} is a scripted model, not weights: save its state_dict() with torch.save"
            ) from error
        raise UsageError(f"{label} is damaged or cut off: {one_line(error)[:200]}") from error
    return _unwrap(label, value)


# What torch.load has been seen to raise on files that are cut off or of another kind.
_UNREADABLE = (
    OSError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError,
    MemoryError, OverflowError, RecursionError, struct.error,
)  # fmt: skip


def _check_beginning(path: Path, label: str) -> None:
    """Raises `UsageError` for what can't be weights by its first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise UsageError(f"{label} can't be read: {error.strerror}") from error
    if not head:
        raise UsageError(f"{label} is an empty file, not weights")
    if head.startswith(b"version https://git-lfs"):
        raise UsageError(f"{label} is a pointer of Git LFS, not the weights: run `git lfs pull` beside it")
    if path.suffix != ".safetensors" and not head.startswith((b"PK", b"\x80")):
        raise UsageError(
            f"{label} is not a file of weights: give a .safetensors, what torch.save writes, or their index"
        )


def _unwrap(label: str, value: Any) -> dict[str, Tensor]:
    import torch

    for key in _WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
            break
    if not isinstance(value, dict):
        raise UsageError(f"{label} holds a {type(value).__name__}, not a dict of names and tensors")
    odd = [str(k) for k, v in value.items() if not (isinstance(k, str) and isinstance(v, torch.Tensor))]
    if odd or not value:
        found = f"{len(odd)} entries that are not tensors, first {odd[0]}" if odd else "no tensors"
        raise UsageError(f"{label} has {found}: save model.state_dict() by itself")
    return value


def _strip(state: dict[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) and name not in own for name in state):
            state = {name[len(prefix) :]: tensor for name, tensor in state.items()}
    return state


def lay_over(model: nn.Module, checkpoint: str) -> None:
    """Copy the checkpoint's values into ``model``, keeping the model's own dtypes and devices.

    Every parameter and persistent buffer must be in the file, and nothing else; a tensor that shares
    memory with one that is there (tied weights) may be absent.
    """
    import torch

    path = Path(checkpoint)
    own = model.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}
    state = _strip(read(path), own)
    _materialize(own, state)
    present = {_memory(own[name]) for name in state if name in own}
    missing = [n for n, t in own.items() if n not in state and (t.numel() == 0 or _memory(t) not in present)]
    unexpected = [name for name in state if name not in own]
    misshaped = [n for n in own if n in state and own[n].shape != state[n].shape]
    shapes = [(name, tuple(state[name].shape), tuple(own[name].shape)) for name in misshaped]
    faults = "; ".join(filter(None, [mismatch(missing, unexpected, shapes), _unusable(state, own)]))
    if faults:
        raise UsageError(
            f"--checkpoint {path} does not fit the model: {faults} "
            f"(the model has {len(own)} tensors, the file {len(state)})"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _materialize(own: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Give lazy layers' tensors the sizes that they have in the file."""
    from torch.nn.parameter import is_lazy

    lazy: dict[str, Any] = {name: t for name, t in own.items() if is_lazy(t)}
    absent = [name for name in lazy if name not in state]
    if absent:
        raise UsageError(f"the checkpoint does not fit the model: {_list('missing', absent)}")
    for name, tensor in lazy.items():
        tensor.materialize(state[name].shape)


def _unusable(state: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """Tensors of the file that can't be copied into the model's: no dense ones, or of complex numbers."""
    import torch

    kinds: dict[str, list[str]] = {
        "without data": [],
        "quantized": [],
        "sparse": [],
        "of complex numbers": [],
    }
    for name, tensor in state.items():
        if tensor.is_meta:
            kinds["without data"].append(name)
        elif tensor.is_quantized:
            kinds["quantized"].append(name)
        elif tensor.layout != torch.strided:
            kinds["sparse"].append(name)
        elif tensor.is_complex() and name in own and not own[name].is_complex():
            kinds["of complex numbers"].append(name)
    return "; ".join(_list(kind, names) for kind, names in kinds.items() if names)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    from .nodes import is_plain

    if not is_plain(tensor):
        return (id(tensor),)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def mismatch(
    missing: Iterable[str], unexpected: Iterable[str], misshaped: Iterable[tuple[str, Any, Any]]
) -> str:
    """What keeps weights from fitting a model: how many, and the first few; ``""`` when nothing does.

    ``misshaped`` are names with the shapes in the file and in the model.
    """
    kinds = [("missing", list(missing)), ("unexpected", list(unexpected))]
    faults = [_list(kind, names) for kind, names in kinds if names]
    shapes = list(misshaped)
    if shapes:
        there, here = (tuple(shape) for shape in shapes[0][1:])
        names = _list("of another shape", [name for name, *_ in shapes])
        faults.append(f"{names} ({there} in the file, {here} in the model)")
    return "; ".join(faults)


def _list(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}, first {', '.join(names[:3])}"


def fingerprint(checkpoint: str) -> str:
    """A hash of the weights; of several files, one of their hashes."""
    found = files(Path(checkpoint), f"--checkpoint {checkpoint}")
    if len(found) == 1:
        return _file_fingerprint(found[0])
    return hashlib.sha256("".join(_file_fingerprint(file) for file in found).encode()).hexdigest()


def _file_fingerprint(path: Path) -> str:
    """All of the file up to 64 MB, beyond that its size and 64 samples of 1 MB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    whole = 64 * _SAMPLE
    step = _SAMPLE if size <= whole else (size - _SAMPLE) // 63
    with path.open("rb") as file:
        for index in range(64):
            file.seek(index * step)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
