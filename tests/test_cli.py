from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel.cli import go_on_command, main
from autokernel.errors import UsageError
from autokernel.optimize import parse_budget
from autokernel.records import COLUMNS, Experiment
from autokernel.report.summary import summarize
from autokernel.results import Journal

ROOT = Path(__file__).resolve().parent.parent
VERBS = ("doctor", "profile", "extract", "optimize", "bench", "report")
HEAVY = ("torch", "pandas", "openai", "anthropic", "numpy", "triton", "safetensors")


def run(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, without an installed package."""
    return subprocess.run(
        [sys.executable, "-m", "autokernel", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1", **env},
        timeout=120,
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command line in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, out, err


# --- start-up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["autokernel", "autokernel.cli", "autokernel.capture.source", "autokernel.report.terminal"]
)
def test_importing_brings_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_is_quick_and_lists_the_verbs() -> None:
    times = [9.0]
    while min(times) >= 0.5 and len(times) <= 10:  # a busy machine may take a few goes
        start = time.perf_counter()
        done = run("--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0
    assert min(times) < 0.5, times
    for verb in VERBS:
        assert verb in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0 and "--json" in out


def test_report_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path)
    code = (
        "import sys\nfrom autokernel.cli import main\n"
        f"try:\n    main(['report', {str(tmp_path)!r}])\nfinally:\n"
        f"    print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


# --- bad input: one line, exit code 2, no traceback --------------------------------------------------------

BAD = {
    "no such model": ["optimize", "no/such.py"],
    "no such model to profile": ["profile", "no/such.py", "--json"],
    "no such model to extract": ["extract", "no/such.py"],
    "unknown verb": ["optimise", "x.py"],
    "unknown flag": ["optimize", "x.py", "--nope"],
    "missing argument": ["optimize"],
    "not a number": ["optimize", "x.py", "--top", "many"],
    "top of nothing": ["optimize", "x.py", "--top", "0"],
    "bad budget": ["optimize", "MODEL", "--budget", "soon"],
    "bad device name": ["optimize", "MODEL", "--device", "gpu"],
    "unknown provider": ["optimize", "MODEL", "--llm", "nobody:x"],
    "llm without model": ["optimize", "MODEL", "--llm", "openai"],
    "no key": ["optimize", "MODEL", "--llm", "openai:gpt"],
    "nobody proposes": ["optimize", "MODEL", "--no-playbook"],
    "no recording": ["optimize", "MODEL", "--llm", "replay:missing.jsonl"],
    "not a model": ["optimize", "EMPTY"],
    "malformed shape": ["optimize", "EMPTY", "--class-name", "Net", "--input-shape", "1,x"],
    "no run": ["report", "missing"],
    "not a results file": ["report", "MODEL"],
    "no task": ["bench", "KERNEL"],
    "both task and ref": ["bench", "KERNEL", "--task", ".", "--ref", "MODEL"],
    "not a task": ["bench", "KERNEL", "--task", "."],
    "no kernel": ["bench", "missing.py", "--ref", "MODEL"],
}
MODEL = """\
import torch

def build():
    return torch.nn.Linear(4, 4)

def example_inputs(model):
    return (torch.randn(2, 4),)
"""
KERNEL = 'BACKEND = "torch"\n\ndef kernel_fn(x):\n    return x\n'


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("MODEL.py").write_text(MODEL)
    Path("EMPTY.py").write_text("")
    Path("KERNEL.py").write_text(KERNEL)
    words = [f"{w}.py" if w in ("MODEL", "EMPTY", "KERNEL") else w for w in BAD[name]]
    code, out, err = call(capsys, *words)
    lines = [line for line in err.splitlines() if line.startswith("autokernel: ")]
    assert code == 2, (out, err)
    assert len(lines) == 1 and "Traceback" not in err and len(lines[0]) > 25, err
    assert out == ""
    assert not Path("results.tsv").exists()


def test_a_missing_device_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "m.py").write_text(MODEL)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    code, _, err = call(
        capsys,
        "optimize",
        str(tmp_path / "m.py"),
        "--device",
        f"cuda:{count + 3}",
        "--run",
        str(tmp_path / "r"),
    )
    assert code == 2 and "--device cuda:" in err and "Traceback" not in err


def test_run_folder_errors_reach_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "file").write_text("")
    code, _, err = call(
        capsys, "optimize", str(tmp_path / "m.py"), "--device", "cpu", "--run", str(tmp_path / "file")
    )
    assert code == 2 and "can't write in the run folder" in err
    old = tmp_path / "old"
    old.mkdir()
    (old / "run.json").write_text('{"format": 0}')
    code, _, err = call(capsys, "optimize", str(tmp_path / "m.py"), "--device", "cpu", "--run", str(old))
    assert code == 2 and "run format 0" in err and "--fresh" in err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\xff\xfe\x00binary", "is not UTF-8"),
        (b"BACKEND = 3\ndef kernel_fn(x): return x\n", "must be a str"),
        (b"BACKEND = 'fortran'\ndef kernel_fn(x): return x\n", "unknown BACKEND 'fortran'"),
        (b"BACKEND = 'torch'\n", "no kernel_fn"),
    ],
)
def test_what_can_be_no_kernel_is_exit_code_2(
    content: bytes,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.py").write_bytes(content)
    Path("ref.py").write_text(REFERENCE)
    code, _, err = call(capsys, "bench", "k.py", "--ref", "ref.py", "--device", "cpu")
    assert code == 2 and what in err
    assert not Path("results.tsv").exists()


REFERENCE = """\
import torch

class Model(torch.nn.Module):
    def forward(self, x, y):
        return torch.relu(x) * y

def get_inputs():
    return [torch.randn(64, 96), torch.randn(64, 96)]

def get_init_inputs():
    return []
"""


WEIGHTS = """\
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(2, 2)

    def forward"""


def test_a_syntax_error_is_a_wrong_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.py").write_text("BACKEND = 'torch'\ndef kernel_fn(x:\n")
    Path("ref.py").write_text(REFERENCE)
    code, out, _ = call(capsys, "bench", "k.py", "--ref", "ref.py", "--device", "cpu", "--json")
    data = json.loads(out)
    assert code == 1 and data["status"] == "compile_error" and "line 2" in data["reason"]
    assert set(data) == {*COLUMNS, "stages"}
    assert data["stages"]["parse"]["passed"] is False
    assert len(Path("results.tsv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\n", "has no Model"),
        ("raise ValueError('boom')\n", "ValueError: boom"),
        (REFERENCE.replace("torch.randn(64, 96)]", "3]"), "tensors only"),
        (REFERENCE.replace("    def forward", WEIGHTS), "parameters"),
        (REFERENCE.replace("return torch.relu(x) * y", "return 'no'"), "must return a tensor"),
        (REFERENCE.replace("torch.relu(x) * y", "x @ y"), "fails: RuntimeError"),
    ],
)  # fmt: skip
def test_a_bad_reference_is_one_line(
    text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.py").write_text(KERNEL)
    Path("ref.py").write_text(text)
    code, _, err = call(capsys, "bench", "k.py", "--ref", "ref.py", "--device", "cpu")
    assert code == 2 and what in err and len(err.strip().splitlines()) == 1


# --- bench, for real ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize(
    ("body", "code"), [("return torch.relu(x).mul_(y)", 0), ("return torch.relu(x) * y * 1.01", 1)]
)
def test_bench_judges_and_logs(
    body: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("autokernel.judge.judge")
    monkeypatch.chdir(tmp_path)
    Path("k.py").write_text(f'import torch\nBACKEND = "torch"\n\ndef kernel_fn(x, y):\n    {body}\n')
    Path("ref.py").write_text(REFERENCE)
    got, out, _ = call(capsys, "bench", "k.py", "--ref", "ref.py", "--device", "cpu", "--json")
    data = json.loads(out)
    assert got == code, data
    assert data["correctness"] == ("PASS" if code == 0 else "FAIL")
    assert (data["latency_us"] is not None) == (code == 0)
    assert data["stages"] and set(data) == {*COLUMNS, "stages"}
    assert len(Path("results.tsv").read_text().splitlines()) == 2


# --- report ------------------------------------------------------------------------------------------------


def write_run(folder: Path, *, improved: bool = True) -> Path:
    """A run's journal: four baselines, two tasks, one kernel kept in the model and one evicted."""
    journal = Journal(folder / "results.tsv")
    base = Experiment(0, "nano", "model", task="model", status="baseline", device="some CPU", seconds=1.0)
    for backend, us in (("eager", 4000.0), ("compile-default", 3000.0), ("compile-freezing", 2900.0)):
        journal.append(replace(base, backend=backend, latency_us=us))
    journal.append(
        Experiment(
            0, "nano", "model", task="model", status="crash", backend="compile-max-autotune", reason="no g++"
        )
    )
    for task, family, candidate in (("01-attention-aa", "attention", "a1"), ("02-norm-bb", "norm", "b1")):
        kernel = Experiment(
            0, "nano", family, task=task, backend="torch", status="keep", candidate=candidate,
            strategy="sdpa",
            latency_us=50.0, speedup_vs_pytorch=3.0, speedup_vs_compile=2.0, speedup_vs_best_baseline=2.0,
            ci_low=1.9, ci_high=2.1, device="some CPU",
        )  # fmt: skip
        journal.append(replace(kernel, status="incorrect", candidate="x", reason="7 x e0", latency_us=None,
                               speedup_vs_pytorch=None, speedup_vs_best_baseline=None))  # fmt: skip
        journal.append(kernel)
    ours = Experiment(0, "nano", "model", task="model", backend="autokernel", device="some CPU")
    journal.append(replace(ours, status="keep", candidate="a1", strategy="add", speedup_vs_parent=1.4))
    journal.append(replace(ours, status="discard", candidate="b1", strategy="add", reason="0.97x with it"))
    journal.append(
        replace(ours, status="discard", parent="a1", strategy="leave-one-out", speedup_vs_parent=0.8)
    )
    final = replace(ours, status="keep", strategy="final", latency_us=2000.0, speedup_vs_pytorch=2.0,
                    speedup_vs_best_baseline=1.45, ci_low=1.42, ci_high=1.48)  # fmt: skip
    if not improved:
        final = replace(final, status="discard", speedup_vs_best_baseline=0.98)
    journal.append(final)
    return folder


def test_report_shows_every_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    code, out, err = call(capsys, "report", str(tmp_path))
    assert code == 0 and err == ""
    for fact in (
        "compile-freezing (best baseline)", "2.900 ms", "no g++", "1.45×", "1.420 – 1.480", "2.00×",
        "2.000× compile (1.900 – 2.100)",
        "01-attention-aa", "in the model", "1.25×", "evicted", "0.97x with it", "1.450× the best baseline",
    ):  # fmt: skip
        assert fact in out, fact
    assert call(capsys, "report", str(tmp_path / "results.tsv"))[1] == out


def test_an_interval_stands_beside_the_ratio_it_is_of() -> None:
    row = Experiment(
        0, "nano", "norm", task="01-norm", status="keep", backend="triton", candidate="a", latency_us=5.0,
        speedup_vs_pytorch=7.0, speedup_vs_compile=2.4, speedup_vs_best_baseline=2.4, ci_low=2.3, ci_high=2.5,
    )  # fmt: skip
    child = replace(row, candidate="b", speedup_vs_parent=1.3, ci_low=1.29, ci_high=1.31)
    (first,), (second,) = summarize([row]).kernels, summarize([row, child]).kernels
    assert (first.decided, first.rival, first.ci_low, first.ci_high) == (2.4, "compile", 2.3, 2.5)
    assert (second.decided, second.rival, second.ci_low, second.ci_high) == (1.3, "its parent", 1.29, 1.31)


def test_baselines_are_compared_within_the_rounds_they_share() -> None:
    def timed(number: int, backend: str, latency_us: float) -> Experiment:
        return Experiment(
            number, "n", "model", task="model", status="baseline", backend=backend, latency_us=latency_us
        )

    rows = [timed(0, "eager", 300.0), timed(1, "compile-default", 100.0), timed(2, "compile-freezing", 120.0)]
    again = [timed(7, "compile-default", 50.0), timed(8, "eager", 140.0)]  # the machine has become faster
    alone = [timed(10, "compile-max-autotune", 60.0)]
    found = {b.backend: (b.vs_eager, b.vs_best) for b in summarize([*rows, *again, *alone]).baselines}
    assert found == {
        "eager": (1.0, 50 / 140), "compile-default": (2.8, 1.0), "compile-freezing": (2.5, 100 / 120),
        "compile-max-autotune": (None, None),
    }  # fmt: skip


def test_a_point_of_a_search_does_not_stand_for_the_kernel_that_was_promoted() -> None:
    point = Experiment(
        0, "n", "norm", task="01-norm", status="discard", backend="triton", candidate="a", latency_us=2.0
    )
    promoted = replace(point, experiment=1, status="keep", latency_us=2.1, speedup_vs_best_baseline=1.5)
    final = Experiment(
        2, "n", "model", task="model", status="keep", backend="autokernel", candidate="a", strategy="final"
    )
    for rows in ([point, promoted], [promoted, point]):
        (line,) = summarize([*rows, final]).kernels
        assert (line.latency_us, line.decided) == (2.1, 1.5)


def test_what_the_only_kernel_gives_is_what_adding_it_gave() -> None:
    region = Experiment(0, "nano", "norm", task="01-norm", status="keep", backend="cpp", candidate="a")
    added = Experiment(
        1, "nano", "model", task="model", status="keep", backend="autokernel", candidate="a",
        speedup_vs_parent=1.2,
    )  # fmt: skip
    final = replace(added, strategy="final", speedup_vs_parent=None)
    (line,) = summarize([region, added, final]).kernels
    assert (line.outcome, line.contribution) == ("in the model", 1.2)
    without = replace(added, candidate="", parent="a", status="discard", speedup_vs_parent=0.8)
    (line,) = summarize([region, added, without, final]).kernels
    assert line.contribution == 1.25  # leaving it out has the last word


def test_an_evicted_region_is_told_of_by_its_own_winner() -> None:
    winner = Experiment(0, "n", "norm", task="01-norm", status="keep", backend="cpp", candidate="a")
    other = Experiment(
        1, "n", "norm", task="01-norm", status="discard", backend="torch", candidate="b", latency_us=2.0
    )
    added = Experiment(
        2, "n", "model", task="model", status="discard", backend="autokernel", candidate="a", reason="not a"
    )
    swapped = replace(added, candidate="b", reason="not b")
    (line,) = summarize([winner, other, added, swapped]).kernels
    assert (line.backend, line.outcome, line.why) == ("cpp", "evicted", "not a")
    added, swapped = replace(added, status="keep", reason=""), replace(swapped, status="keep", reason="")
    without = replace(swapped, candidate="", parent="b", reason="not slower without b")
    (line,) = summarize([winner, other, added, swapped, without]).kernels
    assert (line.backend, line.outcome, line.why) == ("torch", "evicted", "not slower without b")


def test_what_is_faster_but_can_not_be_shipped_is_told_of_as_that() -> None:
    row = Experiment(0, "n", "norm", task="01-norm", status="keep", backend="cpp", candidate="a")
    other = replace(row, kernel_type="rope", task="02-rope", candidate="b")
    model = Experiment(
        2, "n", "model", task="model", status="keep", backend="autokernel", candidate="a", latency_us=5.0
    )
    added = [model, replace(model, candidate="b")]
    eager = replace(model, status="baseline", backend="eager", candidate="")
    final = replace(
        model, status="discard", strategy="final", candidate="a,b", reason="peak memory 508 MiB", ci_low=1.4
    )
    found = summarize([row, other, *added, eager, final])
    assert not found.improved and found.headline().endswith("use eager (peak memory 508 MiB)")
    assert [(k.outcome, k.why) for k in found.kernels] == [("not shipped", "peak memory 508 MiB")] * 2
    again = replace(final, status="keep", reason="", candidate="b", speedup_vs_best_baseline=1.3)
    found = summarize([row, other, *added, eager, final, again])
    assert [(k.outcome, k.why) for k in found.kernels] == [
        ("evicted", "peak memory 508 MiB"), ("in the model", "")
    ]  # fmt: skip
    assert found.improved and not found.refused


def test_nothing_helped_is_said_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, improved=False)
    code, out, _ = call(capsys, "report", str(tmp_path))
    assert code == 0 and "nothing beat the best baseline: use compile-freezing" in out


