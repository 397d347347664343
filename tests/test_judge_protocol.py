"""Messages, tensor layouts and shared arenas."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

from autokernel.judge import protocol
from autokernel.judge.arena import Arena, MappedArena
from autokernel.judge.layout import DTYPES, TensorSpec, fill, overlapping, pack_specs, raw
from autokernel.judge.protocol import HEADER, MAGIC, Flag, JudgeEnd, Op, Reply


class Pipes:
    """A judge's end, and the worker's two descriptors."""

    def __init__(self) -> None:
        self.command_r, command_w = os.pipe()
        reply_r, self.reply_w = os.pipe()
        self.end = JudgeEnd(command_w, reply_r)

    def answer(self, make) -> threading.Thread:
        def work() -> None:
            request = protocol.read_request(self.command_r)
            os.write(self.reply_w, make(request))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def pipes():
    p = Pipes()
    yield p
    p.end.close()
    for fd in (p.command_r, p.reply_w):
        os.close(fd)


def test_call_and_answer(pipes) -> None:
    pipes.answer(lambda r: Reply(text=f"{r.args['x']}", doubles=[1.5]).pack(r.op, r.nonce))
    exchange = pipes.end.call(Op.RUN, {"x": 7}, 5.0)
    assert (exchange.reply.text, exchange.reply.doubles) == ("7", [1.5])
    assert 0 < exchange.gated_s < 5


def forged(r, **changes) -> bytes:
    fields = {"magic": MAGIC, "op": int(r.op), "status": 0, "nonce": r.nonce, "length": None} | changes
    body = changes.get("body", Reply().pack(r.op, r.nonce)[HEADER.size :])
    length = len(body) if fields["length"] is None else fields["length"]
    return HEADER.pack(fields["magic"], fields["op"], fields["status"], length, fields["nonce"]) + body


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": bytes(16)},
        {"magic": b"\x80\x04}."},
        {"op": int(Op.LOAD)},
        {"status": 99},
        {"length": 2**60},
        {"body": struct.pack("<III", 5, 0, 0)},
        {"body": struct.pack("<III", 0, 2**31, 0) + bytes(16)},
        {"body": struct.pack("<III", 0, 0, 1) + b"\xff" * protocol.RECORD.size},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_forged_reply_is_refused(pipes, changes) -> None:
    pipes.answer(lambda r: forged(r, **changes))
    with pytest.raises(protocol.ProtocolError):
        pipes.end.call(Op.RUN, {}, 5.0)


def test_deadline_and_closed_end(pipes) -> None:
    start = time.monotonic()
    with pytest.raises(protocol.DeadlineExpired):
        pipes.end.call(Op.RUN, {}, 0.05)
    assert time.monotonic() - start < 1
    os.close(pipes.reply_w)
    with pytest.raises(protocol.ChannelClosed):
        pipes.end.call(Op.RUN, {}, 1.0)
    pipes.reply_w = os.open(os.devnull, os.O_WRONLY)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_crosses_an_arena(tmp_path: Path, dtype) -> None:
    arena = Arena(torch.device("cpu"), 4096, tmp_path)
    spec = TensorSpec(dtype, (3, 4), (1, 5), 256)
    mapped = MappedArena(arena.export(), torch.device("cpu"))
    pattern = torch.arange(spec.extent, dtype=torch.uint8) % 2  # 0/1 bytes are valid booleans, too
    arena.bytes()[256 : 256 + spec.extent] = pattern
    assert torch.equal(raw(mapped.view(spec)), raw(arena.view(spec)))
    assert mapped.view(spec).stride() == (1, 5)
    arena.close()


def test_writes_are_seen_by_both_sides(tmp_path: Path) -> None:
    arena = Arena(torch.device("cpu"), 4096, tmp_path)
    spec = TensorSpec.of(torch.empty(5, 7, dtype=torch.complex64))
    mapped = MappedArena(arena.export(), torch.device("cpu"))
    value = torch.randn(5, 7, dtype=torch.complex64)
    mapped.view(spec).copy_(value)
    assert torch.equal(arena.view(spec), value)
    arena.close()


def test_broadcast_and_zero_dim_specs() -> None:
    storage = torch.UntypedStorage(64)
    wide = TensorSpec(torch.float32, (4, 3), (0, 1))
    fill(wide.view(storage), torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))
    assert wide.extent == 12 and wide.view(storage).tolist() == [[1.0, 2.0, 3.0]] * 4
    scalar = TensorSpec(torch.int64, (), (), 16)
    fill(scalar.view(storage), torch.tensor(9))
    assert scalar.view(storage).item() == 9


def test_packed_specs_do_not_overlap_and_are_aligned() -> None:
    specs = [TensorSpec.of(torch.empty(n, dtype=torch.float16)) for n in (1, 1000, 3)]
    placed, end = pack_specs(specs, start=10, shift=2)
    spans = [(s.offset, s.offset + s.extent) for s in placed]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] <= end
    assert all((s.offset - 2) % 256 == 0 for s in placed)


def test_flags_are_bits() -> None:
    assert Flag.COPIED | Flag.ALIASES_INPUT == 3


def test_which_tensors_share_a_byte() -> None:
    base = torch.zeros(4, 6)
    columns, rows = base.split(3, dim=1), base.split(2, dim=0)
    assert overlapping(list(columns)) == [False, False]  # they interleave
    assert overlapping(list(rows)) == [False, False]
    assert overlapping([base, rows[1], torch.zeros(2)]) == [False, True, False]
    assert overlapping([columns[0], rows[0]]) == [False, True]
    assert overlapping([base[:, ::2], base[:, 1::2], base[:, 1:2]]) == [False, False, True]
    assert overlapping([base[:, :0], base]) == [False, False]
    assert overlapping([base, base.view(torch.int32)]) == [False, True]


def test_raw_words_are_the_bytes() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    for tensor in (x, x[:3], x[1:3], x[::2], x.to(torch.bfloat16)[1:], x[:0]):
        words = raw(tensor)
        assert not words.dtype.is_floating_point
        assert words.view(torch.uint8).tolist() == tensor.contiguous().clone().view(torch.uint8).tolist()
