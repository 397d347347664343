"""The judge's handle on one worker process: calls have deadlines, failures a status and a reason."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from autokernel.judge.arena import Arena
from autokernel.judge.clock import Sample
from autokernel.judge.launch import Kind, Launcher, LaunchError, cache_folders, trusted_cache
from autokernel.judge.layout import TensorSpec
from autokernel.judge.protocol import (
    ChannelClosed,
    DeadlineExpired,
    Exchange,
    Op,
    OutputRecord,
    ProtocolError,
    Reply,
    ReplyStatus,
)
from autokernel.records import Status
from autokernel.torch_flags import BY_DEFAULT, Tf32

STATUS_OF: dict[ReplyStatus, Status] = {
    ReplyStatus.LOAD_ERROR: "compile_error",
    ReplyStatus.COMPILE_ERROR: "compile_error",
    ReplyStatus.RUN_ERROR: "crash",
    ReplyStatus.STRUCTURE: "incorrect",
    ReplyStatus.STATE: "rejected",
    ReplyStatus.WORKER_ERROR: "infra_error",
}
DOING = {
    Op.SETUP: "starting", Op.LOAD: "loading", Op.ATTACH: "mapping its buffers", Op.RUN: "running",
    Op.REPACK: "packing its weights again", Op.PREPARE: "warming up", Op.TIME: "being timed",
    Op.COLLECT: "handing over its outputs", Op.TRACE: "being profiled",
    Op.STEPS: "being timed call by call",
}  # fmt: skip

PRINTED = 16 << 20
"""Bytes that a kernel's process may write to its output, all told."""

SLOW = {Op.LOAD, Op.RUN, Op.PREPARE}


def stuck_at(log: str) -> str:
    """`` (in FUNCTION, FILE:LINE)`` for the worker's main thread when its time was nearly up, as it said; or
    ``""``."""
    threads = log.rpartition("Timeout (")[2].split("(most recent call first):")
    frame = re.search(r'File "([^"\n]*)", line (\d+) in (\S+)', threads[-1]) if len(threads) > 1 else None
    return f" (in {frame[3][:80]}, {PurePath(frame[1]).name[:80]}:{frame[2]})" if frame else ""


