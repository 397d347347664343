"""A kept kernel as something that a graph can call.

A `torch` rewrite is called as a plain function, so that Inductor sees through it and fuses its
neighbours; every other backend becomes a `torch.library.custom_op` with the reference's output shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel.backends import load_kernel
from autokernel.records import INPUT_ALIGNMENT, Port


@dataclass(eq=False)
class Kernel:
    """One kernel of an artifact.  ``calls`` counts the call sites it got in the graphs compiled so far."""

    name: str
    family: str
    fingerprint: str
    source: Path
    inputs: list[Port]
    outputs: list[Port]
    backend: str = ""
    calls: int = 0
    function: Callable[..., Any] = field(init=False)
    prepack: Callable[..., Any] | None = field(init=False)

    def __post_init__(self) -> None:
        loaded = load_kernel(self.source)
        self.backend = loaded.backend
        self.prepack = loaded.prepack
        self.function = loaded.fn if loaded.backend == "torch" else self._custom_op(loaded.fn)

    def pack(self, statics: Sequence[Tensor]) -> list[Tensor]:
        """Prepacked tensors for one call site, or its parameters as they are if there is no ``prepack``."""
        if self.prepack is None:
            return list(statics)
        with torch.no_grad():
            packed = self.prepack(*statics)
        return list(packed) if isinstance(packed, tuple | list) else [packed]

    def _custom_op(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        op_name = f"autokernel::{self.family}_{self.source.stem.replace('-', '_')}_{self.fingerprint[:8]}"
        known = _OPS.get(op_name)
        if known is not None:
            return known
        results = ", ".join(["Tensor"] * len(self.outputs))
        returns = "Tensor" if len(self.outputs) == 1 else f"({results})"
        outputs = self.outputs
        activations = sum(p.role == "activation" for p in self.inputs)

        def make(args: Sequence[Tensor]) -> Any:
            made = [
                torch.empty_strided(p.shape, p.stride, dtype=getattr(torch, p.dtype), device=args[0].device)
                for p in outputs
            ]
            return made[0] if len(made) == 1 else tuple(made)

        def build(arity: int) -> Any:
            names = ", ".join(f"Tensor x{i}" for i in range(arity))
            op = torch.library.custom_op(
                f"{op_name}_{arity}",
                lambda *args: fn(*map(_aligned, args)),
                mutates_args=(),
                schema=f"({names}) -> {returns}",
            )
            op.register_fake(lambda *args: make(args))
            return op

        ops: dict[int, Any] = {}

        def call(*args: Tensor) -> Any:
            # The arity is known only once a prepack has run, so the op is made at the first call.
            op = ops.get(len(args))
            if op is None:
                op = ops[len(args)] = build(len(args))
            return op(*args)

        if self.prepack is None:
            ops[len(self.inputs)] = build(len(self.inputs))
        call.__name__ = f"{self.family}_{self.fingerprint[:8]}"
        call.activations = activations  # type: ignore[attr-defined]
        _OPS[op_name] = call
        return call


_OPS: dict[str, Callable[..., Any]] = {}


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of a view that starts where the judge never had a kernel start."""
    return x if x.data_ptr() % INPUT_ALIGNMENT == 0 else x.clone()
