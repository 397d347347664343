"""One candidate on its way through the stages: its worker, its cases, and what has been found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from autokernel.judge.buffers import PATTERNS, InputBuffers, OutputBuffers, uncopied
from autokernel.judge.cases import Case, CaseMaker
from autokernel.judge.compare import Measures, check_structure
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.layout import DTYPES, TensorSpec
from autokernel.judge.protocol import Flag, OutputRecord
from autokernel.judge.worker import DEVICE_CODES
from autokernel.records import Provenance, Ratio, Status

if TYPE_CHECKING:
    from autokernel.judge.task_judge import TaskJudge

Tier = Literal["screen", "promote", "audit"]
"""Each tries what the one before it does, and more."""
SUBJECT = 0
"""The candidate's subject number in its own worker."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """``status`` is set when the candidate ends here; ``text`` is kept in the verdict either way."""

    passed: bool
    text: str = ""
    status: Status | None = None


def failed(status: Status, text: str) -> StageResult:
    return StageResult(False, text, status)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a kernel is compared on: who makes the cases, and the buffers they are handed over in."""

    maker: CaseMaker
    inputs: InputBuffers
    outputs: OutputBuffers


@dataclass(slots=True)
class Trial:
    """What the stages share about one candidate."""

    task_judge: TaskJudge
    source: Path
    tier: Tier
    parent: Path | None
    worker: Worker | None = None
    outputs: OutputBuffers | None = None
    cases: list[Case] = field(default_factory=list)
    e0: dict[str, list[Measures]] = field(default_factory=dict)
    error_ratio: float | None = None
    latency_us: float | None = None
    peak_bytes: float | None = None
    ratios: dict[str, Ratio] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    provenance: Provenance | None = None
    spills: str = ""

    @property
    def running(self) -> tuple[Worker, OutputBuffers]:
        """The worker and its output areas; only after the load stage."""
        assert self.worker is not None and self.outputs is not None
        return self.worker, self.outputs

    def run_cases(
        self,
        cases: Sequence[Case],
        *,
        slots: Sequence[int],
        pattern: int = PATTERNS[0],
        bench: Bench | None = None,
        first: bool = False,
    ) -> dict[int, list[Tensor]]:
        """Write each case to its slot, run the candidate on all of them; judge-held outputs by slot.

        ``bench``: other buffers than the task's own.  ``first``: the kernel may compile.

        Raises WorkerFault: whatever the worker's call raised; ``incorrect`` when the form of an output is
        wrong; ``rejected`` when an input was changed.
        """
        worker, outputs = self.running
        inputs = self.task_judge.inputs
        if bench is not None:
            inputs, outputs = bench.inputs, bench.outputs
        for slot, case in zip(slots, cases, strict=True):
            inputs.write(slot, case.inputs)
        outputs.poison(pattern)
        inputs.arena.sync()
        ran = worker.run(SUBJECT, slots, pattern=pattern, first=first)
        if bench is None:
            self.peak_bytes = max(self.peak_bytes or 0.0, ran.peak_bytes)
        for slot, case in zip(slots, cases, strict=True):
            self.check_form(ran.outputs.get(slot, []), case)
            if name := inputs.changed_input(slot, case.inputs):
                raise WorkerFault("rejected", f"changes its input {name!r}")
        return {slot: [t.clone() for t in outputs.outputs(slot, ran.outputs[slot])] for slot in slots}

    def check_form(self, records: Sequence[OutputRecord], case: Case) -> None:
        """Raise WorkerFault("incorrect") unless number, shape, dtype, device and strides are right."""
        if len(records) != len(case.eager):
            raise WorkerFault(
                "incorrect", f"returns {len(records)} tensors, the reference returns {len(case.eager)}"
            )
        device = DEVICE_CODES[self.task_judge.device.type]
        for i, (record, want) in enumerate(zip(records, case.eager, strict=True)):
            label = "the output" if len(records) == 1 else f"output {i}"
            if record.device != device:
                raise WorkerFault("incorrect", f"{label} is not on {self.task_judge.device}")
            spec = TensorSpec(DTYPES[record.dtype], record.shape, record.stride)
            if wrong := check_structure(spec, TensorSpec.of(want), label):
                raise WorkerFault("incorrect", wrong)
            if record.flags & Flag.ALIASES_INPUT and not self.task_judge.may_alias[i]:
                raise WorkerFault(
                    "incorrect", f"{label} is not freshly allocated: it shares an input's memory"
                )
            if record.flags & Flag.HELD:
                raise WorkerFault(
                    "incorrect", f"{label} is kept by the kernel after the call: a later one may overwrite it"
                )
            if record.flags & Flag.OVERLAPS and not self.task_judge.may_overlap[i]:
                raise WorkerFault("incorrect", f"{label} shares memory with another output")
        if uncopied(records):
            raise WorkerFault("rejected", "an output that fits was not handed over")

    def check_values(
        self,
        case: Case,
        outputs: Sequence[Tensor],
        context: str = "",
        *,
        maker: CaseMaker | None = None,
        e0: Sequence[Measures] | None = None,
    ) -> None:
        """Raise WorkerFault("incorrect") unless the outputs are close enough to float64's.

        ``maker`` and ``e0``: of the case, where it is not one of the task's own.
        """
        maker = maker or self.task_judge.maker
        result = maker.check(case, outputs, e0 or self.e0.get(case.kind))
        if not result.ok:
            raise WorkerFault("incorrect", f"{result.reason}{context}")
        if result.ratio is not None:
            self.error_ratio = max(self.error_ratio or 0.0, result.ratio)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
