"""Outputs on their way into the arena: contiguous ones to their places, others as they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autokernel.judge.buffers import OutputBuffers
from autokernel.judge.hand_over import plan
from autokernel.judge.handle import WorkerFault
from autokernel.judge.layout import CODE_OF, TensorSpec
from autokernel.judge.protocol import Flag, OutputRecord

CPU = torch.device("cpu")
SLOTS = 3


def slices() -> list[Tensor]:
    return list(torch.randn(33, 96).split([64, 24, 8], -1))


def half_in_another() -> list[Tensor]:
    a, b = torch.randn(16, 48, dtype=torch.float16).split([32, 16], -1)
    return [a, torch.randn(7, 5).t(), b]


LYING: dict[str, Callable[[], list[Tensor]]] = {
    "slices of one result": slices,
    "transposed": lambda: [torch.randn(17, 31).t()],
    "channels last": lambda: [torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)],
    "two memories, two dtypes": half_in_another,
    "a part from the middle on": lambda: [torch.randn(40, 40)[3:].t(), torch.zeros(0, 4).t()],
    "bytes": lambda: [torch.rand(9, 11).lt(0.5).t()],
    "complex": lambda: list(torch.randn(6, 10, dtype=torch.complex64).split([5, 5], -1)),
}


def handed_over(buffers: OutputBuffers, results: dict[int, list[Tensor]]) -> dict[int, list[OutputRecord]]:
    """What a worker does with its results, and the records that the judge has of them."""
    buffers.poison()
    areas = [[spec.view(buffers.arena.storage) for spec in slot] for slot in buffers.slots]
    handed, sources, places = plan(results, areas, in_pieces=True)
    assert all(a.is_contiguous() and b.is_contiguous() for a, b in zip(sources, places, strict=True))
    for target, source in zip(places, sources, strict=True):
        target.copy_(source)
    records: dict[int, list[OutputRecord]] = {}
    for slot, tensor, copied, place in handed:
        flags = Flag.COPIED * copied | Flag.AS_IT_LIES * (place is not None)
        records.setdefault(slot, []).append(
            OutputRecord(
                CODE_OF[tensor.dtype], 0, flags, slot, place or 0, tuple(tensor.shape), tensor.stride()
            )
        )
    return records


def buffers_for(tensors: list[Tensor], folder: Path) -> OutputBuffers:
    return OutputBuffers([TensorSpec.of(t.contiguous()) for t in tensors], SLOTS, CPU, folder, ipc=False)


@pytest.mark.parametrize("kind", LYING)
def test_what_does_not_lie_contiguously_is_copied_in_few_pieces_and_read_back(
    kind: str, tmp_path: Path
) -> None:
    results = {slot: LYING[kind]() for slot in range(SLOTS)}
    buffers = buffers_for(results[0], tmp_path)
    records = handed_over(buffers, results)
    rows = buffers.rows().clone()
    straight = buffers.straight(rows, records, SLOTS)
    for slot, tensors in results.items():
        assert all(r.flags & Flag.AS_IT_LIES for r in records[slot])
        for read in (
            buffers.outputs(slot, records[slot]),
            buffers.outputs(slot, records[slot], rows),
            buffers.outputs(slot, rows=straight),
        ):
            assert all(torch.equal(a, b) for a, b in zip(read, tensors, strict=True))


def test_slices_of_one_result_are_one_copy(tmp_path: Path) -> None:
    tensors = slices()
    buffers = buffers_for(tensors, tmp_path)
    areas = [[spec.view(buffers.arena.storage) for spec in buffers.slots[0]]]
    assert len(plan({0: tensors}, areas, in_pieces=True).sources) == 1


@pytest.mark.parametrize("in_pieces", [True, False])
def test_what_reaches_too_far_is_copied_value_by_value(in_pieces: bool, tmp_path: Path) -> None:
    """As all is where pieces are not asked for."""
    results = {
        slot: [torch.randn(20, 64)[:, :16] if in_pieces else torch.randn(16, 20).t(), torch.randn(5)]
        for slot in range(SLOTS)
    }
    assert not any(tensors[0].is_contiguous() for tensors in results.values())
    buffers = buffers_for(results[0], tmp_path)
    buffers.poison()
    areas = [[spec.view(buffers.arena.storage) for spec in slot] for slot in buffers.slots]
    handed, sources, places = plan(results, areas, in_pieces=in_pieces)
    for target, source in zip(places, sources, strict=True):
        target.copy_(source)
    assert all(h.copied and h.place is None for h in handed)
    for slot, tensors in results.items():
        assert all(torch.equal(a, b) for a, b in zip(buffers.outputs(slot), tensors, strict=True))


def test_every_slot_may_lie_in_its_own_way(tmp_path: Path) -> None:
    results = {0: [torch.randn(12, 20).t()], 1: [torch.randn(20, 12)], 2: [torch.randn(13, 20)[1:].t()]}
    buffers = buffers_for(results[1], tmp_path)
    records = handed_over(buffers, results)
    straight = buffers.straight(buffers.rows().clone(), records, SLOTS)
    for slot, tensors in results.items():
        assert torch.equal(buffers.outputs(slot, rows=straight)[0], tensors[0])


@pytest.mark.parametrize(
    ("place", "stride"),
    [(-4, (1, 20)), (2, (1, 20)), (4, (1, 20)), (0, (1, 21)), (0, (-1, 20)), (0, (1,)), (2**62, (1, 20))],
    ids=str,
)
def test_a_claim_that_leads_out_of_the_area_is_refused(
    place: int, stride: tuple[int, ...], tmp_path: Path
) -> None:
    """The area holds 20 x 16 numbers, without a byte to spare."""
    buffers = buffers_for([torch.randn(20, 16)], tmp_path)
    record = OutputRecord(
        CODE_OF[torch.float32], 0, Flag.COPIED | Flag.AS_IT_LIES, 0, place, (20, 16), stride
    )
    for read in (
        lambda: buffers.outputs(0, [record]),
        lambda: buffers.straight(buffers.rows().clone(), {0: [record]}, 1),
    ):
        with pytest.raises(WorkerFault, match="outside of the memory set aside") as fault:
            read()
        assert fault.value.status == "rejected"


def test_what_is_missing_or_has_another_form_is_not_copied(tmp_path: Path) -> None:
    buffers = buffers_for([torch.randn(4, 4)], tmp_path)
    areas = [[spec.view(buffers.arena.storage) for spec in slot] for slot in buffers.slots]
    results = {
        0: [torch.randn(5, 4).t()],
        1: [torch.randn(4, 4), torch.randn(2).expand(2, 2)],
        7: [torch.randn(4, 4)],
    }
    handed, sources, _ = plan(results, areas, in_pieces=True)
    assert [h.copied for h in handed] == [False, True, False, False] and len(sources) == 1
