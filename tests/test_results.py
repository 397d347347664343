from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel.errors import RunFolderError
from autokernel.records import COLUMNS, Experiment
from autokernel.results import (
    HEADER,
    Journal,
    format_row,
    parse_row,
    read_results,
    results_frame,
    source_id,
    store_source,
)

NASTY = 'tab\t newline\n return\r backslash\\ literal\\t quote" end\\'


def row(**changes) -> Experiment:
    base = Experiment(
        experiment=0, tag="t", kernel_type="norm", task="01-norm-abc", status="discard", candidate="c0ffee"
    )
    return replace(base, **changes)


def test_text_of_any_kind_survives(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.tsv")
    journal.append(row(description=NASTY, reason='"starts with a quote', strategy="µ 日本 \u2028 \x0c \x85"))
    (back,) = read_results(tmp_path)
    assert back.description == NASTY
    assert back.reason == '"starts with a quote'
    assert back.strategy == "µ 日本 \u2028 \x0c \x85"
    assert (tmp_path / "results.tsv").read_bytes().count(b"\n") == 2


def test_other_readers_see_the_same_rows(tmp_path: Path) -> None:
    import csv

    journal = Journal(tmp_path / "results.tsv")
    for _ in range(3):
        journal.append(row(description='"quoted" at the start', reason="a\nb"))
    with (tmp_path / "results.tsv").open(newline="") as file:
        assert len(list(csv.DictReader(file, delimiter="\t"))) == 3


def test_unknown_is_empty_and_never_zero(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.tsv")
    journal.append(row(latency_us=float("nan"), tokens_in=0, speedup_vs_parent=None))
    line = (tmp_path / "results.tsv").read_text().split("\n")[1].split("\t")
    cells = dict(zip(COLUMNS, line, strict=True))
    assert cells["latency_us"] == "" and cells["speedup_vs_parent"] == "" and cells["tokens_in"] == "0"
    (back,) = read_results(tmp_path)
    assert back.latency_us is None and back.tokens_in == 0


def test_numbers_come_back_typed(tmp_path: Path) -> None:
    written = row(latency_us=12.3456789, error_ratio=float("inf"), tokens_out=7, ci_low=1.0)
    back = parse_row(list(COLUMNS), format_row(written))
    assert back.latency_us == pytest.approx(12.3456789, rel=1e-8)
    assert back.error_ratio == float("inf")
    assert type(back.tokens_out) is int and type(back.ci_low) is float


def test_rows_are_numbered_and_reopening_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    first = Journal(path)
    assert [first.append(row()).experiment for _ in range(2)] == [1, 2]
    second = Journal(path)
    assert second.append(row()).experiment == 3
    assert first.append(row()).experiment == 4, "a row of another process is seen before numbering"
    assert [r.experiment for r in read_results(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_torn_last_line_is_set_aside(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.tsv"
    journal = Journal(path)
    for _ in range(2):
        journal.append(row(description="whole"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    torn = whole[:-cut].rsplit(b"\n", 1)[1]
    assert len(read_results(path)) == 1, "a reader leaves the torn line out"
    assert path.read_bytes() == whole[:-cut], "and changes nothing"
    again = Journal(path)
    assert again.torn is not None and again.torn.name == "results.tsv.torn-1"
    assert again.torn.read_bytes() == torn
    assert again.append(row()).experiment == 2
    assert [r.experiment for r in read_results(path)] == [1, 2]


def test_last_line_of_zero_bytes_is_torn_too(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    Journal(path).append(row())
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 80 + b"\n")
    again = Journal(path)
    assert len(again.rows) == 1 and again.torn is not None
    assert path.read_bytes() == whole


def test_torn_names_are_not_reused(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    for n in (1, 2):
        Journal(path)
        with path.open("ab") as file:
            file.write(f"torn {n}".encode())
        assert Journal(path).torn == tmp_path / f"results.tsv.torn-{n}"
    assert (tmp_path / "results.tsv.torn-1").read_bytes() == b"torn 1"


def test_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    Journal(path).append(row())
    text = path.read_text()
    path.write_text(text + "garbage\n" + text.split("\n")[1] + "\n")
    with pytest.raises(RunFolderError, match="line 3 is damaged"):
        Journal(path)
    assert "garbage" in path.read_text()


def test_older_columns_are_readable_but_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    path.write_text(
        "experiment\ttag\tkernel_type\tthroughput_tflops\tlatency_us\tcorrectness\n"
        "0\tbaseline\tmatmul\t1.5\t20.25\tPASS\n"
    )
    (back,) = read_results(path)
    assert (back.kernel_type, back.latency_us, back.correctness, back.status) == ("linear", 20.25, "PASS", "")
    with pytest.raises(RunFolderError, match="--fresh"):
        Journal(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [("a\tb\n", "not a results.tsv"), (HEADER + "\tfuture\n", "'future'"), ("", "is empty")],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "results.tsv"
    path.write_text(text)
    with pytest.raises(RunFolderError, match=what):
        read_results(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="can't read"):
        read_results(tmp_path)
    with pytest.raises(RunFolderError, match="can't write"):
        Journal(tmp_path / "nowhere" / "results.tsv")


def test_frame_is_typed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.tsv")
    journal.append(row(latency_us=2.5, tokens_in=10))
    journal.append(row(status="crash", reason="boom"))
    frame = results_frame(tmp_path)
    assert list(frame.columns) == list(COLUMNS)
    assert str(frame.dtypes["tokens_in"]) == "Int64" and str(frame.dtypes["latency_us"]) == "float64"
    assert str(frame.dtypes["reason"]) == "string"
    assert frame["tokens_in"].isna().tolist() == [False, True]
    assert frame.loc[frame.status == "crash", "reason"].item() == "boom"


def _append_many(path: Path, count: int) -> None:
    journal = Journal(path)
    for _ in range(count):
        journal.append(row(description="x" * 300))


def test_concurrent_writers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(path, 25)) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert [r.experiment for r in read_results(path)] == list(range(1, 101))


def test_a_refused_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A full disk, played by a file-size limit in a child process."""
    path = tmp_path / "results.tsv"
    Journal(path).append(row())
    before = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, len(before) + 50))
        try:
            Journal(path).append(row(description="y" * 500))
        except RunFolderError as error:
            os._exit(0 if "can't write" in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert path.read_bytes() == before


def test_sources_are_named_by_content(tmp_path: Path) -> None:
    name, path = store_source(tmp_path, "BACKEND = 'torch'\r\n")
    assert path == tmp_path / "attempts" / f"{name}.py" and name == source_id("BACKEND = 'torch'\r\n")
    assert path.read_bytes() == b"BACKEND = 'torch'\r\n"
    assert store_source(tmp_path, "BACKEND = 'torch'\r\n") == (name, path)
    assert len(list(path.parent.iterdir())) == 1


def test_tried_forgets_infra_errors(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.tsv")
    journal.append(row(candidate="a"))
    journal.append(row(candidate="b", status="infra_error"))
    journal.append(row(candidate="c", task="other"))
    assert journal.tried("01-norm-abc") == {"a"}
