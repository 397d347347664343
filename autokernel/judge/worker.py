"""The worker: a process that loads subjects, and runs and times them when the judge says so.

`serve` is the whole of it: read a request, act, reply.  It catches everything that a subject raises,
and reports it as a status and a text; it believes nothing to be secret or safe, because a candidate
shares its address space.  Normally forked by `autokernel.judge.zygote`; ``python -m
autokernel.judge.worker COMMAND_FD REPLY_FD DEVICE THREADS`` starts one directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autokernel.judge import compilers, hand_over, subjects
from autokernel.judge.arena import MappedArena
from autokernel.judge.clock import Timer, flush_held, make_timer
from autokernel.judge.hand_over import Handed
from autokernel.judge.layout import CODE_OF, MAX_NDIM, TensorSpec, overlapping
from autokernel.judge.observe import (
    classify,
    describe,
    global_state,
    poison_free_memory,
    settle_heap,
)
from autokernel.judge.protocol import (
    DONE,
    GIVEN_UP,
    ChannelClosed,
    Flag,
    Op,
    OutputRecord,
    Reply,
    ReplyStatus,
    Request,
    await_byte,
    read_request,
    write_all,
)
from autokernel.torch_flags import Tf32, set_tf32

DEVICE_CODES = {"cpu": 0, "cuda": 1}
CUDA_ERROR_NOT_INITIALIZED = 3


def cuda_initialized() -> bool:
    """Whether this process has initialised the CUDA driver, in which case no child of it can use CUDA."""
    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    context = ctypes.c_void_p()
    return driver.cuCtxGetCurrent(ctypes.byref(context)) != CUDA_ERROR_NOT_INITIALIZED


def enter(command_fd: int, reply_fd: int, log_fd: int) -> tuple[int, int]:
    """Make a freshly forked process a worker: own session, own output, no descriptor but its pipes."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: don't outlive the zygote
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDONLY)
    own = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (null, log_fd, log_fd, command_fd, reply_fd)]
    for target, fd in enumerate(own):
        os.dup2(fd, target)
    os.closerange(5, max(own) + 1024)
    os.set_inheritable(3, False)
    os.set_inheritable(4, False)
    return 3, 4


