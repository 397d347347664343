"""One command's work on one model: its run folder, model, graphs, profile and tasks.

`profile`, `extract` and `optimize` all begin here, so that they see the same model in the same folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autokernel.errors import UsageError
from autokernel.records import Task
from autokernel.report.terminal import working
from autokernel.results import Journal, write_text_atomically
from autokernel.run_folder import RunFolder, RunRecord, run_stem

if TYPE_CHECKING:
    from rich.console import Console

    from autokernel.capture.graph import Capture
    from autokernel.capture.source import LoadedModel, SourceSpec
    from autokernel.playbook.context import StrategyContext
    from autokernel.profiling import Profile
    from autokernel.regions.region import Region

INDEX = "index.json"


def default_run(model: str) -> Path:
    return Path("runs") / run_stem(model)


@dataclass
class Session:
    folder: RunFolder
    loaded: LoadedModel
    journal: Journal
    device: str
    resumed: bool
    out: Console
    _graphs: Capture | None = field(default=None, repr=False)
    _regions: dict[str, Region] | None = field(default=None, repr=False)

    @classmethod
    def start(
        cls,
        spec: SourceSpec,
        run: Path | None,
        *,
        fresh: bool,
        out: Console,
        beside: Callable[[], object] = lambda: None,
    ) -> Session:
        """Take the run folder, load the model, and check that the two belong together.

        ``beside()`` is called once the device is known to be there, to start what can run while the model is
        loaded.  Raises UsageError and RunFolderError; a folder that can't be used is reported before torch is
        loaded.
        """
        _check_model_exists(spec.model)
        folder = RunFolder(run or default_run(spec.model), fresh=fresh)
        try:
            if folder.moved_to:
                out.print(f"The earlier run is now in {folder.moved_to}")
            with working(f"Loading {spec.model} …", out):
                from autokernel import hardware
                from autokernel.capture import source

                device = hardware.detect(spec.device)
                beside()
                loaded = source.load(spec)
                source.try_forward(loaded)
            record = RunRecord(
                arguments=json.loads(json.dumps(spec.to_json())),
                identity=loaded.identity,
                versions={k: str(v) for k, v in hardware.versions().items() if v is not None},
                device=device.to_json(),
            )
            resumed = folder.claim(record)
            journal = folder.journal()
            if journal.torn:
                out.print(f"A row that was cut off is now in {journal.torn}; its experiment is done again")
            return cls(folder, loaded, journal, device.name, resumed, out)
        except BaseException:
            folder.close()
            raise

    def close(self) -> None:
        self.folder.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        return self.folder.path

    def graphs(self) -> Capture:
        if self._graphs is None:
            from autokernel.capture.graph import capture, nothing_found
            from autokernel.capture.source import compiling

            with working("Capturing the graph …", self.out), compiling(self.loaded):
                self._graphs = capture(self.loaded.model, self.loaded.args, self.loaded.kwargs)
            if not self._graphs:
                raise UsageError(f"{self.loaded.spec.model}: {nothing_found(self._graphs)}")
        return self._graphs

    def profile(self) -> Profile:
        """Measure where the time goes; writes profile.json."""
        from autokernel.profiling import profile

        graphs = self.graphs()
        with working("Profiling …", self.out):
            result = profile(self.loaded, graphs, device=self.loaded.spec.device)
        result.save(self.path / "profile.json")
        return result

    def tasks(self, top: int) -> list[Task]:
        """The run's tasks: those that an earlier command extracted, else the ``top`` of a new profile.

        An extraction counts as done once its index is written; one that was cut off is done again.
        """
        earlier = self.extracted()
        if earlier is not None:
            if len(earlier) < top:
                self.out.print(
                    f"Going on with the {len(earlier)} tasks of this run, as they were extracted "
                    "(--fresh starts over and takes more)",
                    style="dim",
                )
            return earlier[:top]
        return self.extract(self.profile(), top)

    def extracted(self) -> list[Task] | None:
        index = self.folder.tasks_dir / INDEX
        if not index.exists():
            return None
        names = json.loads(index.read_text(encoding="utf-8"))
        return [Task.load(self.folder.tasks_dir / name) for name in names]

    def extract(self, profile: Profile, top: int) -> list[Task]:
        from autokernel.extraction import extract

        with working("Extracting tasks …", self.out):
            tasks = extract(profile, self.path, top=top, say=lambda t: self.out.print(t, markup=False))
        self.folder.tasks_dir.mkdir(exist_ok=True)
        write_text_atomically(self.folder.tasks_dir / INDEX, json.dumps([t.dir.name for t in tasks]) + "\n")
        return tasks

    def context_of(self, task: Task) -> StrategyContext:
        """What a strategy looks at: the region of ``task`` in this process's own capture."""
        from autokernel.playbook.context import StrategyContext
        from autokernel.regions.partition import partition

        if self._regions is None:
            self._regions = {}
            for graph in self.graphs():
                for region in partition(graph).regions:
                    self._regions.setdefault(region.fingerprint, region)
        region = self._regions.get(task.fingerprint)
        if region is None:
            raise UsageError(
                f"{task.name} is not in {self.loaded.spec.model} any more: start over with --fresh"
            )
        values = dict(zip([p.name for p in task.static_inputs], region.static_values(), strict=True))
        constants = {p.name: values[p.name] for p in task.static_inputs if p.role == "constant"}
        return StrategyContext(task, region.subgraph(), constants, self.loaded.spec.device)


def _check_model_exists(model: str) -> None:
    """The most common mistake, found before torch is imported."""
    if model.endswith((".py", ".pt", ".safetensors")) and not os.path.isfile(model):  # noqa: PTH113  Path.is_file raises for a name that is too long
        raise UsageError(f"no such model file: {model}")
