"""Properties of messages and layouts, over generated values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from autokernel.judge.layout import DTYPES, TensorSpec, stride_order
from autokernel.judge.protocol import HEADER, Op, OutputRecord, Reply, ReplyStatus

record = st.builds(
    lambda dtype, device, flags, position, place, dims: OutputRecord(
        dtype, device, flags, position, place, tuple(a for a, _ in dims), tuple(b for _, b in dims)
    ),
    st.integers(0, len(DTYPES) - 1), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2**32 - 1),
    st.integers(0, 2**62), st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=8),
)  # fmt: skip


@given(st.text(max_size=50), st.lists(st.floats(allow_nan=False), max_size=5), st.lists(record, max_size=5))
def test_a_reply_survives_the_wire(text, doubles, tensors) -> None:
    message = Reply(ReplyStatus.RUN_ERROR, text, doubles, tensors).pack(Op.RUN, b"n" * 16)
    _, _, status, length, _ = HEADER.unpack(message[: HEADER.size])
    assert length == len(message) - HEADER.size
    assert Reply.unpack(status, message[HEADER.size :]) == Reply(
        ReplyStatus.RUN_ERROR, text, doubles, tensors
    )


@given(st.permutations([0, 1, 2]), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(1, 9))
def test_padding_keeps_the_stride_order(order, shape, pad) -> None:
    spec = TensorSpec.of(torch.empty([shape[i] for i in order]).permute(*order))
    padded = spec.padded(pad)
    assert stride_order(padded.shape, padded.stride) == stride_order(spec.shape, spec.stride)
    storage = torch.UntypedStorage(max(padded.extent, 1))
    value = torch.randn(padded.shape)
    padded.view(storage).copy_(value)
    assert torch.equal(padded.view(storage), value)  # no two elements share memory
