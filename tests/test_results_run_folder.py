from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel.errors import RunFolderError
from autokernel.results import Journal
from autokernel.run_folder import RunFolder, RunRecord, run_stem

RECORD = RunRecord(
    arguments={"model": "models/a.py", "dtype": "float16", "input_shapes": ["1,8"], "device": "cpu"},
    identity="abc",
    versions={"torch": "2.11.0"},
    device={"name": "some CPU"},
)


def test_a_run_is_claimed_once_and_goes_on(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs" / "a") as folder:
        assert folder.claim(RECORD) is False
        written = (folder.path / "run.json").read_text()
    with RunFolder(tmp_path / "runs" / "a") as folder:
        assert folder.claim(RECORD) is True
        assert (folder.path / "run.json").read_text() == written


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arguments": {**RECORD.arguments, "model": "models/b.py"}}, "is a run of models/a.py"),
        ({"arguments": {**RECORD.arguments, "dtype": None}}, "--dtype float16, not none"),
        ({"arguments": {**RECORD.arguments, "input_shapes": ["2,8"]}}, "--input-shape 1,8, not 2,8"),
        ({"identity": "changed"}, "has changed"),
        ({"versions": {"torch": "2.15.0"}}, "torch 2.11.0, here it is 2.15.0"),
        ({"device": {"name": "another CPU"}}, "device some CPU"),
    ],
)
def test_another_run_is_refused_in_one_line_with_advice(tmp_path: Path, change: dict, what: str) -> None:
    with RunFolder(tmp_path / "r") as folder:
        folder.claim(RECORD)
    with RunFolder(tmp_path / "r") as folder, pytest.raises(RunFolderError, match=what) as caught:
        folder.claim(replace(RECORD, **change))
    text = str(caught.value)
    assert "--run" in text and "--fresh" in text and "\n" not in text


def test_older_format(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.claim(RECORD)
    data = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**data, "format": 0}))
    with RunFolder(tmp_path) as folder, pytest.raises(RunFolderError, match="format 0"):
        folder.claim(RECORD)


def test_results_without_run_json_are_an_older_format(tmp_path: Path) -> None:
    Journal(tmp_path / "results.tsv")
    with pytest.raises(RunFolderError, match="older format"):
        RunFolder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_run_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with RunFolder(tmp_path) as folder, pytest.raises(RunFolderError, match="damaged"):
        folder.claim(RECORD)


@pytest.mark.parametrize("fresh", [False, True])
def test_somebody_elses_folder_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder(tmp_path, fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(RunFolderError, match=r"can't write in the run folder.*--run"):
            RunFolder(place)


def test_fresh_moves_the_old_run_aside(tmp_path: Path) -> None:
    place = tmp_path / "r"
    for n in (1, 2):
        with RunFolder(place) as folder:
            folder.claim(replace(RECORD, identity=f"run {n}"))
        with RunFolder(place, fresh=True) as folder:
            assert folder.moved_to == tmp_path / f"r.old-{n}"
            assert not (place / "run.json").exists()
        assert json.loads((tmp_path / f"r.old-{n}" / "run.json").read_text())["identity"] == f"run {n}"


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    code = f"import pathlib, autokernel.run_folder as r; r.RunFolder(pathlib.Path({str(tmp_path)!r}))"
    with RunFolder(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "another autokernel (process" in other.stderr
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ("models/gpt2.py", "gpt2"),
        ("pkg.mod:make", "make"),
        ("hf:org/Some-Name", "some-name"),
        ("/data/llama/", "llama"),
        ("a b.py", "a_b"),
        ("..", "run"),
    ],
)
def test_run_stem(model: str, stem: str) -> None:
    assert run_stem(model) == stem


def test_a_command_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    RunFolder(path).close()
    assert not path.exists()
    path.mkdir(parents=True)
    RunFolder(path).close()
    assert path.is_dir()  # it was there before
    folder = RunFolder(tmp_path / "b")
    (folder.path / "run.json").write_text("{}")
    folder.close()
    assert (tmp_path / "b" / "run.json").exists()