def serve(command_fd: int, reply_fd: int, device_name: str, threads: int) -> None:
    """Answer requests until the judge closes the pipe."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    device = torch.device(device_name)
    warnings.filterwarnings("ignore", "Can't initialize NVML")  # of no use here, and in every kernel's log
    hello = Reply()
    try:
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
            x = torch.ones(16, 16, device=device)
            (x @ x).sum().item()  # context, cuBLAS handle and workspace
    except RuntimeError as error:
        hello = Reply(ReplyStatus.WORKER_ERROR, str(error))
    write_all(reply_fd, hello.pack(Op.HELLO, bytes(16)))
    worker = Worker(device, (command_fd, reply_fd))
    while True:
        try:
            request = read_request(command_fd)
        except ChannelClosed:
            return
        write_all(reply_fd, worker.answer(request).pack(request.op, request.nonce))


def _marked(record: OutputRecord, *, overlaps: bool, held: bool) -> OutputRecord:
    flags = Flag(record.flags)
    if overlaps:
        flags |= Flag.OVERLAPS
    if held and not flags & Flag.ALIASES_INPUT:
        flags |= Flag.HELD
    return replace(record, flags=int(flags))


class Copies(NamedTuple):
    """Outputs that lie in the same place after every sample, and the CUDA graph that copies them out."""

    handed: list[Handed]
    graph: torch.cuda.CUDAGraph


class Worker:
    """State of one worker process: its subjects, the arenas it maps, the timers it has prepared."""

    def __init__(self, device: torch.device, channel: tuple[int, int] = (-1, -1)) -> None:
        self.device, self.channel = device, channel
        self.trusted = False
        self.subjects: dict[int, subjects.Subject] = {}
        self.timers: dict[int, tuple[Timer, list[int]]] = {}
        self.handed: dict[int, list[Handed]] = {}  # outputs of a subject's latest sample, once handed over
        self.copies: dict[int, Copies] = {}
        self.single: dict[int, dict[int, Timer]] = {}  # subject -> slot -> a timer of one call on it
        self.single_copies: dict[int, dict[int, Copies]] = {}
        self.arenas: list[MappedArena] = []  # kept for good
        self.inputs: list[list[Tensor]] = []
        self.input_arena: MappedArena | None = None
        self.outputs: list[list[Tensor]] = []
        self.output_arena: MappedArena | None = None
        self.state: dict[str, str] = {}
        self.ballast: list[bytearray] = []

    def answer(self, request: Request) -> Reply:
        handlers: dict[Op, Callable[[dict[str, Any]], Reply]] = {
            Op.SETUP: self.setup, Op.LOAD: self.load, Op.ATTACH: self.attach, Op.RUN: self.run,
            Op.REPACK: self.repack, Op.PREPARE: self.prepare, Op.TIME: self.time, Op.COLLECT: self.collect,
            Op.TRACE: self.trace, Op.STEPS: self.steps, Op.RESOURCES: self.resources,
        }  # fmt: skip
        if patience_s := request.args.get("patience_s"):
            faulthandler.dump_traceback_later(patience_s, file=2)
        try:
            return handlers[request.op](request.args)
        except subjects.StructureError as error:
            return Reply(ReplyStatus.STRUCTURE, str(error))
        except BaseException as error:  # noqa: BLE001 - the worker's edge: whatever it was becomes a value
            return Reply(classify(error, request.op), describe(error))
        finally:
            if patience_s:
                faulthandler.cancel_dump_traceback_later()

    def setup(self, args: dict[str, Any]) -> Reply:
        os.environ.update(args["env"])
        if not args["trusted"]:
            _seed(Path(args["seed"]), Path(args["env"]["TRITON_CACHE_DIR"]))
        compilers.keep_headers(Path(args["env"]["TORCHINDUCTOR_CACHE_DIR"]), trusted=args["trusted"])
        os.environ["TMPDIR"] = args["scratch"]
        tempfile.tempdir = None
        self.ballast = settle_heap(recycle=args["region"]) if self.device.type == "cpu" else []
        self.trusted = args["trusted"]
        if args["region"]:
            os.chdir(args["scratch"])
        set_tf32(Tf32(**args["tf32"]))
        self.state = global_state(self.device)
        return Reply()

    def load(self, args: dict[str, Any]) -> Reply:
        self.subjects[args["subject"]] = subjects.load_subject(args["spec"], self.device)
        return self._unless_state_changed(Reply())

    def attach(self, args: dict[str, Any]) -> Reply:
        if "inputs" in args:
            self.input_arena, self.inputs = self._map(args["inputs"])
        if "outputs" in args:
            self.output_arena, self.outputs = self._map(args["outputs"])
            self.copies.clear()
            self.single_copies.clear()
        return Reply()

    def _map(self, told: dict[str, Any]) -> tuple[MappedArena, list[list[Tensor]]]:
        arena = MappedArena(told["arena"], self.device)
        self.arenas.append(arena)
        slots = [[TensorSpec.from_json(s) for s in slot] for slot in told["slots"]]
        return arena, [[arena.view(spec) for spec in slot] for slot in slots]

    def run(self, args: dict[str, Any]) -> Reply:
        """Call the subject on each slot, keep every result until all calls are done, then copy them out.

        Keeping them catches a kernel that hands out one static buffer again and again.
        """
        subject = self.subjects[args["subject"]]
        if self.input_arena is not None:
            self.input_arena.pull()
        slots, pattern = args["slots"], args.get("pattern")
        targets = [subject.bind(self.inputs[slot]) for slot in slots]
        self._let_go()
        if self.device.type == "cuda" and not subject.strict:
            torch.cuda.empty_cache()  # what compilers tried out and gave back is no part of the model
        before = self._reset_peak()
        results: list[list[Tensor]] = []
        for slot, (fn, values) in zip(slots, targets, strict=True):
            if pattern is not None and slot < len(self.outputs):
                poison_free_memory(self.outputs[slot], pattern)
            results.append(subjects.tensors_of(fn(*values), strict=subject.strict))
            del values
        self._synchronize()
        peak = self._peak() - before
        handed = self._copy_out(dict(zip(slots, results, strict=True)))
        reply = Reply(tensors=self._records(handed), doubles=[float(peak), self._held()])
        if subject.strict:
            marks = [shared for outputs in results for shared in overlapping(outputs)]
            memory = [StorageWeakRef(h.tensor.untyped_storage()) for h in handed]
            del results, handed
            reply.tensors = [
                _marked(record, overlaps=overlaps, held=not storage.expired())
                for record, overlaps, storage in zip(reply.tensors, marks, memory, strict=True)
            ]
        return self._unless_state_changed(reply)

    def _let_go(self) -> None:
        """Hold no result of an earlier call: a subject that never overwrites what is held makes room anew,
        and that room would count as its own.  (What a captured graph returns lies in the graph's memory.)"""
        for number, (timer, _) in self.timers.items():
            if timer.mode != "graph":
                timer.outputs.clear()
                self.handed.pop(number, None)

    def repack(self, args: dict[str, Any]) -> Reply:
        if self.input_arena is not None:
            self.input_arena.pull()
        self._forget_timer(args["subject"])
        self.subjects[args["subject"]].repack()
        return Reply()

    def _forget_timer(self, subject: int) -> None:
        for kept in (self.timers, self.handed, self.copies, self.single, self.single_copies):
            kept.pop(subject, None)

    def prepare(self, args: dict[str, Any]) -> Reply:
        subject, slots = self.subjects[args["subject"]], list(args["slots"])
        if args.get("each"):
            return self._prepare_each(args["subject"], slots, graph=args["graph"])
        self._forget_timer(args["subject"])
        if self.input_arena is not None:
            self.input_arena.pull()
        targets = [subject.bind(self.inputs[slot]) for slot in slots]
        gc.collect()
        gc.freeze()  # nothing made so far is garbage: a collection in a sample would be noise
        timer = make_timer(
            targets,
            self.device,
            min_sample_s=args.get("min_sample_s"),
            graph=args.get("graph", True),
            once=args.get("once", False),
        )
        self.timers[args["subject"]] = timer, slots
        return Reply(
            text=timer.note, doubles=[float(timer.calls), timer.estimate_s, float(timer.mode == "graph")]
        )

    def time(self, args: dict[str, Any]) -> Reply:
        """One sample; with ``collect`` its outputs are in the output arena when this returns.

        That is all that happens before the reply: the judge's clock is running, and what an untrusted
        worker did besides would count against it.  `collect` reports on the outputs afterwards.
        """
        subject = args["subject"]
        timer, _ = self.timers[subject]
        self.handed.pop(subject, None)
        if self.input_arena is not None:
            self.input_arena.pull()
        seconds = timer.sample(args["start"])
        if args.get("collect"):
            self._hand_over(subject)
        return Reply(doubles=[seconds, float(timer.calls)])

    def _prepare_each(self, number: int, slots: list[int], *, graph: bool) -> Reply:
        subject = self.subjects[number]
        made = {
            slot: make_timer(
                [subject.bind(self.inputs[slot])], self.device, min_sample_s=1e-9, graph=graph, once=True
            )
            for slot in slots
        }
        self.single[number], self.single_copies[number] = made, {}
        first = made[slots[0]]
        return Reply(text=first.note, doubles=[1.0, first.estimate_s, float(first.mode == "graph")])

    def steps(self, args: dict[str, Any]) -> Reply:
        """One call on each slot, when the judge says so; its output is in the output arena when we say so."""
        number, (command_fd, reply_fd) = args["subject"], self.channel
        timers = self.single[number]
        seconds, handed = list[float](), list[Handed]()
        self.handed.pop(number, None)
        for slot in args["slots"]:
            await_byte(command_fd)
            try:
                if self.input_arena is not None:
                    self.input_arena.pull()
                seconds.append(timers[slot].sample(0))
                handed += self._hand_over_step(number, slot)
            except BaseException:
                write_all(reply_fd, GIVEN_UP)
                raise
            write_all(reply_fd, DONE)
        self.handed[number] = handed
        return Reply(doubles=seconds)

    def _hand_over_step(self, number: int, slot: int) -> list[Handed]:
        kept, timer = self.single_copies.setdefault(number, {}), self.single[number][slot]
        if slot in kept:
            kept[slot].graph.replay()
            self._finish_copies()
            return kept[slot].handed
        results = {slot: subjects.tensors_of(timer.outputs[0], strict=self.subjects[number].strict)}
        return self._copy_out(results, (kept, slot) if timer.mode == "graph" else None)

    def collect(self, args: dict[str, Any]) -> Reply:
        """Report on the results of the latest sample, and hand them over unless that has been done."""
        if args["subject"] not in self.handed:
            self._hand_over(args["subject"])
        return self._unless_state_changed(Reply(tensors=self._records(self.handed[args["subject"]])))

    def trace(self, args: dict[str, Any]) -> Reply:
        from autokernel.judge.trace import record

        fn, values = self.subjects[args["subject"]].bind(self.inputs[args["slot"]])
        return Reply(text=record(fn, values, self.device))

    def resources(self, args: dict[str, Any]) -> Reply:
        from autokernel.judge.resources import collect

        return Reply(text=collect(self.subjects[args["subject"]].names))

    def _hand_over(self, subject: int) -> None:
        if subject in self.copies:
            self.handed[subject] = self.copies[subject].handed
            self.copies[subject].graph.replay()
            return self._finish_copies()
        timer, slots = self.timers[subject]
        strict = self.subjects[subject].strict
        results = {slots[i]: subjects.tensors_of(r, strict=strict) for i, r in timer.outputs.items()}
        keep = (self.copies, subject) if timer.mode == "graph" else None
        self.handed[subject] = self._copy_out(results, keep)

    def _copy_out(
        self, results: dict[int, list[Tensor]], keep: tuple[dict[int, Copies], int] | None = None
    ) -> list[Handed]:
        """Copy what fits to the output arena, in as few launches as there can be.

        ``keep``: where the next copies of outputs that stay in their place are kept, and under which number.
        They are one launch, so that what the judge's clock sees beside the sample is short, and alike in
        every process.
        """
        handed, sources, places = hand_over.plan(results, self.outputs, in_pieces=self.device.type == "cuda")
        if places:
            torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateImportUsage]
            if keep is not None and (graph := self._captured(places, sources)):
                kept, number = keep
                kept[number] = Copies(handed, graph)
        self._finish_copies()
        return handed

    def _captured(self, places: list[Tensor], sources: list[Tensor]) -> torch.cuda.CUDAGraph | None:
        """The copies as a CUDA graph; None if there can't be one, and they are launched one by one."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateImportUsage]
        except RuntimeError:
            return None
        return graph

    def _finish_copies(self) -> None:
        self._synchronize()
        if self.output_arena is not None:
            self.output_arena.push()

    def _records(self, handed: list[Handed]) -> list[OutputRecord]:
        records = []
        for slot, tensor, copied, place in handed:
            flags = Flag.ALIASES_INPUT if self._in_inputs(tensor) else Flag(0)
            if copied:
                flags |= Flag.COPIED if place is None else Flag.COPIED | Flag.AS_IT_LIES
            if tensor.dim() > MAX_NDIM:
                raise subjects.StructureError(
                    f"an output has {tensor.dim()} dims; at most {MAX_NDIM} are compared"
                )
            if tensor.dtype not in CODE_OF:
                raise subjects.StructureError(f"an output has dtype {tensor.dtype}")
            records.append(
                OutputRecord(
                    CODE_OF[tensor.dtype], DEVICE_CODES.get(tensor.device.type, 2), int(flags), slot,
                    place or 0, tuple(tensor.shape), tuple(tensor.stride()),
                )
            )  # fmt: skip
        return records

    def _in_inputs(self, tensor: Tensor) -> bool:
        if self.input_arena is None or tensor.numel() == 0 or tensor.device != self.device:
            return False
        start = self.input_arena.storage.data_ptr()
        return start <= tensor.data_ptr() < start + self.input_arena.storage.nbytes()

    def _unless_state_changed(self, reply: Reply) -> Reply:
        if self.trusted:
            return reply
        now = global_state(self.device)
        changed = [f"{k}: {self.state[k]} -> {v}" for k, v in now.items() if self.state.get(k) != v]
        return Reply(ReplyStatus.STATE, "; ".join(changed)) if changed else reply

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reset_peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _held(self) -> float:
        """Device memory that the process holds, weights and graph pools included."""
        if self.device.type != "cuda":
            return 0.0
        return float(torch.cuda.memory_reserved(self.device) - flush_held())

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


def _seed(shared: Path, private: Path) -> None:
    """Copy what Triton would compile first in an empty cache: its own driver stub, which takes seconds."""
    for stub in shared.glob("*/cuda_utils*.so"):
        with contextlib.suppress(OSError):
            shutil.copytree(stub.parent, private / stub.parent.name, dirs_exist_ok=True)


def main() -> None:
    command_fd, reply_fd, threads = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    serve(command_fd, reply_fd, sys.argv[3], threads)


if __name__ == "__main__":
    main()
