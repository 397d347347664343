"""A compiled graph that looks, before every call, at what its kernels rely on.

Kernels read weights that were prepacked, and some were made for the content of a constant (a causal mask,
a table of angles).  Both can be changed behind their back.  A tensor counts as changed when its address or
its version counter did: then weights are packed again, and constants compared with what they held.  Writes
through ``.data`` move neither, nor do writes to tensors made under inference mode; `refresh_all` is for
those.  Fused optimizers (``fused=True``) leave no trace either, so every optimizer's step counts as a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from autokernel.integrate.rewrite import Pack
from autokernel.regions.fingerprint import content_hash


@dataclass(eq=False)
class Constant:
    """A tensor whose content kernels were made for: an input of the graph, or (``position`` -1) baked in."""

    name: str
    position: int
    value: Tensor
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = content_hash(self.value)

    def among(self, args: Sequence[Any]) -> Tensor:
        return args[self.position] if self.position >= 0 else self.value


class Guarded:
    """Calls ``compiled`` with the packs behind the graph's own inputs.

    ``original`` is called instead while a constant holds other values than the kernels were made for;
    ``tell`` gets the reason, each time that begins.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        packs: Sequence[Pack],
        constants: Sequence[Constant],
        original: Callable[..., Any],
        tell: Callable[[str], None],
    ) -> None:
        self._compiled, self._original, self._tell = compiled, original, tell
        self._packs, self._constants = packs, constants
        self._positions = sorted({i for p in packs for i in p.sources if i >= 0})
        self._tensors = [t for p in packs for t in p.tensors]
        self._packed: list[Any] = []
        self._held: list[Tensor] = []  # so that nothing else gets the memory that was packed, and its address
        self._compared: list[Any] = []
        self._stale = False
        _ALL.add(self)

    def __call__(self, *args: Any) -> Any:
        if self._constants:
            seen = [_mark(c.among(args)) for c in self._constants]
            if seen != self._compared:
                self._compare(args)
                self._compared = seen
            if self._stale:
                return self._original(*args)
        if self._positions:
            now = [_mark(args[i]) for i in self._positions]
            if now != self._packed:
                if self._packed:
                    self._pack(args)
                self._packed = now
                self._held = [args[i].detach() for i in self._positions]
        return self._compiled(*args, *self._tensors)

    def refresh(self) -> None:
        """Pack and compare everything again at the next call, whatever the version counters say."""
        if self._packed:
            self._packed = [None]
        self._compared = []

    def _pack(self, args: Sequence[Any]) -> None:
        for pack in self._packs:
            pack.refresh(
                [args[i] if i >= 0 else old for i, old in zip(pack.sources, pack.statics, strict=True)]
            )
        self._tensors = [t for p in self._packs for t in p.tensors]

    def _compare(self, args: Sequence[Any]) -> None:
        before = self._stale
        changed = [c.name for c in self._constants if content_hash(c.among(args)) != c.digest]
        self._stale = bool(changed)
        if changed and not before:
            self._tell(f"{', '.join(changed)} holds other values than the kernels were made for")


_ALL: weakref.WeakSet[Guarded] = weakref.WeakSet()


def refresh_all() -> None:
    """See `Guarded.refresh`; for every graph with kernels in this process."""
    for guarded in list(_ALL):
        guarded.refresh()


# One hook for all optimizers, which costs nothing between their steps.
register_optimizer_step_post_hook(lambda *_: refresh_all())


def _mark(tensor: Tensor) -> tuple[int, int]:
    # Tensors made under inference mode keep no version: only their address can be watched.
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
