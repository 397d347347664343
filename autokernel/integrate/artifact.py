"""The artifact of a run: kept kernels and how to run them, in a folder that can be copied.

``optimized/manifest.json`` names every kernel file with its SHA-256, the fingerprint it stands for, its
ports and the executor.  A file whose hash differs is not loaded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel.errors import UsageError
from autokernel.records import Port, Task

if TYPE_CHECKING:
    from torch import nn

    from autokernel.capture.graph import Graph
    from autokernel.integrate.kernels import Kernel
    from autokernel.regions.region import Region

FORMAT = 1


@dataclass
class Engagement:
    """Which kernels found call sites, and why others did not."""

    sites: Counter[str] = field(default_factory=Counter)
    graphs: int = 0
    reasons: list[str] = field(default_factory=list)
    _forms: dict[tuple[str, ...], set[str]] = field(default_factory=dict)

    def add(self, graph: Graph, engaged: Sequence[tuple[Region, Kernel]]) -> None:
        from autokernel.capture.nodes import op_name

        self.graphs += 1
        for _, kernel in engaged:
            self.sites[kernel.name] += 1
            kernel.calls += 1
        code = tuple(op_name(node) for node in graph.nodes)
        if engaged:
            self._forms[code] = _form(graph)
        elif code in self._forms:
            self.left(_difference(self._forms[code], _form(graph)))

    def skipped(self, reason: str) -> None:
        """A graph was compiled without kernels."""
        self.graphs += 1
        self.left(reason)

    def left(self, reason: str) -> None:
        """Kernels don't serve a call, which runs the original code."""
        if reason not in self.reasons:
            self.reasons.append(reason)


def _form(graph: Graph) -> set[str]:
    """Dtypes and devices of the floating-point inputs."""
    from torch import Tensor

    tensors = [x for x in graph.example_inputs if isinstance(x, Tensor)]
    floats = {str(x.dtype).removeprefix("torch.") for x in tensors if x.is_floating_point()}
    return floats | {x.device.type for x in tensors}


def _difference(before: set[str], now: set[str]) -> str:
    if before != now:
        return (
            f"it is {'/'.join(sorted(now - before or now))}, the kernels are for {'/'.join(sorted(before))}"
        )
    return "shapes, strides or constants are others than the kernels were made for"


@dataclass
class Artifact:
    folder: Path
    executor: str
    kernels: dict[str, Kernel]
    manifest: dict[str, Any]
    engagement: Engagement = field(default_factory=Engagement)

    def summary(self) -> str:
        """One line per kernel: call sites, or why there is none; loud when nothing engaged."""
        lines = []
        for kernel in self.kernels.values():
            count = self.engagement.sites[kernel.name]
            expected = next(k["call_count"] for k in self.manifest["kernels"] if k["name"] == kernel.name)
            if count:
                note = "" if count == expected else f" (was {expected} when it was cut)"
                lines.append(f"  {kernel.name} [{kernel.backend}]: {count} call sites{note}")
            else:
                why = (
                    self.engagement.reasons[-1]
                    if self.engagement.reasons
                    else "no region with its fingerprint"
                )
                lines.append(f"  {kernel.name} [{kernel.backend}]: not engaged: {why}")
        if self.kernels and not self.engagement.sites:
            head = "autokernel: NO kernel engaged; the model runs its original code"
        else:
            head = f"autokernel: {sum(self.engagement.sites.values())} call sites engaged ({self.executor})"
        return "\n".join([head, *lines])


def find_manifest(run: str | Path) -> Path:
    path = Path(run)
    for candidate in (path / "optimized" / "manifest.json", path / "manifest.json"):
        if candidate.is_file():
            return candidate
    raise UsageError(
        f"{path} holds no artifact (no optimized/manifest.json): its run has not ended yet, or nothing "
        f"beat the best baseline; see: autokernel report {path}"
    )


def open_artifact(run: str | Path) -> Artifact:
    """The artifact of a run folder, or of a copied ``optimized/``; hashes are checked, kernels loaded."""
    manifest = find_manifest(run)
    return _open(manifest.resolve(), manifest.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _open(path: Path, _mtime: int) -> Artifact:
    from autokernel.integrate.kernels import Kernel

    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format") != FORMAT:
        raise UsageError(f"{path}: artifact format {manifest.get('format')}, this version reads {FORMAT}")
    kernels: dict[str, Kernel] = {}
    for entry in manifest["kernels"]:
        source = path.parent / entry["file"]
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if digest != entry["sha256"]:
            raise UsageError(f"{source} was changed after the run (its hash differs from the manifest's)")
        kernels[entry["fingerprint"]] = Kernel(
            name=entry["name"],
            family=entry["family"],
            fingerprint=entry["fingerprint"],
            source=source,
            inputs=[Port.from_json(p) for p in entry["inputs"]],
            outputs=[Port.from_json(p) for p in entry["outputs"]],
        )
    return Artifact(path.parent, manifest["executor"], kernels, manifest)


def write_artifact(
    folder: Path,
    kept: Sequence[tuple[Task, Path]],
    executor: str,
    facts: dict[str, Any],
    merges: dict[str, list[dict[str, Any]]] | None = None,
) -> Path:
    """Write ``folder`` (``runs/<run>/optimized``) for the kernels of ``kept``; returns the manifest's path.

    ``facts`` says where it was made: model, device, versions, speed-up.  ``merges`` lists, by fingerprint,
    the parameters (by name) that a kernel wants side by side in memory, one list per call site.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    entries = []
    for task, source in kept:
        text = source.read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        name = f"{task.family}_{task.fingerprint[:8]}_{digest[:8]}.py"
        (folder / name).write_bytes(text)
        entries.append(
            {
                "name": task.name,
                "family": task.family,
                "fingerprint": task.fingerprint,
                "file": name,
                "sha256": digest,
                "call_count": task.call_count,
                "module_paths": task.module_paths,
                "merges": (merges or {}).get(task.fingerprint, []),
                "inputs": [asdict(p) for p in task.inputs],
                "outputs": [asdict(p) for p in task.outputs],
            }
        )
    manifest = folder / "manifest.json"
    data = {"format": FORMAT, "executor": executor, "kernels": entries, **facts}
    partial = manifest.with_suffix(".tmp")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(manifest)
    return manifest


def load(run: str | Path, *, quiet: bool = False) -> Loader:
    """``autokernel.load("runs/gpt2")(model)`` → the model, faster, with the run's kernels in it."""
    return Loader(open_artifact(run), quiet)


@dataclass
class Loader:
    artifact: Artifact
    quiet: bool = False

    def __call__(self, model: nn.Module) -> nn.Module:
        from autokernel.integrate.loaded import attach

        return attach(model, self.artifact, say=None if self.quiet else _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
