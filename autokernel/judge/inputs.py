"""What a task is tried on: fresh random data of several kinds, and what was captured from the model.

Seeds are drawn after a candidate has been loaded, from the system's randomness, and never leave the
judge.  Static inputs (parameters, buffers) keep the model's own values, or fresh ones near them;
constants always keep theirs, because a rewrite may rely on them; integers stay below ``Port.high``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autokernel.judge.layout import TensorSpec, dtype_of
from autokernel.records import Port, Task

RE_IM = ".re_im"
LINEAR_FAMILIES = frozenset({"linear", "sibling_linears"})


def _normal(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=dtype, device=gen.device)


def _outliers(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal data, one element in about 500 a hundred times as large."""
    x = _normal(shape, gen, dtype)
    hit = torch.rand(shape, generator=gen, device=gen.device) < 0.002
    return torch.where(hit, x * 100, x)


def _integers(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: a linear op on them has an exact answer, whatever the order of its sums."""
    return torch.randint(-3, 4, shape, generator=gen, device=gen.device).to(dtype)


def _zero_rows(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal data, every eighth row (along the last dimension) all zero: there an eps is all that counts."""
    x = _normal(shape, gen, dtype)
    if x.dim() > 1 and x.shape[-1] > 1:
        x.view(-1, x.shape[-1])[::8] = 0
    return x


def _small_rows(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal data, every row (along the last dimension) scaled by 1e-8 to 1: an eps counts in some."""
    x = _normal(shape, gen, dtype)
    if x.dim() > 1 and x.shape[-1] > 1:
        places = torch.rand((*shape[:-1], 1), generator=gen, device=gen.device, dtype=torch.float64)
        x = x * torch.pow(10.0, -8 * places).to(x.real.dtype)
    return x


def _wide(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal data, each element scaled by 1 to 1e8, evenly over the exponents: approximations end."""
    places = torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64)
    return _normal(shape, gen, dtype) * torch.pow(10.0, 8 * places).to(dtype.to_real())


@dataclass(frozen=True, slots=True)
class Distribution:
    """``base`` times a scale plus ``offset``; of ``scales`` the first that keeps eager finite is used."""

    base: Callable[[tuple[int, ...], torch.Generator, torch.dtype], Tensor]
    scales: tuple[float, ...] = (1.0, 0.1, 0.01)
    offset: float = 0.0
    statics: bool = False
    """Whether floating static inputs are drawn from ``base``, too."""
    poke: float | None = None
    """What is put into a few elements of every floating activation."""


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution(_normal),
    "outliers": Distribution(_outliers),
    "large": Distribution(_normal, (1000.0, 100.0, 10.0, 1.0)),
    "offset": Distribution(_normal, (1.0, 0.1), 100.0),
    "zero rows": Distribution(_zero_rows),
    "small rows": Distribution(_small_rows),
    "small": Distribution(_normal, (1e-6,)),
    "wide": Distribution(_wide, (1.0, 0.01, 1e-4)),
    "integers": Distribution(_integers, (1.0,), statics=True),
    "nan": Distribution(_normal, (1.0,), poke=math.nan),
}
POKED = 8
"""At most so many elements of an activation are poked: the rest of the output must stay worth comparing."""


def distributions_for(task: Task, tier: str) -> list[str]:
    """Names of what a tier tries, ``captured`` aside."""
    if tier == "screen":
        return ["normal", "outliers"]
    names = ["normal", "outliers", "large", "offset", "zero rows", "small", "wide"]
    if task.family != "conv":  # fast convolutions transform tiles, and spread a NaN or a large row's error
        names += ["small rows", "nan"]
    return [*names, "integers"] if task.family in LINEAR_FAMILIES else names


def spec_of(port: Port) -> TensorSpec:
    return TensorSpec(dtype_of(port.dtype), tuple(port.shape), tuple(port.stride))


