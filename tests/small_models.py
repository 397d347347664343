"""The shipped models at a size that a test can afford, loaded the way a user's file is."""

from __future__ import annotations

import shutil
from pathlib import Path

from autokernel.capture.graph import Graph, capture
from autokernel.capture.source import LoadedModel, SourceSpec, load

MODELS = Path(__file__).parents[1] / "models"

SMALL = {
    "gpt2": "GPT2(Config(vocab_size=211, context=32, layers=2, heads=2, width=32))",
    "llama": "Llama(Config(211, context=64, layers=2, heads=4, kv_heads=2, width=64, hidden=96, length=24))",
    "nano": "Nano(Config(context=48, layers=2, heads=2, width=32))",
}


def small_file(name: str, folder: Path) -> Path:
    """A model file in ``folder`` that imports the shipped one, put beside it, and builds it small."""
    shutil.copy(MODELS / f"{name}.py", folder / f"{name}_full.py")
    path = folder / f"{name}.py"
    text = f"from {name}_full import *\n\n\ndef build():\n    return {SMALL[name]}.eval()\n"
    path.write_text(text, encoding="utf-8")
    return path


def small(name: str, folder: Path, **given: str) -> LoadedModel:
    return load(SourceSpec(str(small_file(name, folder)), **given))


def graphs_of(loaded: LoadedModel) -> list[Graph]:
    return capture(loaded.model, loaded.args, loaded.kwargs)
