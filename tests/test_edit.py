from __future__ import annotations

import ast
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autokernel.proposers import edit as edit_module
from autokernel.proposers.edit import MAX_SOURCE, RESERVED, Edit, extract_edit, tags
from autokernel.proposers.provider import Reply
from autokernel.proposers.search_replace import apply_blocks, find_blocks
from autokernel.results import format_row

KERNEL = 'BACKEND = "torch"\n\n\ndef kernel_fn(x):\n    return x.relu()\n'
BETTER = KERNEL.replace("x.relu()", "x.clamp_min(0)")


def block(code: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{code}\n{fence}\n"


def change(search: str, replace: str) -> str:
    return f"<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n"


def edit_of(text: str, finish: str = "stop", current: str = KERNEL) -> Edit:
    return extract_edit(Reply(text, finish=finish), current)  # type: ignore[arg-type]


def taken(text: str, current: str = KERNEL) -> str:
    edit = edit_of(text, current=current)
    assert edit.source is not None and edit.kind == "file" and not edit.problem, edit.problem
    return edit.source


# --- a whole file ----------------------------------------------------------------------------------------


def test_a_good_reply() -> None:
    text = (
        "**BOTTLENECK:** dram - 41 % of copy bandwidth\nMECHANISM: one pass instead of two.\n"
        "PREDICTION: 12 µs\nSTRATEGY: Split-K, fused epilogue\n" + block(BETTER)
    )
    edit = edit_of(text)
    assert edit.source == BETTER
    assert edit.strategy == "split-k,fused-epilogue"
    assert (
        edit.description
        == "one pass instead of two (bound by dram - 41 % of copy bandwidth; predicted 12 µs)"
    )


def test_the_older_form_of_a_description_is_read() -> None:
    text = "**STRATEGY:** fuse\nDESCRIPTION: bound by latency: split K.\n" + block(BETTER)
    assert edit_of(text).description == "bound by latency: split K"


QUOTING = BETTER + 'S = """\n```not a fence```\n"""\n'
DOCUMENTED = '"""A kernel.\n\n```\nexample\n```\n\nand\n\n```python\nmore\n```\n"""\n' + BETTER


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (block(BETTER, ""), BETTER),
        (block(BETTER, "py", "~~~"), BETTER),
        (block(BETTER, "Python"), BETTER),
        (block(QUOTING, "python", "````"), QUOTING),
        ("Plan:\n" + block("for (;;) {}", "cpp") + "Then:\n" + block(BETTER), BETTER),
        ("As of now:\n" + block("x = kernel_fn(y)") + "New:\n" + block(BETTER), BETTER),
        (block(BETTER) * 2, BETTER),
        (block(BETTER).replace("\n", "\r\n"), BETTER),
        (block(DOCUMENTED), DOCUMENTED),
        (block(BETTER.replace("    ", "\t")), BETTER.replace("    ", "\t")),
        ("<think>\nFirst I try\n" + block(KERNEL + "# draft") + "</think>\n" + block(BETTER), BETTER),
        ("我会把两次遍历合并成一次。\n策略:融合\n" + block(BETTER), BETTER),
        ("Long prose. " * 400 + "\n" + block(BETTER) + "More prose. " * 400, BETTER),
        (json.dumps({"strategy": "fuse", "code": BETTER}), BETTER),
        (block(json.dumps({"kernel.py": BETTER}), "json"), BETTER),
        (block("def kernel_fn(x:\n  broken"), "def kernel_fn(x:\n  broken\n"),
    ],
    ids=["bare", "tildes", "capital", "longer-fence", "cpp-beside", "snippet-beside", "twice", "crlf",
         "fences-in-docstring", "tabs", "thoughts", "chinese", "prose", "json", "json-fenced",
         "syntax-error"],
)  # fmt: skip
def test_the_file_is_taken_whatever_is_around_it(text: str, source: str) -> None:
    assert taken(text) == source


@pytest.mark.parametrize(
    ("text", "finish", "kind", "problem"),
    [
        ("", "stop", "empty", "empty"),
        (" \n\t", "stop", "empty", "empty"),
        ("", "length", "truncated", "before it began"),
        ("<think> let me see " + block(BETTER), "stop", "empty", "empty"),
        ("I can't help with that.", "refused", "refused", "refused: I can't help"),
        ("```python\n" + BETTER, "stop", "truncated", "cut off"),
        (block(BETTER), "length", "truncated", "cut off"),
        ("<<<<<<< SEARCH\n    return", "length", "truncated", "cut off"),
        ("Sorry, no.", "stop", "unusable", "neither a python block with a kernel_fn nor"),
        ("抱歉,我不明白。", "stop", "unusable", "抱歉"),
        (block("x = 1"), "stop", "unusable", "no python block that defines kernel_fn"),
        (block("void kernel_fn();", "cpp"), "stop", "unusable", "neither"),
        (block(BETTER) + block(BETTER + "# two"), "stop", "unusable", "2 different files"),
        (block(BETTER + "#" * MAX_SOURCE), "stop", "unusable", "characters long"),
        (block(BETTER + "#" * 400_000), "stop", "unusable", "characters long"),
        (block(BETTER + "\0"), "stop", "unusable", "NUL"),
        (block(KERNEL), "stop", "unusable", "unchanged"),
        (block("--- a/kernel.py\n+++ b/kernel.py\n@@ -4 +4 @@\n-a\n+b", "diff"), "stop", "unusable", "diffs"),
        ("--- a/kernel.py\n+++ b/kernel.py\n@@ -4,1 +4,1 @@\n-a\n+b", "stop", "unusable", "diffs"),
        (block(BETTER) + change("    return x.relu()", "    return x"), "stop", "unusable", "holds both a"),
        (json.dumps({"a": BETTER, "b": BETTER + "#"}), "stop", "unusable", "neither"),
    ],
)  # fmt: skip
def test_replies_without_a_usable_file(text: str, finish: str, kind: str, problem: str) -> None:
    edit = edit_of(text, finish)
    assert (edit.source, edit.kind) == (None, kind) and problem in edit.problem
    assert "\n" not in edit.problem and len(edit.problem) < 500


