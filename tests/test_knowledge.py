"""The knowledge base: pages that parse, entries that are found, and patterns that compile."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.playbook import knowledge
from autokernel.records import FAMILIES, Bound

BACKENDS = ("torch", "triton", "cuda", "cutlass", "cpp")
BOUNDS = get_args(Bound)
ENTRIES = knowledge.entries()


def code(entry: knowledge.Entry, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", entry.text, re.MULTILINE | re.DOTALL)


def test_there_is_a_page_for_every_backend() -> None:
    assert {b for e in ENTRIES for b in e.backends} == set(BACKENDS)
    assert len({e.id for e in ENTRIES}) == len(ENTRIES) > 50


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_every_entry_says_when_when_not_and_whence(entry: knowledge.Entry) -> None:
    assert set(entry.backends) <= set(BACKENDS) and set(entry.bounds) <= set(BOUNDS)
    assert set(entry.families) <= set(FAMILIES)
    assert entry.signs and "**Backfires**" in entry.text and "**Source.**" in entry.text


@pytest.mark.parametrize("entry", [e for e in ENTRIES if code(e, "python")], ids=lambda e: e.id)
def test_python_patterns_parse(entry: knowledge.Entry) -> None:
    for text in code(entry, "python"):
        ast.parse(text)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_patterns_compile(tmp_path: Path) -> None:
    for entry in (e for e in ENTRIES if "cpp" in e.backends):
        for number, text in enumerate(code(entry, "cpp")):
            path = tmp_path / f"{entry.id}-{number}.cpp"
            path.write_text(text)
            subprocess.run(["g++", "-fsyntax-only", "-fopenmp", "-Wall", "-Werror", str(path)], check=True)


def test_what_fits_comes_first() -> None:
    found = knowledge.relevant(backends=["cpp"], family="norm", bound="dram")
    assert found[0].id == "cpp-fuse"
    assert all("cpp" in e.backends and (not e.families or "norm" in e.families) for e in found)


@given(
    st.lists(st.sampled_from(BACKENDS), unique=True),
    st.sampled_from([*FAMILIES, "unheard of"]),
    st.sampled_from(BOUNDS),
    st.integers(0, 20_000),
)
def test_a_choice_is_bounded_and_the_same_again(
    backends: list[str], family: str, bound: str, limit: int
) -> None:
    found = knowledge.relevant(backends=backends, family=family, bound=bound, limit_chars=limit)
    assert len(knowledge.render(found)) <= limit
    assert found == knowledge.relevant(backends=backends, family=family, bound=bound, limit_chars=limit)
