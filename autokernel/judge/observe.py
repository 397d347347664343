"""What a worker sees of the candidate in its own process: global state, stale memory, exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import subprocess
import sys
import traceback
from pathlib import Path

import torch
from torch import Tensor

from autokernel.judge.protocol import Op, ReplyStatus

NOT_THEIRS = (str(Path(__file__).parents[1]), "<frozen importlib")
COMPILE_ERRORS = frozenset({
    "CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "OutOfResources",
    "PTXASError", "MLIRCompilationError", "CompileError", "CppCompileError", "BackendCompilerFailed",
    "InductorError", "KernelSourceError", "CalledProcessError",
})  # fmt: skip
"""Names (anywhere in an exception's ancestry or causes) that mean a compiler refused the source."""


def poison_free_memory(like: list[Tensor], pattern: int) -> None:
    """Fill blocks of the outputs' sizes with ``pattern`` bytes and free them.

    Memory that a kernel then allocates and leaves unwritten shows the pattern, not a lucky old answer.
    """
    blocks = []
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        for _ in range(3 if nbytes < (32 << 20) else 1):
            blocks.append(torch.full((nbytes,), pattern, dtype=torch.uint8, device=tensor.device))
    del blocks


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def settle_heap(*, recycle: bool) -> list[bytearray]:
    """Bring this process's heap to where a long-running model has it, moved by a random amount.

    Two things make equal kernels differ by several percent, or several times, for a worker's whole life.
    glibc gives large blocks back to the system, and pages them in again on every call: with ``recycle`` it
    never does, as in a compiled model, which plans its memory (a region by itself would meet no fault in one
    process and ten thousand in another); without, as a model has it in a process that has run for a while.
    And children of one zygote have the same addresses, so what was allocated before decides how buffers fall
    into cache sets; at random it is noise, and A/A sees it.  Keep what is returned alive.
    """
    if recycle:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    else:
        torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)  # freed at once; just under the highest limit
    sizes = random.SystemRandom()
    blocks = [bytearray(sizes.randrange(600, 16_384)) for _ in range(64)]
    sizes.shuffle(blocks)
    return blocks[:32]


def global_state(device: torch.device) -> dict[str, str]:
    """The process-wide settings that a kernel must leave alone, by name."""
    rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return {
        "torch.get_num_threads": str(torch.get_num_threads()),
        "torch.is_grad_enabled": str(torch.is_grad_enabled()),
        "torch.get_default_dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": _precision(),
        "torch.backends.cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "torch.backends.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "floating point": _arithmetic(),
        "random state": hashlib.sha1(rng.numpy().tobytes(), usedforsecurity=False).hexdigest()[:8],
    }


def _arithmetic() -> str:
    """How this thread rounds, and whether it takes numbers near zero for zero: its control register, told
    by what sums and products come to."""
    one, half_a_bit, tiny, least = 1.0, 2.0**-53, sys.float_info.min, 5e-324
    up, down = one + half_a_bit > one, -one - half_a_bit < -one
    kept = tiny * 0.5 > 0, least * (one / tiny) > 0
    toward_zero = one + 1.5 * half_a_bit == one
    rounds = "up" if up else "down" if down else "toward zero" if toward_zero else "to nearest"
    return f"rounds {rounds}, tiny results {_fate(kept[0])}, tiny operands {_fate(kept[1])}"


def _fate(kept: bool) -> str:
    return "kept" if kept else "flushed"


def _precision() -> str:
    try:
        return f"{torch.get_float32_matmul_precision()}, tf32 {torch.backends.cuda.matmul.allow_tf32}"
    except RuntimeError:  # old and new settings were mixed
        return "mixed"


OURS = frozenset({Op.HELLO, Op.SETUP, Op.ATTACH, Op.REPACK})
"""Requests that no code of a subject runs in."""


def classify(error: BaseException, op: Op) -> ReplyStatus:
    """Which kind of failure an exception that was raised while answering ``op`` is."""
    if op == Op.LOAD:
        return ReplyStatus.LOAD_ERROR
    if op in OURS:
        return ReplyStatus.WORKER_ERROR
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, subprocess.CalledProcessError):
            return ReplyStatus.COMPILE_ERROR
        if any(c.__name__ in COMPILE_ERRORS for c in type(seen).__mro__):
            return ReplyStatus.COMPILE_ERROR
        seen = seen.__cause__ or seen.__context__
    return ReplyStatus.RUN_ERROR


def describe(error: BaseException, limit: int = 6000) -> str:
    """The exception first, then where it came from (our own frames left out), bounded in the middle."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THEIRS)]
    where = "".join(traceback.format_list(frames[-6:])).rstrip()
    message = "".join(traceback.format_exception_only(error)).strip()
    stderr = getattr(error, "stderr", None)
    if stderr:
        message += "\n" + (stderr.decode("utf-8", "replace") if isinstance(stderr, bytes) else str(stderr))
    text = f"{message}\n{where}" if where else message
    if len(text) <= limit:
        return text
    return text[: limit * 2 // 3] + "\n[...]\n" + text[-limit // 3 :]
