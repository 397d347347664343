"""Models of timm: ``timm:resnet18`` has random weights, ``timm:resnet18.a1_in1k`` pretrained ones.

What follows the point is timm's own name for a set of weights; without it nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import _hub
from ._inputs import floating_dtype
from ._messages import Source, close_to, library, user_code
from ._modules import Built

if TYPE_CHECKING:
    from torch import Tensor, nn


def build(source: Source, class_name: str | None, shapes: Sequence[Any], *, silent: bool) -> Built:
    """Build ``source.attribute``.  Raises `UsageError` when timm is missing or does not know the name.

    Its example input is one image of the size that the model was made for, unless shapes are given.
    """
    if class_name is not None:
        raise UsageError(f"{source.label} says which model it is: leave --class-name out")
    timm = library(source)
    name = source.attribute or ""
    architecture, point, tag = name.partition(".")
    if not timm.is_model(architecture):
        close = close_to(architecture, timm.list_models())
        raise UsageError(f"{source.label}: timm has no model {architecture!r}{close}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    if point and tag not in tags:
        have = f"use one of {', '.join(tags)}" if tags else "it has none"
        raise UsageError(f"{source.label}: timm has no weights {tag!r} for {architecture}: {have}")
    with user_code(f"{source.label}: timm can't build it", source), _fetching(source.label, tag):
        model = timm.create_model(name, pretrained=bool(tag))
    if not tag and not silent:
        other = f" ({source.label}.{tags[0]} has pretrained ones)" if tags else ""
        print(f"{source.label} has random weights{other}, so only speed means something", file=sys.stderr)
    contents = {"architecture": architecture, "weights": _fingerprint(model) if tag else None}
    return Built(model, None if shapes else _example, contents)


@contextlib.contextmanager
def _fetching(label: str, tag: str) -> Iterator[None]:
    """Around building a model whose weights the Hub may be asked for."""
    if not tag:
        yield
        return
    from huggingface_hub import errors  # pyright: ignore[reportMissingImports]

    try:
        with _hub.offline_if_unreachable():
            yield
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UsageError(
            f"{label}: its weights are not in the cache, and the Hub can't be asked{_hub.UNREACHABLE}: "
            f"{label.removesuffix(f'.{tag}')} has random ones"
        ) from error


def _example(model: Any) -> Tensor:
    import torch

    return torch.randn(1, *model.default_cfg["input_size"]).to(floating_dtype(model))


def _fingerprint(model: nn.Module) -> str:
    """A hash of the weights' names, shapes and first values: where timm keeps its files is its own affair."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().reshape(-1)[:4096].double().tolist()
        digest.update(f"{name} {tuple(tensor.shape)} {values}".encode())
    return digest.hexdigest()