def test_report_json_and_json_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    code, out, _ = call(capsys, "report", str(tmp_path), "--json", "--json-out", str(tmp_path / "o.json"))
    data = json.loads(out)
    assert code == 0 and json.loads((tmp_path / "o.json").read_text()) == data
    assert (
        data["speedup"] == 1.45 and data["best_baseline"] == "compile-freezing" and data["improved"] is True
    )
    assert [k["outcome"] for k in data["kernels"]] == ["in the model", "evicted"]
    assert data["kernels"][0]["contribution"] == 1.25 and data["kernels"][0]["attempts"] == 2


def test_markdown_holds_the_same_facts(tmp_path: Path) -> None:
    from autokernel.report.markdown import render_markdown
    from autokernel.report.summary import summarize
    from autokernel.results import read_results

    text = render_markdown(summarize(read_results(write_run(tmp_path))))
    for fact in (
        "# nano",
        "1.450× the best baseline",
        "compile-freezing (best baseline)",
        "no g++",
        "evicted",
        "1.25×",
    ):
        assert fact in text, fact
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows[:6]}) == 1


# --- small parts -------------------------------------------------------------------------------------------


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    code, out, _ = call(capsys, "doctor", "--json")
    data = json.loads(out)
    assert code == 0 and data["ok"] is True
    assert {"python", "torch", "device", "c++ compiler", "isolation"} <= {c["name"] for c in data["checks"]}
    assert {c["level"] for c in data["checks"]} <= {"ok", "warn", "fail"}


