"""Messages between the judge and a worker: fixed layout, one nonce per call, nothing unpickled.

    header   magic 4s | op u16 | status u16 | body length u64 | nonce 16s         (32 bytes, little-endian)
    request  body is a UTF-8 JSON object (from the judge only, which the worker trusts)
    reply    text length u32 | doubles u32 | tensors u32 | text | f64 ... | tensor records

A tensor record is 144 bytes: dtype u8, ndim u8, device u8, flags u8, position u32, place i64,
shape 8×i64, stride 8×i64.  The judge bounds every length before it reads, and refuses a reply that is
not exactly this or does not carry the nonce of the request it answers.

What this does not do: code in the worker's address space can read the nonce and forge a well-formed
reply.  It gains nothing from that beyond a claim; the outputs are compared in judge-held memory, and the
time is checked against the judge's own clock.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autokernel.judge.layout import DTYPES, MAX_NDIM

MAGIC = b"AKJ1"
HEADER = struct.Struct("<4sHHQ16s")
COUNTS = struct.Struct("<III")
RECORD = struct.Struct("<BBBBIq8q8q")
MAX_TEXT = 16_384
MAX_TENSORS = 65_536
MAX_DOUBLES = 65_536
MAX_REQUEST = 1 << 26


class Op(enum.IntEnum):
    HELLO = 1
    SETUP = 2  # scratch folder, cache folders, trusted or not
    LOAD = 3
    ATTACH = 4
    RUN = 5
    REPACK = 6
    PREPARE = 7
    TIME = 8
    COLLECT = 9
    TRACE = 10
    STEPS = 11  # one call at a time: every one waits for a byte, and answers with one
    RESOURCES = 12


DONE, GIVEN_UP = b"\x01", b"\x00"
"""What a worker answers a step with; after the second one its reply says why."""


class ReplyStatus(enum.IntEnum):
    OK = 0
    LOAD_ERROR = 1  # the source does not import, or its prepack raises
    COMPILE_ERROR = 2  # a compiler refused the source when it was first called
    RUN_ERROR = 3  # the candidate raised while running
    STRUCTURE = 4  # what it returned is not a tensor or a flat sequence of them
    STATE = 5  # it changed torch's global state
    WORKER_ERROR = 6  # our own fault


class Flag(enum.IntFlag):
    ALIASES_INPUT = 1
    COPIED = 2  # the contents were copied to the output arena
    OVERLAPS = 4  # shares bytes with an earlier output of the same call
    HELD = 8  # its memory is still in use after everything that was returned has been let go
    AS_IT_LIES = 16  # the contents are in its own strides, ``place`` bytes after the start of the slot's area


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """How one output of one call looked, as the worker reports it; ``place``: see `Flag.AS_IT_LIES`."""

    dtype: int
    device: int
    flags: int
    position: int
    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def pack(self) -> bytes:
        pad = (0,) * (MAX_NDIM - len(self.shape))
        return RECORD.pack(
            self.dtype, len(self.shape), self.device, self.flags, self.position, self.place,
            *self.shape, *pad, *self.stride, *pad,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: memoryview) -> OutputRecord:
        dtype, ndim, device, flags, position, place, *dims = RECORD.unpack(data)
        if ndim > MAX_NDIM or dtype >= len(DTYPES):
            raise ProtocolError("a tensor record is out of range")
        return cls(
            dtype,
            device,
            flags,
            position,
            place,
            tuple(dims[:ndim]),
            tuple(dims[MAX_NDIM : MAX_NDIM + ndim]),
        )


@dataclass(slots=True)
class Reply:
    status: ReplyStatus = ReplyStatus.OK
    text: str = ""
    doubles: list[float] = field(default_factory=list)
    tensors: list[OutputRecord] = field(default_factory=list)

    def pack(self, op: Op, nonce: bytes) -> bytes:
        text = self.text.encode("utf-8", "replace")[:MAX_TEXT]
        body = b"".join(
            (
                COUNTS.pack(len(text), len(self.doubles), len(self.tensors)),
                text,
                struct.pack(f"<{len(self.doubles)}d", *self.doubles),
                *(t.pack() for t in self.tensors),
            )
        )
        return HEADER.pack(MAGIC, op, self.status, len(body), nonce) + body

    @classmethod
    def unpack(cls, status: int, body: bytes) -> Reply:
        n_text, n_doubles, n_tensors = COUNTS.unpack_from(body)
        expected = COUNTS.size + n_text + 8 * n_doubles + RECORD.size * n_tensors
        if expected != len(body):
            raise ProtocolError("a reply's length does not match its contents")
        cursor = COUNTS.size
        text = body[cursor : cursor + n_text].decode("utf-8", "replace")
        cursor += n_text
        doubles = list(struct.unpack_from(f"<{n_doubles}d", body, cursor))
        cursor += 8 * n_doubles
        view = memoryview(body)[cursor:]
        tensors = [OutputRecord.unpack(view[i : i + RECORD.size]) for i in range(0, len(view), RECORD.size)]
        return cls(ReplyStatus(status), text, doubles, tensors)


class ProtocolError(Exception):
    """Bytes that are no message of ours."""


class ChannelClosed(Exception):
    """The other end is gone."""


class StepsEnded(Exception):
    """The worker has raised in a step: its reply says what."""


class DeadlineExpired(Exception):
    """No reply within the deadline."""


MAX_REPLY = COUNTS.size + MAX_TEXT + 8 * MAX_DOUBLES + RECORD.size * MAX_TENSORS


def read_exactly(fd: int, count: int, deadline: float | None = None) -> bytes:
    """``count`` bytes from ``fd``. ``deadline`` is in ``time.monotonic()`` seconds."""
    chunks: list[bytes] = []
    while count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not _readable(fd, left):
                raise DeadlineExpired
        chunk = os.read(fd, min(count, 1 << 20))
        if not chunk:
            raise ChannelClosed
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def await_byte(fd: int) -> None:
    """Read one byte, awake until it comes: a core that has slept is slow for a while."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    while not poll.poll(0):
        pass
    read_exactly(fd, 1)


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(1, int(seconds * 1000))))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError as error:
        raise ChannelClosed from error


