from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from autokernel.tuner import SpaceError, defaults_of, freeze, space_of, tune

SOURCE = '''"""é before the constants: columns count bytes."""
BACKEND = "triton"
BLOCK = 64  # columns per program
SPACE = {
    "BLOCK": [32, 64, 128, 256],
    "num_warps": [1, 2, 4, 8],
    "STAGES": [1, 2, 3],
}
é = "ß"; num_warps: int = (
    4
)
STAGES = 2


def kernel_fn(x):
    BLOCK_LOCAL = BLOCK
    return x
'''


def constants(source: str) -> dict:
    scope: dict = {}
    exec(compile(source, "k", "exec"), scope)
    return {k: scope.get(k) for k in ("BLOCK", "num_warps", "STAGES", "SPACE", "é")}


def test_space_and_defaults() -> None:
    assert space_of(SOURCE) == {"BLOCK": [32, 64, 128, 256], "num_warps": [1, 2, 4, 8], "STAGES": [1, 2, 3]}
    assert defaults_of(SOURCE) == {"BLOCK": 64, "num_warps": 4, "STAGES": 2}
    assert space_of("x = 1\n") == {}


def test_freeze_rewrites_the_constants_and_nothing_else() -> None:
    frozen = freeze(SOURCE, {"BLOCK": 256, "num_warps": 8, "STAGES": 3})
    assert constants(frozen) == {"BLOCK": 256, "num_warps": 8, "STAGES": 3, "SPACE": None, "é": "ß"}
    assert space_of(frozen) == {}
    assert "BLOCK = 256  # columns per program" in frozen and "STAGES = 3  # tuned" in frozen
    before, after = ast.parse(SOURCE), ast.parse(frozen)
    assert ast.dump(before.body[-1]) == ast.dump(after.body[-1])


@pytest.mark.parametrize("value", [True, None, 0.5, "a'b\n", -3])
def test_freeze_writes_any_literal(value: object) -> None:
    source = "A = 1\nSPACE = {'A': [1]}\n"
    scope: dict = {}
    exec(freeze(source, {"A": value}), scope)  # type: ignore[dict-item]
    assert scope["A"] == value and "SPACE" not in scope


def test_freeze_with_windows_line_ends_and_shared_lines() -> None:
    source = 'A = 1; SPACE = {"A": [1, 2]}; B = 3\r\nC = 4\r\n'
    scope: dict = {}
    exec(freeze(source, {"A": 2}), scope)
    assert (scope["A"], scope["B"], scope["C"]) == (2, 3, 4) and "SPACE" not in scope


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("SPACE = {'A': [1]}\n", "not assigned"),
        ("A = 1\nA = 2\nSPACE = {'A': [1]}\n", "assigned 2 times"),
        ("A = f()\nSPACE = {'A': [1]}\n", "not a literal"),
        ("A = 1\nSPACE = make()\n", "not a literal dict"),
        ("A = 1\nSPACE = [1]\n", "not a dict"),
        ("A = 1\nSPACE = {'A': []}\n", "not a list"),
        ("A = 1\nSPACE = {'A': [[1]]}\n", "neither number nor text"),
        ("A = 1\nSPACE = {1: [1]}\n", "no name"),
        ("A = (\n", "not Python"),
    ],
)
def test_a_bad_space_says_what_is_wrong(source: str, what: str) -> None:
    with pytest.raises(SpaceError, match=what):
        tune(source, lambda text: 1.0)


def cost(source: str) -> float:
    """A bowl with its bottom at BLOCK 128, num_warps 2, STAGES 3."""
    c = constants(source)
    return 10 + abs(c["BLOCK"] - 128) / 32 + 3 * abs(c["num_warps"] - 2) + (3 - c["STAGES"])


