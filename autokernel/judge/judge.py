"""The judge: opens tasks, spawns workers, and owns the processes and the scratch folder.

It never imports or executes a candidate.  References are trusted: they are written by extraction, or
given by the user.  What is not covered: see `sandbox` (kernel and GPU driver are shared) and `protocol` (a
candidate can forge its own claims, not the comparison of its outputs in judge-held memory nor the judge's
clock).  One Judge measures one thing at a time.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from autokernel.errors import DeviceMissing
from autokernel.judge import sandbox, spawned
from autokernel.judge.arena import Arena, remove_shared_folder
from autokernel.judge.handle import Worker, WorkerFault
from autokernel.judge.launch import Deadlines, Kind, Launcher, LaunchError
from autokernel.judge.layout import TensorSpec
from autokernel.judge.spawned import PairedResult, SpawnedWorker
from autokernel.judge.task_judge import TaskError, TaskJudge
from autokernel.records import Task
from autokernel.torch_flags import BY_DEFAULT, Tf32

LEFT_OUT_ON_A_GPU = (
    {"shared memory"},
    {"processes"},
    {"shared memory", "processes"},
    {"shared memory", "processes", "files", "home"},
    set(sandbox.GUARDS),
)
"""What is tried, in this order, where a worker can't use the GPU with every guard on."""


