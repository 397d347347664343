"""The judge of one task: its reference, its buffers, its baselines; `TaskJudge.judge` gives a verdict."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autokernel.errors import AutokernelError
from autokernel.judge import admission, clock
from autokernel.judge.buffers import InputBuffers, OutputBuffers, slot_counts
from autokernel.judge.cases import CaseMaker, worst_e0
from autokernel.judge.contents import Contents
from autokernel.judge.handle import Prepared, Worker, WorkerFault
from autokernel.judge.held_out import held_out
from autokernel.judge.inputs import InputSource, spec_of
from autokernel.judge.launch import LaunchError
from autokernel.judge.layout import TensorSpec, overlapping
from autokernel.judge.stages import STAGES
from autokernel.judge.stages.timing import WorkerArm
from autokernel.judge.stats import calibrate_delta, faster
from autokernel.judge.subjects import load_reference
from autokernel.judge.sweep import Sweep
from autokernel.judge.trial import SUBJECT, Bench, StageResult, Tier, Trial
from autokernel.records import Ratio, Task, Verdict
from autokernel.torch_flags import set_tf32

if TYPE_CHECKING:
    from autokernel.judge.judge import Judge

CALIBRATION_ROUNDS, CALIBRATION_BLOCKS = 20, 2
TWINS = 3
"""So often eager is there once more: on a CPU in processes of its own, on a GPU in CUDA graphs of its own.
Where their memory lies makes equal graphs differ, and it differs as much within a process."""
SUBJECTS = {"eager": ("reference", 0), "compile": ("reference-compiled", 1)}
LAUNCHED, FIRST_TWIN = 2, 3
"""Numbers of the subject that is eager once more in no CUDA graph, and of the first that is a twin."""
LOG_LIMIT = 8000


class TaskError(AutokernelError):
    """The task can't be judged: its reference does not run, contradicts task.json, or proves nothing."""


