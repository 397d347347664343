"""The float64 answer: a module evaluated as if every number in it had twice the digits.

Inputs, parameters and buffers are upcast, and a TorchFunctionMode turns whatever would narrow them on
the way (``.float()``, ``.to(torch.float16)``, ``dtype=`` arguments, autocast) into float64, complex into
complex128.  Without that an RMSNorm with its own ``.to(float32)`` is as far off as eager itself.

Not covered: code that branches on a dtype takes the float64 branch; an op without a float64 form raises,
and the caller falls back to eager's own result (and says so); Python code that leaves torch (numpy) is
left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.float8_e4m3fn: torch.float64, torch.float8_e5m2: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip
TYPE_NAMES = {
    f"torch.{device}{name}": f"torch.{device}DoubleTensor"
    for device in ("", "cuda.")
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor")
}
_NARROWING = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double})
_NARROWING_COMPLEX = frozenset(
    getattr(Tensor, n) for n in ("cfloat", "chalf", "cdouble") if hasattr(Tensor, n)
)
_RMS_NORMS = frozenset({F.rms_norm, torch.rms_norm})
_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
_BIT_CASTS = frozenset({Tensor.view})


class NoWideForm(Exception):
    """This computation has no float64 form; compare with eager instead."""


def widen(value: Any) -> Any:
    """A tensor in float64 or complex128 (integers and booleans as they are); other values unchanged."""
    if isinstance(value, Tensor) and value.dtype in WIDE:
        return value.detach().to(WIDE[value.dtype])
    return value


class WideMode(TorchFunctionMode):
    """While active, nothing is computed in less than float64."""

    def __init__(self, *, double_inputs: bool = False) -> None:
        super().__init__()
        self.double_inputs = double_inputs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NARROWING:
            return args[0].to(torch.float64)
        if func in _NARROWING_COMPLEX:
            return args[0].to(torch.complex128)
        if func is _ENTER_AUTOCAST or func is _EXIT_AUTOCAST:
            return None  # a float64 tensor is never autocast anyway
        if func in _BIT_CASTS and any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            raise NoWideForm("a view with another dtype reinterprets bits")
        args = tuple(_wide_argument(a) for a in args)
        kwargs = {k: _wide_argument(v) for k, v in kwargs.items()}
        if func in _RMS_NORMS and not self.double_inputs:
            args, kwargs = _explicit_eps(args, kwargs)
        return func(*args, **kwargs)


def _wide_argument(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value)
    if isinstance(value, str):
        return TYPE_NAMES.get(value, value)
    return value


def _explicit_eps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """rms_norm's default eps depends on the dtype it computes in: float32 for everything narrower."""
    eps = torch.finfo(torch.float32).eps
    if len(args) > 3:
        return (*args[:3], eps if args[3] is None else args[3], *args[4:]), kwargs
    return args, kwargs | ({"eps": eps} if kwargs.get("eps") is None else {})


@contextmanager
def wide(*, double_inputs: bool = False) -> Iterator[None]:
    """Compute in float64: the mode, no gradients, and float64 as the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), WideMode(double_inputs=double_inputs):
            yield
    finally:
        torch.set_default_dtype(before)


def widen_module(module: nn.Module) -> nn.Module:
    """A copy with every tensor in float64 or complex128 (``.double()`` would drop imaginary parts)."""
    wide_copy = copy.deepcopy(module)
    for owner in wide_copy.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(widen(parameter), requires_grad=False)
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = widen(buffer)
        for name, value in vars(owner).items():  # tensors kept as plain attributes
            if isinstance(value, Tensor):
                setattr(owner, name, widen(value))
    return wide_copy


def exact(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    double_inputs: bool | None = None,
) -> Any:
    """What ``module`` returns in float64. ``module`` itself must already be wide (`widen_module`).

    ``double_inputs``: the user's own dtype is float64 (by default, whether ``args`` hold any).  Raises
    NoWideForm when an op in it can't be evaluated so.
    """
    if double_inputs is None:
        double_inputs = any(
            isinstance(a, Tensor) and a.dtype == torch.float64 for a in pytree.tree_leaves(args)
        )
    wide_args = pytree.tree_map(widen, tuple(args))
    wide_kwargs = pytree.tree_map(widen, kwargs or {})
    with wide(double_inputs=double_inputs):
        try:
            return module(*wide_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NoWideForm(str(error).splitlines()[0][:300]) from error


def eager(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """What ``module`` returns as the user runs it."""
    with torch.no_grad():
        return module(*args, **(kwargs or {}))