class InputSource:
    """Draws inputs for one task, in contract order, as contiguous tensors on ``device``."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self.captured = load_captured(task.dir / "inputs.safetensors", device)
        gen = self.generator(0)
        for port in task.static_inputs:  # without a capture: made up once, and the same in every case
            if port.name not in self.captured:
                self.captured[port.name] = self._made_up(port, gen)
            elif self.captured[port.name].shape != tuple(port.shape):
                self.captured[port.name] = self._resampled(port, gen)

    @property
    def has_captured(self) -> bool:
        """Whether every activation was captured from the model."""
        return all(p.name in self.captured for p in self.task.activations)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def draw(
        self,
        kind: str,
        seed: int,
        scale: float,
        *,
        fresh_statics: bool = False,
        poke: float | None = None,
    ) -> list[Tensor]:
        """All inputs. ``kind`` is a name in DISTRIBUTIONS, or ``captured`` (the model's own activations).

        ``poke``: a number in place of the distribution's own.
        """
        gen = self.generator(seed)
        values = []
        for port in self.task.inputs:
            if port.role == "activation":
                values.append(self.activation(port, kind, gen, scale, poke))
            else:
                values.append(self._static(port, kind, gen, fresh=fresh_statics))
        return values

    def activation(
        self,
        port: Port,
        kind: str,
        gen: torch.Generator,
        scale: float = 1.0,
        poke: float | None = None,
    ) -> Tensor:
        """One input that is no static one; see `draw`."""
        if kind == "captured" and port.name in self.captured:
            return self.captured[port.name]
        dtype = dtype_of(port.dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return self._discrete(port, dtype, gen)
        distribution = DISTRIBUTIONS.get(kind, DISTRIBUTIONS["normal"])
        value = distribution.base(tuple(port.shape), gen, _drawable(dtype)) * scale + distribution.offset
        if distribution.poke is not None and value.numel():
            places = torch.randint(value.numel(), (POKED,), generator=gen, device=self.device)
            value.view(-1)[places] = distribution.poke if poke is None else poke
        return _within(value, dtype)

    def _discrete(self, port: Port, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
        """Random integers within the port's bound, else within what was captured; booleans at their rate."""
        seen = self.captured.get(port.name)
        shape = tuple(port.shape)
        if dtype == torch.bool:
            share = float(seen.float().mean()) if seen is not None and seen.numel() else 0.5
            return torch.rand(shape, generator=gen, device=self.device) < min(max(share, 0.05), 0.95)
        low, high = 0, port.high
        if high is None and seen is not None and seen.numel():
            low, high = int(seen.min()), int(seen.max()) + 1
        if high is None:
            high = 2
        return torch.randint(low, max(high, low + 1), shape, generator=gen, device=self.device).to(dtype)

    def _static(self, port: Port, kind: str, gen: torch.Generator, *, fresh: bool) -> Tensor:
        dtype = dtype_of(port.dtype)
        value = self.captured[port.name]
        floating = dtype.is_floating_point or dtype.is_complex
        if port.role == "constant" or not floating:
            return value
        if kind in DISTRIBUTIONS and DISTRIBUTIONS[kind].statics:
            return DISTRIBUTIONS[kind].base(tuple(port.shape), gen, _drawable(dtype)).to(dtype)
        return self._near(value, gen) if fresh else value

    def _made_up(self, port: Port, gen: torch.Generator) -> Tensor:
        dtype = dtype_of(port.dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return self._discrete(port, dtype, gen)
        return (_normal(tuple(port.shape), gen, _drawable(dtype)) * 0.02).to(dtype)

    def _resampled(self, port: Port, gen: torch.Generator) -> Tensor:
        """The model's own values in a shape that it does not have: each drawn from all of them."""
        values = self.captured[port.name].flatten()
        count = math.prod(port.shape)
        return values[torch.randint(values.numel(), (count,), generator=gen, device=self.device)].view(
            *port.shape
        )

    def _near(self, value: Tensor, gen: torch.Generator) -> Tensor:
        """New values of the same size and sign structure; what was all zero becomes small and non-zero."""
        wide = value.to(torch.complex64 if value.dtype.is_complex else torch.float32)
        scale = float(wide.abs().square().mean().sqrt()) if value.numel() else 0.0
        factor = 0.75 + 0.5 * torch.rand(value.shape, generator=gen, device=self.device)
        noise = torch.randn(value.shape, generator=gen, device=self.device) * (0.1 * scale or 0.02)
        fresh = wide * factor + noise
        if not value.dtype.is_complex and value.numel() and float(value.min()) >= 0 and scale > 0:
            fresh = fresh.abs() + 1e-3 * scale  # a variance must stay positive
        return fresh.to(value.dtype)


def _within(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In ``dtype``, of which no number is too large for: infinities are tried on nobody."""
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        value = value.clamp(-limit, limit)
    return value.to(dtype)


def _drawable(dtype: torch.dtype) -> torch.dtype:
    """A dtype in which random numbers can be drawn before they are narrowed to ``dtype``."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def load_captured(path: Path, device: torch.device) -> dict[str, Tensor]:
    """inputs.safetensors by port name; complex tensors are stored as real pairs under ``name.re_im``."""
    if not path.is_file():
        return {}
    from safetensors.torch import load_file

    tensors = {}
    for name, value in load_file(str(path)).items():
        value = value.to(device)
        if name.endswith(RE_IM):
            tensors[name.removesuffix(RE_IM)] = torch.view_as_complex(value.contiguous())
        else:
            tensors[name] = value
    return tensors