class TaskJudge:
    """Made by `Judge.open`. ``baselines`` are latencies in us per call; a missing one has its reason in
    ``baseline_failures``. ``delta`` is what a lower bound must exceed 1 by, from an A/A run."""

    def __init__(self, judge: Judge, task: Task) -> None:
        self.owner, self.task, self.launcher = judge, task, judge.launcher
        self.device = judge.device
        self.baselines: dict[str, float] = {}
        self.baseline_failures: dict[str, str] = {}
        self.delta = 0.0
        self.graph = self.device.type == "cuda"
        self._baseline: Worker | None = None
        self._launched: Worker | None = None
        self._sample_s: float | None = None
        self.calls = 1
        """How many calls a sample consists of, for every arm: eager's number, from its trusted worker."""
        self._statics: list[Tensor] = []
        self._screened: tuple[Path, Worker] | None = None
        self._sweep: Sweep | None = None
        self._parent: tuple[Path, Worker] | None = None
        self._held_out: list[Task] | None = None
        self._outputs: dict[str, OutputBuffers] = {}
        with judge.preparing:  # float64 is the whole process's default dtype while a reference is evaluated
            set_tf32(task.tf32)
            self.source = InputSource(task, self.device)
            try:
                reference = load_reference(task.dir / "reference.py", self.device)
                self.maker = CaseMaker(self.source, reference)
                self.output_specs = self.maker.output_specs()
            except AutokernelError:
                raise
            except Exception as error:  # a user's reference may raise anything
                raise TaskError(
                    f"{task.dir / 'reference.py'} does not run: {type(error).__name__}: {error}"
                ) from error
            self._check_ports()
            self.may_alias, self.may_overlap = self._shared_outputs()
            if reason := admission.refusal(self.maker):
                raise TaskError(f"{task.name}: {reason}")
            specs = [spec_of(p) for p in task.inputs]
            self.inputs = InputBuffers(
                task, specs, self._slots(reference, specs), self.device, judge.scratch, ipc=judge.ipc
            )
        self._start_baselines()

    # -- opening -------------------------------------------------------------------------------------

    def _check_ports(self) -> None:
        if len(self.output_specs) != len(self.task.outputs):
            raise TaskError(
                f"the reference returns {len(self.output_specs)} tensors, task.json has "
                f"{len(self.task.outputs)}"
            )
        for i, (got, port) in enumerate(zip(self.output_specs, self.task.outputs, strict=True)):
            want = spec_of(port)
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise TaskError(
                    f"output {i} of the reference is {got.dtype} {got.shape}, task.json says {want}"
                )

    def _shared_outputs(self) -> tuple[list[bool], list[bool]]:
        """Which outputs share memory with an input, and which with an earlier output, in eager, too."""
        inputs = self.maker.place(self.source.draw("normal", 0, 1.0))
        owned = {t.untyped_storage().data_ptr() for t in inputs}
        outputs = self.maker.eager(inputs)
        return [t.untyped_storage().data_ptr() in owned for t in outputs], overlapping(outputs)

    def _slots(self, reference: torch.nn.Module, specs: list[TensorSpec]) -> tuple[int, int]:
        repeated = [s for s, p in zip(specs, self.task.inputs, strict=True) if p.role == "activation"]
        if self.device.type == "cuda":
            repeated = specs
        bytes_per_call = sum(s.extent for s in (*repeated, *self.output_specs))
        inputs = self.maker.place(self.source.draw("normal", 0, 1.0))
        with torch.no_grad():
            estimate_s = clock.make_timer([(reference, inputs)], self.device).estimate_s
        return slot_counts(self.device, bytes_per_call, estimate_s)

    def _start_baselines(self) -> None:
        """One trusted worker holds eager and compiled; a compiled one that fails or is wrong is left out.

        It is locked in as a candidate is: what that costs in time, all arms pay.
        """
        worker = Worker(self.launcher, kind="baseline", tf32=self.task.tf32)
        self._baseline = worker
        buffers = self._output_buffers("baseline")
        buffers.attach(worker, self.inputs)
        with self.owner.preparing:
            cases = [self.maker.make("normal") for _ in range(2)]
            self._statics = cases[0].inputs
            self.inputs.write_statics(cases[0].inputs)
            for slot in range(self.inputs.count):
                self.inputs.write(slot, cases[slot % 2].inputs)
            self.inputs.arena.sync()
        graph = self.graph
        for name, (kind, number) in SUBJECTS.items():
            if name in self.baseline_failures:
                continue
            try:
                worker.load(number, self._reference_spec(kind))
                ran = worker.run(number, [0], first=True)
                with self.owner.preparing:
                    result = self.maker.check(cases[0], buffers.outputs(0, ran.outputs[0]), worst_e0(cases))
                if not result.ok:
                    self.baseline_failures[name] = f"incorrect: {result.reason}"
                    continue
                prepared = self.ready(worker, number)
                graph = graph and prepared.graph
                if name == "eager":
                    self.calls = prepared.calls
                if name == "eager" and prepared.graph:
                    # All arms of a comparison make as many calls per sample as eager does.
                    self._sample_s = 1e9 if prepared.calls > self.inputs.timed else 1e-9
            except WorkerFault as fault:
                self.baseline_failures[name] = fault.reason
                if name == "eager":
                    raise TaskError(f"eager does not run in a worker: {fault.reason}") from fault
                if worker.closed:
                    self._start_baselines()
                    return
        self.graph = graph

    def calibrate(self) -> None:
        """Latencies of the baselines, and how far equal arms stray on this device. Part of `Judge.open`.

        The same code in another process can be steadily faster or slower by a percent (memory layout, core),
        so A/A is measured between processes: that is how a candidate meets its baseline, too.
        """
        blocks = [self._calibration_block() for _ in range(CALIBRATION_BLOCKS)]
        self.delta = calibrate_delta(
            [[b.times_s(n) for n in b.samples if n == "eager" or n.startswith("twin")] for b in blocks]
        )
        names = [arm.name for arm in self.baseline_arms()]
        self.baselines = {n: min(b.median_us(n) for b in blocks) for n in names}

    def _calibration_block(self) -> clock.Rounds:
        twins: list[WorkerArm] = []
        try:
            arms = self.baseline_arms()
            if self.device.type == "cpu":
                twins += self._twins(TWINS)
            beside = twins or self._twins_beside(arms[0].worker)
            self.launcher.settle()
            contents = Contents(self.inputs, self.maker, self._statics)
            return clock.interleave(
                [*arms, *beside],
                CALIBRATION_ROUNDS,
                buffers=self.inputs.timed,
                before_round=contents.deal,
                device=self.device,
            )
        except WorkerFault as fault:
            raise TaskError(f"a baseline failed while being timed: {fault.reason}") from fault
        finally:
            for twin in twins:
                twin.worker.close()

    def _twins(self, count: int) -> list[WorkerArm]:
        """Started two at a time, since nothing is timed meanwhile; all of them, or none and an error."""
        with ThreadPoolExecutor(2) as pool:
            started = [pool.submit(self._twin, f"twin{i}") for i in range(count)]
        if fault := next((f.exception() for f in started if f.exception()), None):
            for future in started:
                if not future.exception():
                    future.result().worker.close()
            raise fault
        return [future.result() for future in started]

    def _twins_beside(self, worker: Worker) -> list[WorkerArm]:
        """In the baseline's own process."""
        twins = [WorkerArm(f"twin{i}", worker, FIRST_TWIN + i) for i in range(TWINS)]
        for twin in twins:
            worker.load(twin.subject, self._reference_spec("reference"))
            self.ready(worker, twin.subject)
        return twins

    def _twin(self, name: str) -> WorkerArm:
        """Eager once more, in a process of its own."""
        worker = Worker(self.launcher, kind="baseline", tf32=self.task.tf32)
        worker.load(0, self._reference_spec("reference"))
        worker.attach((self.inputs.arena, self.inputs.slots))
        self.ready(worker, 0)
        return WorkerArm(name, worker, 0)

    def _reference_spec(self, kind: str) -> dict[str, Any]:
        path = self.task.dir / "reference.py"
        return {"kind": kind, "source": path.read_text(encoding="utf-8")}

    # -- used by the stages --------------------------------------------------------------------------

    def baseline_arms(self, *, collect: bool = False) -> list[WorkerArm]:
        """Eager first; started again if their worker has died. ``collect``: with their outputs."""
        if self._baseline is None or not self._baseline.alive:
            if self._baseline is not None:
                self._baseline.close()
            self._start_baselines()
        assert self._baseline is not None
        outputs = self._output_buffers("baseline") if collect else None
        return [
            WorkerArm(name, self._baseline, number, outputs=outputs, keeps=name == "eager")
            for name, (_, number) in SUBJECTS.items()
            if name not in self.baseline_failures
        ]

    def arm_launched(self) -> WorkerArm:
        """Eager once more, launched call by call: what the judge's clock sees beside such a sample is the
        usual overhead of a kernel that no CUDA graph takes."""
        worker = self._baseline
        assert worker is not None
        if self._launched is not worker:
            self._launched = None
            worker.load(LAUNCHED, self._reference_spec("reference"))
            worker.prepare(LAUNCHED, range(self.inputs.timed), graph=False, once=True)
            self._launched = worker
        outputs = self._output_buffers("baseline")
        return WorkerArm("eager, launched", worker, LAUNCHED, outputs=outputs, keeps=False)

    def start_kernel(self, path: Path, outputs: OutputBuffers) -> Worker:
        """An untrusted worker with the kernel loaded and the buffers mapped. Raises WorkerFault.

        A fresh process, unless the screening of the same file has just left its own for the promotion.
        """
        if self._screened is not None:
            (screened, worker), self._screened = self._screened, None
            if screened == path and outputs is self._outputs.get("candidate") and worker.alive:
                worker.repack(SUBJECT)
                return worker
            worker.close()
        worker = self.start_worker(outputs)
        try:
            worker.load(SUBJECT, self.kernel_spec(path))
        except WorkerFault:
            worker.close()
            raise
        return worker

    def start_worker(self, outputs: OutputBuffers) -> Worker:
        worker = Worker(self.launcher, kind="kernel", tf32=self.task.tf32)
        try:
            outputs.attach(worker, self.inputs)
        except WorkerFault:
            worker.close()
            raise
        return worker

    def ready(self, worker: Worker, number: int) -> Prepared:
        """Have ``worker`` ready its timer for a subject, with as many calls per sample as eager has."""
        sample_s = self._sample_s if self.graph else None
        return worker.prepare(
            number, range(self.inputs.timed), graph=self.graph, min_sample_s=sample_s, once=True
        )

    def kernel_spec(self, path: Path) -> dict[str, Any]:
        return {
            "kind": "kernel",
            "name": path.stem,
            "source": path.read_text(encoding="utf-8", errors="surrogateescape"),
            "activations": len(self.task.activations),
            "compiler": "compile" in self.baselines,
        }

    @property
    def candidate_outputs(self) -> OutputBuffers:
        return self._output_buffers("candidate")

    @property
    def parent_outputs(self) -> OutputBuffers:
        return self._output_buffers("parent")

    def _output_buffers(self, name: str) -> OutputBuffers:
        if name not in self._outputs:
            self._outputs[name] = self.new_outputs(len(self.inputs.slots))
        return self._outputs[name]

    @property
    def held_out(self) -> list[Task]:
        """The task with other shapes that its reference takes."""
        if self._held_out is None:
            with self.owner.preparing:
                self._held_out = held_out(self.task, self.maker.reference, self.device)
        return self._held_out

    @contextlib.contextmanager
    def other_bench(self, task: Task, maker: CaseMaker, slots: int) -> Iterator[Bench]:
        """Buffers for a variant of the task, for as long as they are needed."""
        owner, specs = self.owner, [spec_of(p) for p in task.inputs]
        inputs = InputBuffers(task, specs, (slots, slots), self.device, owner.scratch, ipc=owner.ipc)
        outputs = OutputBuffers(
            [spec_of(p) for p in task.outputs], slots, self.device, owner.scratch, ipc=owner.ipc
        )
        try:
            yield Bench(maker, inputs, outputs)
        finally:
            inputs.close()
            outputs.close()

    def new_outputs(self, slots: int) -> OutputBuffers:
        owner = self.owner
        return OutputBuffers(self.output_specs, slots, self.device, owner.scratch, ipc=owner.ipc)

    # -- verdicts ------------------------------------------------------------------------------------

    def judge(self, source: Path, *, parent: Path | None = None, tier: Tier = "screen") -> Verdict:
        """Run the stages on one kernel file.

        ``keep`` needs every stage passed and a lower bound above 1 + delta against ``parent`` if given
        (and measurable), else against the fastest baseline; ``discard`` is correct but not faster.
        """
        begin = time.perf_counter()
        trial = Trial(self, Path(source), tier, parent)
        stages: dict[str, tuple[bool, str]] = {}
        result = StageResult(True)
        try:
            for name, run in STAGES.items():
                result = self._guarded(run, trial)
                stages[name] = (result.passed, result.text)
                if not result.passed:
                    break
        except BaseException:
            trial.close()
            raise
        log = trial.worker.process.log.text(0.05) if trial.worker is not None else ""
        verdict = self._verdict(trial, result)
        promising = verdict.status == "keep" and tier == "screen" and self.device.type == "cuda"
        if promising and trial.worker is not None:
            # A device context costs more than a verdict: the promotion goes on in this process.
            self._screened, trial.worker = (Path(source), trial.worker), None
        trial.close()
        self.launcher.refill()  # warms up while nothing is timed: until the next candidate is
        verdict.stages, verdict.seconds = stages, time.perf_counter() - begin
        verdict.log = verdict.log or log[-LOG_LIMIT:]
        return verdict

    def sweep(self, sources: Sequence[Path]) -> list[Verdict]:
        """A quick look at variants of one kernel; see `autokernel.judge.sweep`."""
        if self._sweep is None:
            self._sweep = Sweep(self)
        return self._sweep.run(sources)

    def _guarded(self, run: Callable[[Trial], StageResult], trial: Trial) -> StageResult:
        try:
            return run(trial)
        except WorkerFault as fault:
            return StageResult(False, fault.reason, fault.status)
        except (LaunchError, torch.OutOfMemoryError) as error:
            return StageResult(False, str(error), "infra_error")

    def _verdict(self, trial: Trial, result: StageResult) -> Verdict:
        verdict = Verdict(status="discard", error_ratio=trial.error_ratio)
        if trial.peak_bytes is not None and self.device.type == "cuda":
            inputs = sum(spec_of(p).extent for p in self.task.inputs)
            verdict.peak_vram_mb = (trial.peak_bytes + inputs) / 2**20
        if not result.passed:
            verdict.status = result.status or "infra_error"
            verdict.reason = result.text
            return verdict
        verdict.latency_us, verdict.provenance = trial.latency_us, trial.provenance
        verdict.vs_eager = trial.ratios.get("eager")
        verdict.vs_compile = trial.ratios.get("compile")
        verdict.vs_parent = trial.ratios.get("parent")
        rival, ratio = self._rival(trial)
        kept = faster(ratio, self.delta)
        verdict.status = "keep" if kept else "discard"
        verdict.reason = (
            f"{ratio.ratio:.3f}x {rival} (lower bound {ratio.lower_bound:.3f}, "
            f"{'above' if kept else 'not above'} {1 + self.delta:.3f})"
        )
        if trial.spills:
            verdict.reason += f"; {trial.spills}"
        return verdict

    def _rival(self, trial: Trial) -> tuple[str, Ratio]:
        """The comparison that decides."""
        if "parent" in trial.ratios:
            return "the parent", trial.ratios["parent"]
        best = min((r.ratio, name) for name, r in trial.ratios.items())[1]
        return best, trial.ratios[best]

    def parent_worker(self, path: Path) -> Worker:
        """The parent's worker, kept from one candidate to the next. Raises WorkerFault."""
        if self._parent is not None:
            kept, worker = self._parent
            if kept == path and worker.alive:
                worker.repack(SUBJECT)  # static inputs may have changed since
                return worker
            worker.close()
            self._parent = None
        worker = self.start_worker(self.parent_outputs)
        try:
            worker.load(SUBJECT, self.kernel_spec(path))
        except WorkerFault:
            worker.close()
            raise
        self._parent = (path, worker)
        return worker

    def close(self) -> None:
        for held in (self._screened, self._parent):
            if held is not None:
                held[1].close()
        if self._sweep is not None:
            self._sweep.close()
        if self._baseline is not None:
            self._baseline.close()
        for buffers in self._outputs.values():
            buffers.close()
        self.inputs.close()
        self.owner.forget(self)

    def __enter__(self) -> TaskJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
