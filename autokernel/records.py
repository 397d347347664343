"""Plain records shared by every layer, and the single declaration of results.tsv.

Nothing here imports torch: the command line reads these before it decides to pay for that import.
Times are microseconds, sizes bytes, unless the name says otherwise.  `None` means unknown and is
written as an empty cell, never as 0.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .torch_flags import Tf32

Status = Literal[
    "baseline", "keep", "discard", "incorrect", "compile_error", "crash", "timeout", "rejected", "infra_error"
]
Family = Literal[
    "attention", "linear", "sibling_linears", "gated_mlp", "norm", "rope", "softmax", "cross_entropy",
    "reduction", "conv", "embedding", "pointwise", "other", "model",
]  # fmt: skip
Bound = Literal["dram", "l1", "latency", "compute", "occupancy", "launch", "mixed"]
Role = Literal["activation", "parameter", "buffer", "constant"]
Provenance = Literal["custom", "mixed", "library"]

INPUT_ALIGNMENT = 16
"""Bytes.  A kernel may count on inputs that start at a multiple of this: the judge gives it no others, and in
a model one that doesn't is copied.  Libraries load as wide as that, and where they can't some answer wrongly
without an error (cuDNN's attention does)."""

STATUSES: tuple[str, ...] = typing.get_args(Status)
FAMILIES: tuple[str, ...] = typing.get_args(Family)
TIMED: frozenset[str] = frozenset({"baseline", "keep", "discard"})

CORRECTNESS: dict[str, str] = {
    "baseline": "PASS",
    "keep": "PASS",
    "discard": "PASS",
    "incorrect": "FAIL",
    "rejected": "FAIL",
    "compile_error": "CRASH",
    "crash": "CRASH",
    "infra_error": "CRASH",
    "timeout": "TIMEOUT",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A paired speed-up: median of per-pair time ratios (>1 is faster) with an interval.

    ``low`` and ``high`` are the two-sided 95 % bounds, ``lower_bound`` the one-sided 95 % bound that
    decides, ``pairs`` how many pairs were measured.
    """

    ratio: float
    low: float
    high: float
    lower_bound: float
    pairs: int


@dataclass(slots=True)
class Verdict:
    """What the judge says of one candidate.  Timings exist only when it is correct."""

    status: Status
    reason: str = ""
    stages: dict[str, tuple[bool, str]] = field(default_factory=dict)
    error_ratio: float | None = None
    latency_us: float | None = None
    vs_eager: Ratio | None = None
    vs_compile: Ratio | None = None
    vs_parent: Ratio | None = None
    peak_vram_mb: float | None = None
    bound: Bound | None = None
    provenance: Provenance | None = None
    seconds: float = 0.0
    log: str = ""

    def __post_init__(self) -> None:
        if self.status not in TIMED and (self.latency_us is not None or self.vs_eager is not None):
            raise ValueError(f"a {self.status} verdict can't carry timings")

    @property
    def correct(self) -> bool:
        return CORRECTNESS[self.status] == "PASS"


@dataclass(slots=True)
class Experiment:
    """One row of results.tsv.  Field order is column order; header, writer and reader derive from it."""

    experiment: int
    tag: str
    kernel_type: str
    throughput_tflops: float | None = None
    latency_us: float | None = None
    pct_peak: float | None = None
    speedup_vs_pytorch: float | None = None
    correctness: str = ""
    peak_vram_mb: float | None = None
    description: str = ""
    time: str = ""
    task: str = ""
    backend: str = ""
    device: str = ""
    status: str = ""
    reason: str = ""
    candidate: str = ""
    parent: str = ""
    strategy: str = ""
    speedup_vs_compile: float | None = None
    speedup_vs_best_baseline: float | None = None
    speedup_vs_parent: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    bound: str = ""
    error_ratio: float | None = None
    provenance: str = ""
    proposer: str = ""
    model: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.status:
            if self.status not in STATUSES:
                raise ValueError(f"unknown status {self.status!r}; one of {', '.join(STATUSES)}")
            self.correctness = CORRECTNESS[self.status]
            timings = (self.latency_us, self.speedup_vs_pytorch, self.speedup_vs_best_baseline)
            if self.status not in TIMED and any(t is not None for t in timings):
                raise ValueError(f"a {self.status} row can't carry timings")
        if self.kernel_type not in FAMILIES:
            raise ValueError(f"unknown kernel_type {self.kernel_type!r}; one of {', '.join(FAMILIES)}")


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Experiment))


def column_types() -> dict[str, type]:
    """Column name -> ``int``, ``float`` or ``str`` (the type of a cell that is not empty)."""
    hints = typing.get_type_hints(Experiment)
    result: dict[str, type] = {}
    for name in COLUMNS:
        hint = hints[name]
        if isinstance(hint, types.UnionType):
            hint = next(a for a in typing.get_args(hint) if a is not type(None))
        result[name] = hint
    return result


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that goes into or comes out of a region.

    ``role`` says where an input comes from: ``activation`` changes on every call, ``parameter`` and
    ``buffer`` belong to the model and may be prepacked, ``constant`` is a buffer whose *content* is part
    of the region's fingerprint (a causal mask, say), so that a rewrite may rely on its value.
    ``high`` bounds random integers (exclusive) where the op needs it, as for embedding indices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    role: Role = "activation"
    high: int | None = None

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Port:
        return cls(**{**data, "shape": tuple(data["shape"]), "stride": tuple(data["stride"])})


@dataclass(slots=True)
class Task:
    """A region that was cut out of a model, as written to ``task.json``.

    ``device_time_us`` is the profiled time of all ``call_count`` call sites together in one forward pass,
    ``share`` its part of the model's time, ``roofline_us`` the floor of *one* call, ``head_room`` how many
    times faster one call could get before it meets that floor, ``amdahl_bound`` the speed-up of the whole
    model if every call site ran at its floor.  ``inputs_left_out`` names the inputs that had no room in
    inputs.safetensors.
    """

    rank: int
    family: Family
    fingerprint: str
    device: str
    call_count: int
    module_paths: list[str]
    inputs: list[Port]
    outputs: list[Port]
    share: float | None = None
    device_time_us: float | None = None
    flops: float | None = None
    bytes: float | None = None
    roofline_us: float | None = None
    head_room: float | None = None
    amdahl_bound: float | None = None
    allow_tf32: bool = False
    allow_conv_tf32: bool = True
    dir: Path = Path()
    inputs_left_out: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.rank:02d}-{self.family}-{self.fingerprint[:8]}"

    @property
    def tf32(self) -> Tf32:
        return Tf32(self.allow_tf32, self.allow_conv_tf32)

    @property
    def in_tf32(self) -> bool:
        """Whether this task's own kind of work may run in TF32."""
        return self.tf32.allows(self.family)

    @property
    def static_inputs(self) -> list[Port]:
        return [p for p in self.inputs if p.role != "activation"]

    @property
    def activations(self) -> list[Port]:
        return [p for p in self.inputs if p.role == "activation"]

    def save(self, folder: Path) -> None:
        data = asdict(self)
        del data["dir"]
        (folder / "task.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        self.dir = folder

    @classmethod
    def load(cls, folder: Path) -> Task:
        data = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        data["inputs"] = [Port.from_json(p) for p in data["inputs"]]
        data["outputs"] = [Port.from_json(p) for p in data["outputs"]]
        return cls(**data, dir=folder)
