"""How much of other people's models lies in regions: a table of tests/zoo.py and tests/outside_models.

    python benchmarks/architectures.py > benchmarks/cpu/architectures.md

The models have tiny random configurations, so that nothing is downloaded: the share of ops is that of the
real model, layer by layer, but the share of time is not.  With tensors this small every op costs about the
same, and an op that would vanish beside a large matrix product counts as much as the product.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import zoo  # noqa: E402
from test_zoo import from_zoo  # noqa: E402

from autokernel.capture.graph import capture  # noqa: E402
from autokernel.capture.source import LoadedModel, SourceSpec, load  # noqa: E402
from autokernel.hardware import Ceilings  # noqa: E402
from autokernel.profiling import profile  # noqa: E402
from autokernel.regions import FAMILIES  # noqa: E402

CEILINGS = Ceilings(1e11, {"float32": 1e12})  # only regions' head-room hangs on these, and none is printed
OUTSIDE = {
    "cross_attention": "encoder–decoder", "diffusion_step": "diffusion", "moe": "experts",
    "recurrent": "recurrent", "unet": "vision",
}  # fmt: skip
COLUMNS = ("architecture", "kind", "ops", "in regions", "time in regions", "regions, by family")
NOTE = """\
By benchmarks/architectures.py.  The libraries' own classes in tiny random configurations, two layers or
so, float32; in brackets: files of tests/outside_models.  *ops* are nodes of the captured graphs that
compute or write tensors, without views and without what depends on weights alone.  *in regions* is the
share of them that lies in regions, *time in regions* the same share of eager time, which at these sizes
says little of large ones: every op takes about as long as another."""


def row(name: str, kind: str, loaded: LoadedModel) -> tuple[str, ...]:
    """One line of the table; graphs of one model are added up."""
    found = profile(loaded, capture(loaded.model, loaded.args, loaded.kwargs), ceilings=CEILINGS)
    inside, ops = (sum(counts) for counts in zip(*(p.coverage() for p in found.partitions), strict=True))
    families = Counter(r.family for p in found.partitions for r in p.regions)
    order = [*FAMILIES, "reduction"]
    listed = ", ".join(f"{n} {f}" for f, n in sorted(families.items(), key=lambda x: order.index(x[0])))
    time = sum(r.share for r in found.regions)
    return name, kind, str(ops), "all" if inside == ops else f"{inside / ops:.1%}", f"{time:.1%}", listed


def rows(folder: Path) -> Iterator[tuple[str, ...]]:
    for name, entry in zoo.ZOO.items():
        yield row(name, entry.kind, from_zoo(name, folder))
    for path in sorted((TESTS / "outside_models").glob("*.py")):
        yield row(f"({path.stem})", OUTSIDE.get(path.stem, "other"), load(SourceSpec(str(path))))


def main() -> None:
    import timm
    import transformers

    libraries = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, timm))
    threads = f"{torch.get_num_threads()} threads"
    print(f"# Architectures\n\n{platform.machine()}, cpu, {threads}, {libraries}, {date.today()}\n\n{NOTE}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as folder:
        for cells in rows(Path(folder)):
            print(f"| {' | '.join(cells)} |", flush=True)
            torch._dynamo.reset()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
