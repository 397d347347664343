"""The comparator's limits on honest and dishonest variants of every region family: none may be misjudged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "judge_limits.py"
QUICK = {"norm", "linear", "softmax", "rope"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_limits", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["judge_limits"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


judge_limits = load()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, id=f.name, marks=[] if f.name in QUICK else [pytest.mark.slow])
        for f in judge_limits.FAMILIES
    ],
)
def test_no_variant_is_misjudged(family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_limits, "SEEDS", 2)
    rows = [
        row for dtype in ("float32", "float16") for row in judge_limits.study(family, dtype, "cpu", tmp_path)
    ]
    wrong = [(r.variant.name, r.dtype, r.why) for r in rows if r.misjudged]
    assert rows and not wrong, wrong
    assert {r.variant.honest for r in rows} >= {True, False}
    assert f"| {family.name} | " in judge_limits.table(rows, "cpu")


def test_every_family_of_regions_is_in_it() -> None:
    from autokernel.records import FAMILIES

    assert {f.name for f in judge_limits.FAMILIES} == set(FAMILIES) - {"other", "model"}