def test_doctor_fails_on_a_missing_device(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    code, out, _ = call(capsys, "doctor", "--device", "cuda:99")
    assert code == 2 and "fail" in out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("30m", 1800), ("90s", 90), ("90", 90), ("1h30m", 5400), ("1.5h", 5400)],
)
def test_parse_budget(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "8 h", "-3m", "0", "h", "3x"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(UsageError):
        parse_budget(text)


def test_the_command_to_go_on_with() -> None:
    words = ["optimize", "my model.py", "--fresh", "--run", "old", "--top", "3", "--run-dir=x"]
    assert go_on_command(words, Path("runs/x")) == "autokernel optimize 'my model.py' --top 3 --run runs/x"


@pytest.mark.parametrize("script", ["profile_model.py", "extract.py", "bench.py"])
def test_the_scripts_are_the_verbs(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    verb = script.removesuffix(".py").removesuffix("_model")
    assert done.returncode == 0 and f"autokernel {verb}" in done.stdout


def test_the_package_is_lazy_and_explicit() -> None:
    import autokernel

    assert set(autokernel.__all__) <= set(dir(autokernel))
    assert autokernel.results_frame.__module__ == "autokernel.results"
    assert autokernel.load.__module__ == "autokernel.integrate.artifact"
    assert isinstance(autokernel.__version__, str)
    with pytest.raises(AttributeError):
        autokernel.nothing  # noqa: B018


# --- Ctrl-C ------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys, time
from autokernel.interrupt import Interrupt
with Interrupt(lambda text: print(text, flush=True)) as interrupt:
    try:
        print("ready", flush=True)  # inside: a quick second signal may arrive before the next line
        for _ in range(200):
            time.sleep(0.05)
            if interrupt.requested and {obey}:
                print("row finished", flush=True)
                interrupt.check()
    except KeyboardInterrupt:
        print("out", flush=True)
        sys.exit(130)
"""


@pytest.mark.parametrize(("obey", "signals"), [(True, 1), (False, 2)])
def test_ctrl_c_once_finishes_the_row_and_twice_stops_at_once(obey: bool, signals: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(obey=obey)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for number in range(signals):
        if number:
            child.stdout.readline()  # what the first one made it say: it has been seen
        child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 130
    assert ("row finished" in out) == obey and out.endswith("out\n")


# --- when the whole model need not be measured again -------------------------------------------------------


def test_a_selection_is_current_until_a_new_kernel_asks_to_be_in(tmp_path: Path) -> None:
    from autokernel.optimize import selection_is_current
    from autokernel.results import read_results

    rows = read_results(write_run(tmp_path))
    entrants = [r for r in rows if r.status == "keep" and r.task != "model"]
    assert not selection_is_current(rows, entrants, tmp_path), "the artifact was never written"
    (tmp_path / "optimized").mkdir()
    (tmp_path / "optimized" / "manifest.json").write_text("{}")
    assert selection_is_current(rows, entrants, tmp_path)
    newer = replace(entrants[0], experiment=len(rows) + 1)
    assert not selection_is_current([*rows, newer], [newer], tmp_path)
    assert not selection_is_current([r for r in rows if r.strategy != "final"], entrants, tmp_path)