class Judge:
    """A context manager. ``scratch`` is where workers get their folders; by default a temporary one.
    ``ipc=False``: on a GPU, hand tensors over through the host.

    Raises DeviceMissing when the device is not there.
    """

    def __init__(
        self,
        device: str,
        *,
        scratch: Path | None = None,
        threads: int | None = None,
        pool: int | None = None,
        ipc: bool = True,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available() or (self.device.index or 0) >= torch.cuda.device_count():
                raise DeviceMissing(f"there is no device {device} here")
            self.device = torch.device("cuda", self.device.index or 0)
        elif self.device.type != "cpu":
            raise DeviceMissing(f"device {device!r} is not supported; use cpu, cuda or cuda:N")
        self._made_scratch = Path(tempfile.mkdtemp(prefix="autokernel-", dir=scratch))
        self.scratch = self._made_scratch.resolve()
        self.threads = threads or torch.get_num_threads()
        self.launcher = Launcher(
            str(self.device), self.scratch, threads=self.threads, pool=pool, deadlines=deadlines
        )
        self._tasks: list[TaskJudge] = []
        self._spawned: list[SpawnedWorker] = []
        self._ipc: bool | None = None
        self._try_ipc = ipc
        self.guards_left_out: dict[str, str] = {}
        """Guards that work on this system but not with its GPU's driver, and what fails with them on."""
        self._ready: dict[str, TaskJudge | TaskError] = {}
        self.preparing = RLock()
        self.launcher.start()  # the compiler is imported, contexts are made, while the model is loaded

    @property
    def ipc(self) -> bool:
        """Whether a worker can map device memory of ours (found out once); else it goes through the host."""
        if self._ipc is None:
            self._ipc = self.device.type == "cuda" and self._find_ipc()
        return self._ipc

    def _find_ipc(self) -> bool:
        """With all guards, else with as few left out as the driver makes necessary, which is said aloud."""
        ipc = self._try_ipc
        first = self._probe(ipc=ipc)
        if not first:
            return ipc
        guards = list(self.launcher.guards)
        pool, self.launcher.pool_size = self.launcher.pool_size, 1
        try:
            return self._without_some_guards(guards, first)
        finally:
            self.launcher.pool_size = pool

    def _without_some_guards(self, guards: list[str], first: str) -> bool:
        """Leave out what keeps workers from using the GPU (``first`` says how it failed); as `ipc`."""
        ipc = self._try_ipc
        self.launcher.use([])
        if self._probe(ipc=ipc):  # it is not the guards
            self.launcher.use(guards)
            if not ipc:
                return False
            warnings.warn(f"CUDA IPC does not work here, going through the host: {first}", stacklevel=4)
            self._try_ipc = False
            return self._find_ipc()
        for left_out in LEFT_OUT_ON_A_GPU:
            self.launcher.use([g for g in guards if g not in left_out])
            if left_out & set(guards) and not self._probe(ipc=ipc):
                break
        self.guards_left_out = {g: first for g in guards if g not in self.launcher.guards}
        names = ", ".join(self.guards_left_out)
        warnings.warn(f"the GPU does not work with these guards on: {names} ({first})", stacklevel=4)
        return ipc

    def _probe(self, *, ipc: bool) -> str:
        """Why a locked-in worker can't use the GPU (with ``ipc``: map device memory of ours), or ``""``."""
        arena = Arena(self.device, 4096, self.scratch, ipc=ipc)
        try:
            if ipc and arena.kind != "cuda-ipc":
                return "the driver does not share memory"
            worker = Worker(self.launcher, kind="kernel")
            try:
                worker.attach(inputs=(arena, [[TensorSpec(torch.uint8, (4096,), (1,))]]))
            finally:
                worker.close()
            return ""
        except (LaunchError, WorkerFault) as error:
            return str(error).splitlines()[0]
        finally:
            arena.close()

    def open(self, task: Task) -> TaskJudge:
        """Load the task's reference, start and time its baselines. Raises TaskError if it can't be judged."""
        ready = self._ready.pop(task.fingerprint, None)
        if isinstance(ready, TaskError):
            raise ready
        if ready is not None:
            return ready
        self.launcher.refill()
        task_judge = self._made(task)
        self._tasks.append(task_judge)
        task_judge.calibrate()
        return task_judge

    def _made(self, task: Task) -> TaskJudge:
        try:
            return TaskJudge(self, task)
        except (LaunchError, WorkerFault, torch.OutOfMemoryError) as error:
            raise TaskError(f"its baselines could not be started: {str(error).splitlines()[0]}") from error

    def release(self) -> None:
        """Close the tasks that `prepare` opened and nobody asked for."""
        for item in self._ready.values():
            if isinstance(item, TaskJudge):
                item.close()
        self._ready.clear()

    def prepare(self, tasks: Sequence[Task], workers: int = 6) -> dict[str, dict[str, float]]:
        """Open several tasks side by side, so that their compilers run in parallel; `open` then returns them.

        Returns each task's baselines (us) by fingerprint: how long the region takes by itself, eager and as
        torch.compile would run it. A task that can't be judged is missing, and `open` says why.
        """

        def prepared(task: Task) -> TaskJudge | TaskError:
            try:
                return self._made(task)
            except TaskError as error:
                return error

        _ = self.ipc  # found out once, before several threads ask
        with ThreadPoolExecutor(workers) as pool:
            opened = dict(zip([t.fingerprint for t in tasks], pool.map(prepared, tasks), strict=True))
        for fingerprint, item in opened.items():
            if isinstance(item, TaskJudge):
                self._tasks.append(item)
                try:
                    item.calibrate()
                except TaskError as error:
                    item.close()
                    opened[fingerprint] = error
        self._ready |= opened
        return {f: j.baselines for f, j in opened.items() if isinstance(j, TaskJudge)}

    def forget(self, task_judge: TaskJudge) -> None:
        if task_judge in self._tasks:
            self._tasks.remove(task_judge)

    def spawn(
        self,
        subject: dict[str, Any],
        inputs_layout: Sequence[TensorSpec | Tensor],
        outputs_layout: Sequence[TensorSpec | Tensor] | None = None,
        deadline_s: float | None = None,
        *,
        kind: Kind = "trusted",
        tf32: Tf32 = BY_DEFAULT,
        graph: bool = False,
    ) -> SpawnedWorker:
        """A worker for one subject (see `subjects`) on judge-held inputs of this layout.

        Without ``outputs_layout`` the first run finds it out. ``deadline_s`` (by default the judge's) holds
        for loading and for the first run. ``kind``: who is in it, see `launch`. ``graph``: time it as a
        CUDA graph of calls rather than as the user would call it.
        Raises WorkerFault (``status``, ``reason``) when it does not load.
        """

        def specs(layout: Sequence[TensorSpec | Tensor]) -> list[TensorSpec]:
            return [TensorSpec.of(x) if isinstance(x, Tensor) else x for x in layout]

        outputs = None if outputs_layout is None else specs(outputs_layout)
        worker = SpawnedWorker(
            self.launcher, subject, specs(inputs_layout), outputs,
            device=self.device, scratch=self.scratch, ipc=self.ipc, deadline_s=deadline_s,
            kind=kind, tf32=tf32, graph=graph,
        )  # fmt: skip
        self._spawned.append(worker)
        return worker

    def paired(
        self, a: SpawnedWorker, b: SpawnedWorker, pairs: int = 30, inputs: Sequence[Tensor] | None = None
    ) -> PairedResult:
        """How many times faster ``b`` is than ``a``, on ``inputs`` or the ones that they last ran on."""
        self.launcher.settle()
        return spawned.paired(a, b, pairs, inputs)

    def measure(self, worker: SpawnedWorker) -> float:
        """Median us per call on the inputs that it last ran on."""
        self.launcher.settle()
        return spawned.measure(worker)

    def close(self) -> None:
        for task_judge in list(self._tasks):
            task_judge.close()
        for worker in self._spawned:
            worker.close()
        self._spawned.clear()
        self.launcher.close()
        remove_shared_folder(self.scratch)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
