"""The identity of a region: a hash that ignores names, layer numbers and library versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autokernel.capture.nodes import op_name

SCHEME = "1"  # part of every digest: a change of scheme makes old fingerprints miss, never lie


def fingerprint(gm: fx.GraphModule, roles: Sequence[str], contents: Sequence[Tensor | None]) -> str:
    """Hash ops, literals, shapes, dtypes, strides, roles of inputs and the content of constants.

    ``gm`` is a region's subgraph; ``roles`` and ``contents`` go with its placeholders (``contents`` holds a
    real tensor where the role is ``constant``).
    """
    order: dict[fx.Node, int] = {}
    lines = [f"scheme {SCHEME}"]
    inputs = iter(zip(roles, contents, strict=True))
    for node in gm.graph.nodes:
        order[node] = len(order)
        if node.op == "placeholder":
            role, content = next(inputs)
            digest = content_hash(content) if content is not None else ""
            lines.append(f"in {role} {_describe(node.meta.get('example_value'), strides=True)} {digest}")
        elif node.op == "output":
            lines.append(f"out {_canonical(node.args, order)}")
        else:
            args = _canonical(node.args, order)
            kwargs = _canonical({k: v for k, v in sorted(node.kwargs.items()) if v is not None}, order)
            lines.append(f"{op_name(node)} {args} {kwargs} {_describe(node.meta.get('example_value'))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def content_hash(value: Tensor) -> str:
    """SHA-256 of a tensor's elements in logical order, with dtype and shape."""
    flat = value.detach().cpu().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat).contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + raw).hexdigest()


def _describe(value: Any, strides: bool = False) -> str:
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{text}@{list(value.stride())}" if strides else text
    if isinstance(value, list | tuple):
        return "(" + ",".join(_describe(v) for v in value) + ")"
    return type(value).__name__


def _canonical(value: Any, order: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{order[value]}"
    if isinstance(value, list | tuple):
        items = list(value)
        if isinstance(value, tuple):
            while items and items[-1] is None:  # trailing Nones are defaults that one version spells out
                items.pop()
        return "(" + ",".join(_canonical(v, order) for v in items) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_canonical(v, order)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_canonical((value.start, value.stop, value.step, 0), order)})"
    if isinstance(value, torch.device):
        return value.type
    return repr(value)