class WorkerFault(Exception):
    """A worker failed. Caught where a verdict is made; ``status`` and ``reason`` go into it."""

    def __init__(self, status: Status, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason, self.log = reason, log


@dataclass(slots=True)
class Ran:
    """What one RUN reported: the outputs of each slot; bytes of device memory that the call took at its peak,
    and that the process holds altogether after it."""

    outputs: dict[int, list[OutputRecord]]
    peak_bytes: float
    held_bytes: float = 0.0


@dataclass(slots=True)
class Prepared:
    """A timer that stands ready in the worker. ``note`` says why there is no CUDA graph, if there is none."""

    calls: int
    estimate_s: float
    graph: bool
    note: str


class Worker:
    """One worker process. Ended by ``close``; after a WorkerFault from a call it is already dead."""

    def __init__(self, launcher: Launcher, *, kind: Kind, tf32: Tf32 = BY_DEFAULT) -> None:
        self.launcher, self.deadlines = launcher, launcher.deadlines
        try:
            self._start(kind, tf32)
        except WorkerFault:  # one that was kept warm may have died since; no candidate is in it yet
            try:
                self._start(kind, tf32)
            except WorkerFault as fault:
                raise LaunchError(f"a worker did not start: {fault.reason}") from fault

    def _start(self, kind: Kind, tf32: Tf32) -> None:
        self.process = self.launcher.take(kind)
        self.closed, self._rests = False, False
        self.process.log.limit = PRINTED if kind == "kernel" else None
        scratch, trusted = self.process.scratch, kind in ("trusted", "baseline")
        args = {
            "scratch": str(scratch),
            "env": cache_folders(scratch, trusted=trusted),
            "seed": str(trusted_cache() / "triton"),
            "trusted": trusted,
            # As opposed to a user's model, which may be given by a relative path, and read others.
            "region": kind in ("kernel", "baseline"),
            "tf32": asdict(tf32),
        }
        try:
            self.call(Op.SETUP, args, self.deadlines.own_s)
        except WorkerFault:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return not self.closed and self.process.exit_text(0.0) == "still running"

    def call(
        self,
        op: Op,
        args: dict[str, Any],
        deadline_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> Exchange:
        if self.closed:
            raise WorkerFault("infra_error", "the worker has been closed")
        if self._rests:
            self.process.send_signal(signal.SIGCONT)
            self._rests = False
        if op in SLOW:  # what it is at then is in its log, should it not answer in time
            args = args | {"patience_s": max(0.9 * deadline_s, deadline_s - 1.0)}
        try:
            exchange = self.process.end.call(op, args, deadline_s, meanwhile)
        except DeadlineExpired:
            log = self._bury()
            reason = f"no answer within {deadline_s:.0f} s while {DOING[op]}{stuck_at(log)}"
            raise WorkerFault("timeout", reason, log) from None
        except ChannelClosed:
            how = self.process.exit_text()
            log = self._bury()
            raise WorkerFault("crash", f"the process ended ({how}) while {DOING[op]}", log) from None
        except ProtocolError as error:
            log = self._bury()
            raise WorkerFault("rejected", f"tampered with the judge's channel: {error}", log) from None
        if exchange.reply.status is not ReplyStatus.OK:
            raise self._fault(op, exchange.reply)
        return exchange

    def _fault(self, op: Op, reply: Reply) -> WorkerFault:
        status = STATUS_OF[reply.status]
        prefix = {
            ReplyStatus.STATE: "changes global state: ",
            ReplyStatus.WORKER_ERROR: f"worker error while {DOING[op]}: ",
        }.get(reply.status, "")
        if self.process.log.overrun:
            prefix = f"prints more than {PRINTED >> 20} MB: "
        return WorkerFault(status, prefix + reply.text, self.process.log.text(0.05))

    def _bury(self) -> str:
        log = self.process.log
        self.close()
        return log.text(0.5)

    def load(self, subject: int, spec: dict[str, Any], deadline_s: float | None = None) -> None:
        self.call(Op.LOAD, {"subject": subject, "spec": spec}, deadline_s or self.deadlines.compile_s)

    def attach(
        self,
        inputs: tuple[Arena, Sequence[Sequence[TensorSpec]]] | None = None,
        outputs: tuple[Arena, Sequence[Sequence[TensorSpec]]] | None = None,
    ) -> None:
        args: dict[str, Any] = {}
        for key, given in (("inputs", inputs), ("outputs", outputs)):
            if given is not None:
                arena, slots = given
                args[key] = {
                    "arena": arena.export(self.process.shared),
                    "slots": [[s.to_json() for s in slot] for slot in slots],
                }
        self.call(Op.ATTACH, args, self.deadlines.own_s)

    def run(
        self,
        subject: int,
        slots: Sequence[int],
        *,
        pattern: int | None = None,
        first: bool = False,
        deadline_s: float | None = None,
    ) -> Ran:
        """Call the subject on each slot. A ``first`` call may compile, and has the deadline of a load."""
        deadline_s = deadline_s or (self.deadlines.compile_s if first else self.deadlines.run_s)
        args = {"subject": subject, "slots": list(slots), "pattern": pattern}
        reply = self.call(Op.RUN, args, deadline_s).reply
        peak, held = (*reply.doubles, 0.0, 0.0)[:2]
        return Ran(_by_slot(reply), peak, held)

    def repack(self, subject: int) -> None:
        self.call(Op.REPACK, {"subject": subject}, self.deadlines.run_s)

    def prepare(
        self,
        subject: int,
        slots: Sequence[int],
        *,
        graph: bool,
        min_sample_s: float | None = None,
        once: bool = False,
        each: bool = False,
    ) -> Prepared:
        """Warm the subject up and size its samples; ``once``: see `clock.make_timer`.

        ``each``: for `steps`, beside what else has been prepared.
        """
        args = {
            "subject": subject, "slots": list(slots), "graph": graph, "min_sample_s": min_sample_s,
            "once": once, "each": each,
        }  # fmt: skip
        reply = self.call(Op.PREPARE, args, self.deadlines.compile_s).reply
        calls, estimate_s, has_graph = self._doubles(reply, 3)
        return Prepared(int(calls), estimate_s, bool(has_graph), reply.text)

    def time(
        self,
        subject: int,
        start: int,
        *,
        collect: bool = False,
    ) -> Sample:
        """A sample. With ``collect`` its outputs are handed over in the same exchange: work that is put off
        until then is seen by the judge's clock."""
        args = {"subject": subject, "start": start, "collect": collect}
        exchange = self.call(Op.TIME, args, self.deadlines.run_s)
        seconds, calls = self._doubles(exchange.reply, 2)
        return Sample(seconds, exchange.gated_s, max(1, int(calls)))

    def steps(
        self, subject: int, slots: Sequence[int], before: Callable[[int], None], after: Callable[[int], None]
    ) -> list[Sample]:
        """One call per slot, each when the judge says so: after ``before(slot)``, which may write its inputs,
        and not before ``after`` of the last one, which may take its outputs.  Needs `prepare`'s ``each``."""
        deadline_s, gated_s = self.deadlines.run_s, list[float]()

        def one_by_one() -> None:
            for slot in slots:
                before(slot)
                gated_s.append(self.process.end.step(deadline_s))
                after(slot)

        args = {"subject": subject, "slots": list(slots)}
        exchange = self.call(Op.STEPS, args, deadline_s, one_by_one)
        claimed = self._doubles(exchange.reply, len(slots))
        if len(gated_s) != len(slots):  # it gave up, and yet replied as if it had not
            log = self._bury()
            raise WorkerFault(
                "rejected", "tampered with the judge's channel: steps that were never made", log
            )
        return [Sample(c, g, 1) for c, g in zip(claimed, gated_s, strict=True)]

    def rest(self) -> None:
        """Stop all its processes until the next call, so that none runs beside what others are timed at."""
        self.process.send_signal(signal.SIGSTOP)
        self._rests = True

    def collect(self, subject: int) -> dict[int, list[OutputRecord]]:
        """How the outputs of the latest sample look; handed over now unless they have been."""
        return _by_slot(self.call(Op.COLLECT, {"subject": subject}, self.deadlines.run_s).reply)

    def trace(self, subject: int, slot: int) -> str:
        """What a call on ``slot`` ran, as `autokernel.judge.trace.record` tells it; a claim."""
        args = {"subject": subject, "slot": slot}
        return self.call(Op.TRACE, args, self.deadlines.run_s).reply.text

    def resources(self, subject: int) -> str:
        """What its Triton kernels take, as `autokernel.judge.resources.collect` tells it; a claim."""
        return self.call(Op.RESOURCES, {"subject": subject}, self.deadlines.own_s).reply.text

    def _doubles(self, reply: Reply, count: int) -> list[float]:
        if len(reply.doubles) != count or any(x != x for x in reply.doubles):
            log = self._bury()
            raise WorkerFault("rejected", "tampered with the judge's channel: wrong numbers in a reply", log)
        return reply.doubles

    def close(self) -> None:
        """Kill the process group, delete its folders."""
        if self.closed:
            return
        self.closed = True
        self.process.kill()


def _by_slot(reply: Reply) -> dict[int, list[OutputRecord]]:
    outputs: dict[int, list[OutputRecord]] = {}
    for record in reply.tensors:
        outputs.setdefault(record.position, []).append(record)
    return outputs
