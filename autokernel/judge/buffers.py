"""The judge's buffers for one task: input slots that all its workers map, output areas that one worker fills.

A slot is one full set of inputs.  There are ``count``, of which the first ``timed`` are timed; two more hold
the same values as an offset view and with padded rows.  On a GPU, static inputs are repeated per slot where
that is what it takes to be cold in L2, as a model's weights are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autokernel.judge.arena import Arena
from autokernel.judge.clock import MIN_GRAPH_CALLS, MIN_SAMPLE_S, l2_bytes
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.layout import TensorSpec, fill, pack_specs, raw
from autokernel.judge.protocol import Flag, OutputRecord
from autokernel.records import INPUT_ALIGNMENT, Task

BUDGET = {"cpu": 512 << 20, "cuda": 4 << 30}
MAX_SLOTS = {"cpu": 512, "cuda": 128}
PATTERNS = (0xFF, 0x7B)
"""Bytes that memory is poisoned with: NaN in every float dtype, and a large finite number."""


def slot_counts(device: torch.device, bytes_per_call: int, estimate_s: float) -> tuple[int, int]:
    """How many distinct input sets there are, and how many of them a sample calls on, once each.

    At least two where there is room: what a kernel returned for one must not be overwritten by the next.  On
    a CPU a sample is long enough to be measured, be it a single call. On a GPU, calls short enough to be
    helped by a warm L2 have at least 3 x L2 of buffers.
    """
    room = max(1, BUDGET[device.type] // max(bytes_per_call, 1))
    if device.type == "cpu":
        wanted = max(1, math.ceil(MIN_SAMPLE_S["cpu"] / max(estimate_s, 1e-7)))
        timed = min(wanted, MAX_SLOTS["cpu"], room)
        return min(max(timed, 2), room), timed
    if estimate_s >= MIN_SAMPLE_S["cuda"]:
        count = min(2, room)
    else:
        wanted = max(MIN_GRAPH_CALLS, math.ceil(3 * l2_bytes(device) / max(bytes_per_call, 1)))
        count = max(1, min(wanted, MAX_SLOTS["cuda"], room))
    return count, count


class InputBuffers:
    """Input slots of one task in one arena.

    The first ``dealt_bytes`` of it are the activations of the slots that are timed, and nothing else.
    """

    def __init__(
        self,
        task: Task,
        specs: Sequence[TensorSpec],
        counts: tuple[int, int],
        device: torch.device,
        scratch: Path,
        *,
        ipc: bool,
    ) -> None:
        self.task = task
        self.count, self.timed = count, _ = counts
        static = [p.role != "activation" for p in task.inputs]
        static_bytes = sum(s.extent for s, is_static in zip(specs, static, strict=True) if is_static)
        repeat = device.type == "cuda" and count > 1 and static_bytes < 3 * l2_bytes(device)
        self.slots: list[list[TensorSpec]] = [list(specs) for _ in range(count + 2)]
        own = [index for index in range(count + 2) if index == 0 or (repeat and index < count)]
        cursor = self.dealt_bytes = 0
        for index, slot in enumerate(self.slots):
            shift, pad = (INPUT_ALIGNMENT if index == count else 0), (8 if index == count + 1 else 0)
            for i in [i for i, is_static in enumerate(static) if not is_static]:
                (slot[i],), cursor = pack_specs([specs[i].padded(pad)], cursor, shift)
            if index < self.timed:
                self.dealt_bytes = cursor
        for index, slot in enumerate(self.slots):
            for i in [i for i, is_static in enumerate(static) if is_static]:
                slot[i] = self.slots[0][i]
                if index in own:
                    (slot[i],), cursor = pack_specs([specs[i]], cursor)
        self._static_slots = own
        self.arena = Arena(device, cursor, scratch, ipc=ipc)
        self._static = static

    @property
    def views(self) -> dict[str, int]:
        """Name -> slot of the same values in another memory layout."""
        names = {"as an offset view": self.count}
        if self.slots[self.count + 1] != [
            s.at(p.offset) for s, p in zip(self.slots[0], self.slots[self.count + 1], strict=True)
        ]:
            names["with padded rows"] = self.count + 1
        return names

    def write(self, slot: int, inputs: Sequence[Tensor]) -> None:
        """Put activations into ``slot``; static inputs are left as they are."""
        for spec, value, is_static in zip(self.slots[slot], inputs, self._static, strict=True):
            if not is_static:
                fill(self.arena.view(spec), value)

    def write_statics(self, inputs: Sequence[Tensor]) -> None:
        """Change the static inputs in place, in every slot that has its own."""
        for slot in self._static_slots:
            for spec, value, is_static in zip(self.slots[slot], inputs, self._static, strict=True):
                if is_static:
                    fill(self.arena.view(spec), value)

    def changed_input(self, slot: int, inputs: Sequence[Tensor]) -> str:
        """Name of an input in ``slot`` that no longer holds what was written, or ``""``."""
        for port, spec, value in zip(self.task.inputs, self.slots[slot], inputs, strict=True):
            if not torch.equal(*self._both(spec, value)):
                return port.name
        return ""

    def dealt(self) -> Tensor:
        """The activations of all slots that are timed, as one row of bytes."""
        return self.arena.bytes()[: self.dealt_bytes].view(torch.int64)

    def _both(self, spec: TensorSpec, value: Tensor) -> tuple[Tensor, Tensor]:
        return raw(self.arena.view(spec)).to(value.device), raw(value)

    def close(self) -> None:
        self.arena.close()


class OutputBuffers:
    """One output area per input slot, for one worker at a time."""

    def __init__(
        self, specs: Sequence[TensorSpec], slots: int, device: torch.device, scratch: Path, *, ipc: bool
    ) -> None:
        dense = [s.contiguous() for s in specs]
        first, self.area = pack_specs(dense)
        self.area = max(self.area, 256)
        self.specs = list(specs)
        self.slots = [[s.at(s.offset + i * self.area) for s in first] for i in range(slots)]
        self.arena = Arena(device, self.area * slots, scratch, ipc=ipc)

    def outputs(
        self, slot: int, records: Sequence[OutputRecord] = (), rows: Tensor | None = None
    ) -> list[Tensor]:
        """What the worker put there, lying as its ``records`` of that slot say; on the task's device.

        ``rows``: a copy of `rows` to read from.  Views where the arena is on that device: clone them before
        the next run.  Raises WorkerFault("rejected") for a record that leads out of the area.
        """
        storage = self.arena.storage if rows is None else rows.untyped_storage()
        specs = [
            self._place(slot, i, records[i] if i < len(records) else None) for i in range(len(self.specs))
        ]
        return [s.view(storage).to(self.arena.device) for s in specs]

    def _place(self, slot: int, output: int, record: OutputRecord | None) -> TensorSpec:
        return whereabouts(self.slots[slot][output], record, slot * self.area, self.area)

    def straight(self, rows: Tensor, records: Mapping[int, Sequence[OutputRecord]], count: int) -> Tensor:
        """``rows``, a copy of `rows`, with the outputs of the first slots where they lie if contiguous.

        A copy, unless that is so already.
        """
        lying = {
            tuple((r.place, r.stride) if r.flags & Flag.AS_IT_LIES else None for r in records[slot])
            for slot in range(count)
        }
        if all(places.count(None) == len(places) for places in lying):
            return rows
        made = rows.clone()
        slots = [slice(0, count)] if len(lying) == 1 else [slice(i, i + 1) for i in range(count)]
        for some in slots:
            for output, spec in enumerate(self.slots[0]):
                lies = self._place(0, output, records[some.start][output])
                _all_of(made[some], spec).copy_(_all_of(rows[some], lies))
        return made

    def rows(self) -> Tensor:
        """The arena as (slots, bytes per area)."""
        return self.arena.bytes()[: self.area * len(self.slots)].view(len(self.slots), self.area)

    def poison(self, pattern: int = PATTERNS[0]) -> None:
        self.arena.bytes().fill_(pattern)
        self.arena.sync()

    def attach(self, worker: Worker, inputs: InputBuffers) -> None:
        worker.attach((inputs.arena, inputs.slots), (self.arena, self.slots))

    def close(self) -> None:
        self.arena.close()


def whereabouts(spec: TensorSpec, record: OutputRecord | None, start: int, size: int) -> TensorSpec:
    """Where an output of shape and dtype ``spec`` lies: there, or as the worker's ``record`` of it says.

    Its area has ``size`` bytes from ``start`` on.  Raises WorkerFault("rejected") for what lies outside.
    """
    if record is None or not record.flags & Flag.AS_IT_LIES:
        return spec
    lies = TensorSpec(spec.dtype, spec.shape, record.stride, start + record.place)
    outside = (
        record.place < 0
        or record.place % spec.dtype.itemsize
        or len(record.stride) != len(spec.shape)
        or min(record.stride, default=0) < 0
        or record.place + lies.extent > size
    )
    if outside:
        raise WorkerFault("rejected", "an output that lies outside of the memory set aside for outputs")
    return lies


def _all_of(rows: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor that lies at ``spec`` in each of the rows (slots, bytes), as one tensor."""
    words = rows.view(spec.dtype)
    offset = words.storage_offset() + spec.offset // spec.dtype.itemsize
    return words.as_strided((len(rows), *spec.shape), (words.stride(0), *spec.stride), offset)


def uncopied(records: Sequence[OutputRecord]) -> bool:
    """Whether some output could not be copied to the arena (its form was wrong)."""
    return any(not r.flags & Flag.COPIED for r in records)