@dataclass(slots=True)
class Exchange:
    """A reply, and how long the judge waited for it on its own clock."""

    reply: Reply
    gated_s: float


class JudgeEnd:
    """The judge's end of one worker's two pipes."""

    def __init__(self, command_fd: int, reply_fd: int) -> None:
        self.command_fd, self.reply_fd = command_fd, reply_fd

    def wait_closed(self, seconds: float) -> None:
        """Until no process holds the worker's end any more, or so many seconds have passed."""
        poll = select.poll()
        poll.register(self.reply_fd, 0)
        poll.poll(int(seconds * 1000))

    def call(
        self,
        op: Op,
        args: dict[str, Any],
        deadline_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> Exchange:
        """Send one request, wait for its reply.  ``meanwhile()`` runs between the two: see `step`.

        Raises DeadlineExpired, ChannelClosed (the worker is gone) or ProtocolError (not our bytes).
        """
        nonce = os.urandom(16)
        body = json.dumps(args).encode()
        message = HEADER.pack(MAGIC, op, 0, len(body), nonce) + body
        start = time.perf_counter()
        deadline = time.monotonic() + deadline_s
        write_all(self.command_fd, message)
        if meanwhile is not None:
            with contextlib.suppress(StepsEnded):
                meanwhile()
        return self._receive(op, nonce, start, deadline)

    def step(self, deadline_s: float) -> float:
        """Let the worker make its next call; seconds until it is done, by the judge's clock.

        Raises StepsEnded when the worker has given up, and what `call` raises.
        """
        start = time.perf_counter()
        write_all(self.command_fd, DONE)
        answer = read_exactly(self.reply_fd, 1, time.monotonic() + deadline_s)
        took_s = time.perf_counter() - start
        if answer == GIVEN_UP:
            raise StepsEnded
        if answer != DONE:
            raise ProtocolError("neither a step nor the end of them")
        return took_s

    def expect_hello(self, deadline_s: float) -> Reply:
        """The message that a worker sends unasked once it is warm (its nonce is zero)."""
        deadline = time.monotonic() + deadline_s
        return self._receive(Op.HELLO, bytes(16), time.perf_counter(), deadline).reply

    def _receive(self, op: Op, nonce: bytes, start: float, deadline: float) -> Exchange:
        header = read_exactly(self.reply_fd, HEADER.size, deadline)
        gated_s = time.perf_counter() - start
        magic, got_op, status, length, got_nonce = HEADER.unpack(header)
        if magic != MAGIC or got_op != op or got_nonce != nonce:
            raise ProtocolError("a reply that answers no request")
        if not COUNTS.size <= length <= MAX_REPLY or status not in set(ReplyStatus):
            raise ProtocolError("a reply's header is out of range")
        return Exchange(Reply.unpack(status, read_exactly(self.reply_fd, length, deadline)), gated_s)

    def close(self) -> None:
        for fd in (self.command_fd, self.reply_fd):
            os.close(fd)


@dataclass(slots=True)
class Request:
    op: Op
    nonce: bytes
    args: dict[str, Any]


def read_request(fd: int) -> Request:
    """The worker's side: block until the judge asks for something. ChannelClosed when it is done with us."""
    magic, op, _, length, nonce = HEADER.unpack(read_exactly(fd, HEADER.size))
    if magic != MAGIC or length > MAX_REQUEST:
        raise ProtocolError("not a request")
    return Request(Op(op), nonce, json.loads(read_exactly(fd, length)))


def flatten_records(per_slot: Sequence[Sequence[OutputRecord]]) -> list[OutputRecord]:
    return [record for records in per_slot for record in records]