# --- search/replace --------------------------------------------------------------------------------------

SOURCE = "import torch\n\nA = 1\nB = 2\n\n\ndef kernel_fn(x):\n    y = x + A\n    return y * B\n"


def test_blocks_are_applied_in_any_order_and_in_any_dress() -> None:
    expected = SOURCE.replace("A = 1", "A = 3").replace("    return y * B", "    y = y * B\n    return y")
    first, second = change("A = 1", "A = 3"), change("    return y * B", "    y = y * B\n    return y")
    for text in (
        first + second,
        second + first,
        "MECHANISM: more\n" + block(first + second, "python"),
        block(first) + "and\n" + block(second),
        "```\n" + first + second,  # the fence was forgotten, the blocks are whole
        (first + second).replace("\n", "\r\n"),
        (first + second).replace("<<<<<<<", "<<<<<").replace("=======", "====="),
    ):
        assert taken(text, SOURCE) == expected


def test_lines_can_go_and_whole_functions_come() -> None:
    assert taken(change("A = 1\nB = 2", "B = 2\nA = 1"), SOURCE).startswith(
        "import torch\n\nB = 2\nA = 1\n\n"
    )
    gone = taken("<<<<<<< SEARCH\nB = 2\n=======\n>>>>>>> REPLACE", SOURCE)
    assert "B = 2" not in gone and gone.endswith("y * B\n")
    whole = change(SOURCE.rstrip("\n"), BETTER.rstrip("\n"))
    assert taken(block(whole), SOURCE) == BETTER, "a replacement that defines kernel_fn is no second file"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (change("A = 9", "A = 3"), "block 1: the file has no line 'A = 9'; the closest is line 3: 'A = 1'"),
        (change("zzzzzzzzzzzz", "A = 3"), "no line of the file is like 'zzzzzzzzzzzz'"),
        (change("\ty = x + A", "\ty = x"),
         "1: it differs in white space from the file's line 8: '    y = x + A'"),
        (change("    y = x + A\n    return y", "    return x"),
         "then the file has '    return y * B' where the block has '    return y'"),
        (change("", "A = 3"), "block 1 searches for nothing"),
        (change("", "A = 3").replace("SEARCH\n\n", "SEARCH\n"), "block 1 searches for nothing"),
        (change("A = 1", "A = 1"), "change nothing"),
        (change("A = 1\nB = 2", "C = 1") + change("B = 2", "B = 3"), "blocks 1 and 2 change the same lines"),
        (change("A = 1", "A = 2") * 2, "blocks 1 and 2 change the same lines"),
        (change("A = 1", "AA = 5") + change("AA = 5", "A = 6"), "2: its lines are what an earlier"),
        ("<<<<<<< SEARCH\nA = 1\n>>>>>>> REPLACE", "block 1 has no ======= line"),
        ("<<<<<<< SEARCH\nA = 1\n=======\nA = 2\n", "block 1 has no >>>>>>> REPLACE line"),
        (change("A = 1", "A = 2") + "<<<<<<< SEARCH\nB = 2\n", "block 2 has no >>>>>>> REPLACE line"),
        (change("A = 1", "A = 2") * 60, "60 blocks: send the whole file"),
    ],
)  # fmt: skip
def test_a_block_that_does_not_fit_says_where(text: str, problem: str) -> None:
    edit = edit_of(text, current=SOURCE)
    assert edit.source is None and edit.kind == "unusable" and problem in edit.problem


def test_an_ambiguous_block_says_how_often() -> None:
    twice = SOURCE + "\n\ndef other(x):\n    y = x + A\n"
    edit = edit_of(change("    y = x + A", "    y = x"), current=twice)
    assert "block 1 occurs 2 times (lines 8 and 13): add lines around it" in edit.problem
    assert taken(change("    y = x + A\n    return y * B", "    return x"), twice) == twice.replace(
        "    y = x + A\n    return y * B", "    return x"
    )