def test_coordinate_descent_finds_the_best_within_its_budget() -> None:
    calls: list[str] = []

    def measure(source: str) -> float:
        calls.append(source)
        return cost(source)

    tuned = tune(SOURCE, measure, budget=24)  # of 48 points
    assert tuned.values == {"BLOCK": 128, "num_warps": 2, "STAGES": 3}
    assert tuned.latency_us == 10
    assert constants(tuned.source)["SPACE"] is None and cost(tuned.source) == 10
    assert len(calls) == len(set(calls)) == 24


def test_a_small_space_is_searched_whole() -> None:
    source = "A = 1\nB = 1\nSPACE = {'A': [1, 2, 3], 'B': [1, 2]}\n"
    tuned = tune(source, lambda s: 1.0 if "A = 3" in s and "B = 2" in s else 2.0, budget=6)
    assert tuned.values == {"A": 3, "B": 2} and len(tuned.measured) == 6


def test_the_known_time_of_the_start_is_not_measured_again() -> None:
    source = "A = 1\nSPACE = {'A': [1, 2]}\n"
    seen: list[str] = []
    tuned = tune(source, lambda s: seen.append(s) or 9.0, start_latency_us=5.0)
    assert len(seen) == 1 and tuned.values == {"A": 1} and tuned.latency_us == 5.0


def test_failing_points_lose() -> None:
    source = "A = 1\nSPACE = {'A': [1, 2, 3]}\n"
    tuned = tune(source, lambda s: 7.0 if "A = 2" in s else None)
    assert tuned.values == {"A": 2} and tuned.latency_us == 7.0
    hopeless = tune(source, lambda s: None)
    assert hopeless.values == {"A": 1} and hopeless.latency_us is None


def test_batches_are_compiled_before_they_are_measured() -> None:
    source = "A = 1\nSPACE = {'A': [1, 2, 3, 4]}\n"
    events: list[tuple[str, int]] = []
    tune(
        source,
        lambda s: events.append(("measure", 1)) or 1.0,
        precompile=lambda sources: events.append(("compile", len(sources))),
    )
    assert events == [("measure", 1), ("compile", 3)] + [("measure", 1)] * 3


def test_stopping_ends_the_search_and_keeps_the_best_so_far() -> None:
    seen: list[str] = []
    tuned = tune(
        SOURCE, lambda s: seen.append(s) or float(10 - len(seen)), should_stop=lambda: len(seen) >= 3
    )
    assert len(seen) == 3 and tuned.latency_us == 7.0


def test_deterministic() -> None:
    def order(seed: int) -> list:
        return [v for v, _ in tune(SOURCE, cost, budget=20, seed=seed).measured]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_points_that_do_not_fit_are_left_out() -> None:
    source = """A = 1
B = 1
SPACE = {'A': [1, 2, 4], 'B': [1, 2, 4]}
SPACE_FITS = "A * (B + 1) // 2 <= 3 and B > 1"
"""
    asked: list[tuple[int, int]] = []

    def measure(text: str) -> float:
        scope: dict[str, Any] = {}
        exec(text, scope)
        assert "SPACE_FITS" not in scope
        asked.append((scope["A"], scope["B"]))
        return 10.0 - scope["A"] * scope["B"]

    tuned = tune(source, measure, start_latency_us=20.0)
    assert sorted(asked) == [(1, 2), (1, 4), (2, 2)] and tuned.values == {"A": 1, "B": 4}


@pytest.mark.parametrize(
    ("fits", "reason"),
    [
        ("f()", "not the text"),
        ("'A <'", "not the text"),
        ("'C <= 3'", "can't have 'C'"),
        ("'open(A)'", "can't have 'open"),
        ("'A.real'", "can't have 'A.real'"),
        ("'A ** A'", "can't have"),
    ],
)
def test_malformed_fits(fits: str, reason: str) -> None:
    with pytest.raises(SpaceError, match=re.escape(reason)):
        tune(f"A = 1\nSPACE = {{'A': [1, 2]}}\nSPACE_FITS = {fits}\n", lambda _: 1.0)
