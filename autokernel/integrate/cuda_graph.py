"""One CUDA graph around a callable, with outputs that are never overwritten behind the caller's back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class CudaGraph:
    """Record ``fn(*inputs)`` once and replay it.

    ``static`` are the positions of inputs that keep their address (parameters, packs); all others are
    copied into the graph's own buffers before a replay.  A changed address of a static input, or a changed
    shape, records anew.  Outputs live in the graph's memory: when the caller still holds any of them at the
    next call, another recording is used; the last of `MAX_RECORDINGS` hands out copies, so that it is always
    free.  What can't be captured (a host synchronization, say) is run unrecorded from then on; ``failure``
    says why.  Not for graphs that write to their inputs, or that have symbolic sizes.
    """

    MAX_RECORDINGS = 3
    WARMUPS = 3

    def __init__(self, fn: Callable[..., Any], static: set[int]) -> None:
        self.fn = fn
        self.static = static
        self.failure: str | None = None
        self._recordings: list[_Recording] = []

    def __call__(self, *inputs: Any) -> Any:
        if self.failure is not None:
            return self.fn(*inputs)
        for recording in self._recordings:
            if recording.fits(inputs):
                if recording.idle():
                    return recording.replay(inputs)
            elif recording.idle():
                self._recordings.remove(recording)
                break
        if len(self._recordings) >= self.MAX_RECORDINGS:
            return self.fn(*inputs)
        if any(isinstance(x, Tensor) and not x.is_cuda for x in inputs):
            # A value on the host is read once, while recording, and would never change again.
            self.failure = "an input is not on the device"
            return self.fn(*inputs)
        last = len(self._recordings) == self.MAX_RECORDINGS - 1
        try:
            recording = _Recording(self.fn, inputs, self.static, self.WARMUPS, copies=last)
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            torch.cuda.synchronize()
            return self.fn(*inputs)
        self._recordings.append(recording)
        return recording.replay(inputs)


class _Recording:
    def __init__(
        self, fn: Callable[..., Any], inputs: Sequence[Any], static: set[int], warmups: int, *, copies: bool
    ) -> None:
        self.copies = copies
        tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        self.fixed = [i for i in tensors if i in static]
        self.copied = [i for i in tensors if i not in static]
        self.signature = [self._shape(inputs[i]) for i in self.copied]
        self.pointers = [inputs[i].data_ptr() for i in self.fixed]
        self.buffers = list(inputs)
        for i in self.copied:
            self.buffers[i] = torch.empty_strided(
                inputs[i].shape, inputs[i].stride(), dtype=inputs[i].dtype, device=inputs[i].device
            )
            self.buffers[i].copy_(inputs[i])
        self.others = [x for x in inputs if not isinstance(x, Tensor)]
        stream = _side_stream()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                fn(*self.buffers)
        current.wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        _clear_workspaces()  # each stream's would be kept for good
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                outputs = fn(*self.buffers)
        finally:
            torch.cuda.set_stream(current)  # torch leaves the capture's stream current when a capture fails
            _clear_workspaces()
        leaves, self.structure = pytree.tree_flatten(outputs)
        self.leaves = leaves
        # Handing out views leaves our own tensors as the only permanent owners of the storages.
        self.storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        self.idle_counts = [_use_count(s) for s in self.storages]

    @staticmethod
    def _shape(x: Tensor) -> tuple:
        return (x.shape, x.stride(), x.dtype, x.device)

    def fits(self, inputs: Sequence[Any]) -> bool:
        if [x for x in inputs if not isinstance(x, Tensor)] != self.others:
            return False
        pointers = [inputs[i].data_ptr() for i in self.fixed]
        return pointers == self.pointers and [self._shape(inputs[i]) for i in self.copied] == self.signature

    def idle(self) -> bool:
        """Whether nobody but this recording holds its outputs."""
        return all(_use_count(s) <= n for s, n in zip(self.storages, self.idle_counts, strict=True))

    def replay(self, inputs: Sequence[Any]) -> Any:
        for i in self.copied:
            self.buffers[i].copy_(inputs[i])
        self.graph.replay()
        hand_out = Tensor.clone if self.copies else Tensor.detach
        fresh = [hand_out(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(fresh, self.structure)


def _use_count(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream() -> torch.cuda.Stream:
    """One stream per device for warm-ups and captures: cuBLAS keeps a workspace per stream."""
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


def _clear_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