def test_part_of_a_line_is_no_match() -> None:
    assert edit_of(change("A", "C"), current=SOURCE).source is None


# --- tags and texts --------------------------------------------------------------------------------------


def test_tags_are_short_and_not_the_loops_own() -> None:
    assert tags("Split-K, larger tiles; `Fused`/x + y") == "split-k,larger-tiles,fused,x"
    assert tags("a, a, b") == "a,b" and tags("!!!") == "" and len(tags("z" * 900)) == 40
    for name in RESERVED:
        assert tags(f"{name}, mine") == "mine"


def test_what_goes_into_a_row_and_on_a_terminal_is_one_harmless_line() -> None:
    text = "MECHANISM: \x1b[2Jclear\u2028the\tscreen\x07\nSTRATEGY: \x1b[31mred\n" + block(BETTER)
    edit = edit_of(text)
    assert edit.description == "[2Jclear the screen" and edit.strategy == "31mred"
    assert len(edit_of("MECHANISM: " + "x" * 9000 + "\n" + block(BETTER)).description) <= 300


FORBIDDEN = {"subprocess", "pty", "ctypes", "importlib", "runpy", "eval", "exec", "compile", "__import__",
             "os", "popen", "execv", "spawnv"}  # fmt: skip
PARSED_BY = (
    "edit", "search_replace", "llm", "asking", "prompt", "evidence", "reflection", "transcript", "jsonl",
    "clip",
)  # fmt: skip


@pytest.mark.parametrize("name", PARSED_BY)
def test_nothing_of_a_reply_can_be_run(name: str) -> None:
    """What handles replies names nothing that starts a process or evaluates text (but `re.compile`)."""
    tree = ast.parse((Path(edit_module.__file__).with_name(f"{name}.py")).read_text())
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) != "re.compile":
            used.add(node.attr)
    allowed = {"os"} if name == "jsonl" else set()
    assert not (used & FORBIDDEN) - allowed


# --- whatever comes --------------------------------------------------------------------------------------

PIECES = st.sampled_from([
    "```", "```python", "````", "~~~", "```json", "```diff", "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE",
    "def kernel_fn(x):", "    return x", "A = 1", "B = 2", '"""', "'''", "", "<think>", "</think>", "{",
    '{"a": "b"}',
    "STRATEGY: a, b", "MECHANISM: " + "y" * 50, "@@ -1 +1 @@", "\r", "\0", "\ud800", "((((",
    "\\N{x}", '"\\d"',
])  # fmt: skip


@settings(max_examples=300, deadline=2000)
@given(
    st.lists(st.one_of(PIECES, st.text(max_size=40)), max_size=60).map("\n".join),
    st.sampled_from(["stop", "length", "refused"]),
    st.sampled_from([SOURCE, "", "\n"]),
)
def test_any_reply_gives_a_file_or_a_reason(text: str, finish: str, current: str) -> None:
    edit = edit_of(text, finish, current)
    assert (edit.source is None) == (edit.kind != "file") == bool(edit.problem)
    assert "\n" not in edit.problem + edit.strategy + edit.description
    if edit.source is not None:
        assert 0 < len(edit.source) <= MAX_SOURCE and "\r" not in edit.source and "\0" not in edit.source


@settings(max_examples=100, deadline=2000)
@given(st.lists(st.sampled_from(["a", "b", "c", " a", ""]), min_size=1, max_size=12), st.data())
def test_a_unique_run_of_lines_can_always_be_replaced(lines: list[str], data: st.DataObject) -> None:
    source = "\n".join([*lines, "end", ""])
    start = data.draw(st.integers(0, len(lines)))
    search = [*lines, "end"][start:]
    result, problem = apply_blocks(source, find_blocks(change("\n".join(search), "new")).blocks)
    assert (result, problem) == ("\n".join([*lines[:start], "new", ""]), "")


@pytest.mark.parametrize(
    "text",
    [
        "```python\n" * 40_000,
        "```\n" * 90_000,
        ("```python\n'''\n```\n" * 20_000)[:390_000],
        "<<<<<<< SEARCH\n" + "A = 1\n" * 50_000 + "=======\n>>>>>>> REPLACE\n",
        change("A = 1\n" * 60 + "x", "y") * 50,
        "*" * 390_000,
        "\n" * 390_000,
        "STRATEGY:" * 40_000,
        "{" * 390_000,
        "```python\n" + "(" * 150_000 + "'''\n```\n",
        "```python\ndef kernel_fn(): '''\n```\n" + "-" * 150_000 + "1\n```\n",
    ],
    ids=range(11),
)
def test_no_reply_takes_long(text: str) -> None:
    begin = time.process_time()
    edit_of(text, current="A = 1\n" * 3000)
    assert time.process_time() - begin < 4


def test_format_row_is_fine_with_any_of_it() -> None:
    from autokernel.records import Experiment

    edit = edit_of("MECHANISM: a\tb\ud800\nSTRATEGY: x\n" + block(BETTER))
    row = Experiment(1, "t", "norm", status="discard", description=edit.description, strategy=edit.strategy)
    assert "\n" not in format_row(row)
