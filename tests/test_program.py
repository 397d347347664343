"""program.md is true: its commands run, its statuses, reasons, columns, flags and paths are the code's."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from rich.console import Console
from small_models import small_file

from autokernel import bench, scheduler
from autokernel.cli import app
from autokernel.memory import recall
from autokernel.playbook.knowledge import PAGES, entries
from autokernel.records import COLUMNS, STATUSES, TIMED, Bound, Experiment, Provenance, Task, Verdict
from autokernel.report.terminal import print_verdict
from autokernel.results import read_results

ROOT = Path(__file__).parents[1]
PROGRAM = (ROOT / "program.md").read_text(encoding="utf-8")
SKILL_FILE = ROOT / "skills" / "autokernel" / "SKILL.md"
SCRIPTS = {"profile_model.py": "profile", "extract.py": "extract", "bench.py": "bench"}
COMMAND = re.compile(r"(?:PYTHONPATH=\. )?(?:python \S+\.py|autokernel [a-z]|cp|cut|grep|ncu) ?\S")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)


def commands(text: str = PROGRAM) -> list[str]:
    """Every command, fenced or inline, in the order of the text."""
    found = []
    for part in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$|`([^`\n]+)`", text, re.M | re.S):
        if part[1] == "bash":
            found += part[2].splitlines()
        elif part[3] and COMMAND.match(part[3]) and len(part[3].split()) > 1:
            found.append(part[3])
    return found


def inline(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}[^\n]*\n(.*?)(?=^## |\Z)", PROGRAM, re.M | re.S)
    assert found, f"program.md has no section {title!r}"
    return found[1]


def rows_of_table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def verb_and_arguments(command: str) -> tuple[str, list[str]] | None:
    """The verb of autokernel that a command is, or None for one of the system's."""
    words = shlex.split(command)
    if words[0] == "autokernel":
        return words[1], words[2:]
    if words[0] == "python" and words[1] in SCRIPTS:
        return SCRIPTS[words[1]], words[2:]
    return None


# --- what it says of itself ------------------------------------------------------------------------------


def test_it_is_short() -> None:
    assert len(PROGRAM.splitlines()) < 300


def test_it_has_the_commands_of_a_whole_run() -> None:
    verbs = [found[0] for c in commands() if (found := verb_and_arguments(c))]
    assert verbs == ["doctor", "profile", "extract", "bench", "bench", "optimize", "report"]


@pytest.mark.parametrize("command", [*commands(), *commands(SKILL_FILE.read_text(encoding="utf-8"))])
def test_every_command_parses(command: str) -> None:
    assert shlex.split(command)
    if (found := verb_and_arguments(command)) is None:
        return
    verb, arguments = found
    group = typer.main.get_command(app)
    with group.commands[verb].make_context(verb, list(arguments)) as context:  # type: ignore[attr-defined]
        assert context.params


@pytest.mark.parametrize(("script", "verb"), SCRIPTS.items())
def test_the_scripts_are_the_verbs(script: str, verb: str) -> None:
    assert f'main(["{verb}", *sys.argv[1:]])' in (ROOT / script).read_text(encoding="utf-8")


def test_the_flags_exist() -> None:
    group = typer.main.get_command(app)
    known = {o for c in group.commands.values() for p in c.params for o in p.opts}  # type: ignore[attr-defined]
    named = {w for text in inline(PROGRAM) if text.startswith("--") for w in text.split() if w[:2] == "--"}
    assert len(named) > 8
    assert named <= known


def test_the_variables_exist() -> None:
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "autokernel").glob("*.py"))
    assert all(f'"{name}"' in code for name in inline(PROGRAM) if name.startswith("AUTOKERNEL_"))


# --- statuses, reasons, columns, fields, numbers ---------------------------------------------------------


def failures() -> list[tuple[str, list[str]]]:
    """Status and the pieces of its reason, of every row of the table."""
    rows = rows_of_table(section("When it fails"))
    return [(row[0].strip("`"), re.findall(r"`([^`]+)`", row[1])) for row in rows]


def strings_of(node: ast.AST) -> str:
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(texts)


def judge_trees() -> list[ast.Module]:
    files = [*(ROOT / "autokernel" / "judge").rglob("*.py"), ROOT / "autokernel" / "bench.py"]
    return [ast.parse(p.read_text(encoding="utf-8")) for p in files]


def spoken() -> list[tuple[str, str]]:
    """(status, text) of every failure that the judge's code gives a literal text."""
    found = []
    for tree in judge_trees():
        for node in ast.walk(tree):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("failed", "WorkerFault"):
                parts = node.args
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                parts = node.value.elts
            if len(parts) >= 2 and isinstance(parts[0], ast.Constant) and parts[0].value in STATUSES:
                found.append((str(parts[0].value), strings_of(parts[1])))
    return [(status, text) for status, text in found if text.strip("\n")]


def test_the_statuses_are_the_codes() -> None:
    listed = re.search(r"`status` is one of (.*?)\.\n? ", section("How to read the log"), re.S)
    assert listed and tuple(re.findall(r"`(\w+)`", listed[1])) == STATUSES
    assert {status for status, _ in failures()} == set(STATUSES) - {"baseline", "keep"}


def test_the_reasons_are_those_that_the_judge_gives() -> None:
    said = "\n".join(strings_of(tree) for tree in judge_trees())
    assert not [piece for _, pieces in failures() for piece in pieces if piece not in said]


def test_every_reason_of_the_judge_is_in_the_table() -> None:
    found = spoken()
    assert len(found) > 20
    silent = [
        (status, text)
        for status, text in found
        if status not in ("infra_error", "compile_error")
        and not any(s == status and any(p in text for p in pieces) for s, pieces in failures())
    ]
    assert not silent


def test_the_columns_are_those_of_the_table() -> None:
    (command,) = (c for c in commands() if c.startswith("cut "))
    spec = command.split()[2]
    numbers: list[int] = []
    for part in spec.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    said = re.search(r"^That is (.*?)\.", section("The six steps"), re.M | re.S)
    assert said and re.findall(r"`(\w+)`", said[1]) == [
        COLUMNS[n - 1] for n in numbers if COLUMNS[n - 1] != "parent"
    ]
    for name in ("candidate", "parent", "provenance", "error_ratio", "pct_peak", "strategy"):
        assert name in COLUMNS and f"`{name}`" in PROGRAM
    assert all(f"`{kind}`" in section("How to read the log") for kind in typing.get_args(Provenance))


def test_the_numbers_of_task_json_exist() -> None:
    said = re.search(r"`task.json` has the numbers: (.*?)\.\n", PROGRAM, re.S)
    assert said
    names = re.findall(r"`(\w+)`", said[1])
    assert len(names) == 7 and set(names) <= {f.name for f in fields(Task)}


def test_the_rules_numbers_are_the_codes() -> None:
    told = " ".join(PROGRAM.split())
    assert f"at least {bench.NO_SLOWER} times its parent's speed" in told
    assert f"at most {bench.SIMPLER} of its lines" in told
    assert f"`share` of {scheduler.MIN_SHARE} or more" in told
    assert "at most twice" in told and scheduler.MAX_REPAIRS == 2
    assert f"is above {100 / scheduler.NEAR_ROOFLINE // 10 * 10:.0f};" in told


# --- the playbook ----------------------------------------------------------------------------------------


def test_the_playbook_covers_every_bound_with_entries_that_exist() -> None:
    known = {entry.id: entry for entry in entries()}
    rows = rows_of_table(section("The playbook"))
    assert {row[0].strip("`") for row in rows} == set(typing.get_args(Bound))
    for row in rows:
        bound, named = row[0].strip("`"), re.findall(r"`([a-z]+-[\w-]+)`", row[2])
        assert named, bound
        for name in named:
            assert name in known, name
            assert not known[name].bounds or bound in known[name].bounds, f"{name} is not about {bound}"


def test_every_entry_and_page_that_is_named_exists() -> None:
    pages = set(re.findall(r"`(\w+)\.md`", section("The playbook")))
    assert pages == set(PAGES)
    prefixes = ("torch-", "triton-", "cuda-", "cpp-", "cutlass-")
    named = {name for name in inline(PROGRAM) if name.startswith(prefixes)}
    assert named <= {entry.id for entry in entries()}


def test_the_counters_are_those_of_the_pages() -> None:
    """One spelling: what program.md asks ncu for is what the entries talk about."""
    counters = set(re.findall(r"`((?:sm|smsp|l1tex|lts|dram|launch)__[\w.]+)`", PROGRAM))
    pages = "".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "autokernel/playbook/knowledge").glob("*.md")
    )
    assert len(counters) >= 5
    assert all(counter in pages for counter in counters)


# --- what bench shows ------------------------------------------------------------------------------------


def test_bench_shows_the_bound_and_whole_resources() -> None:
    text = "; ".join(f"k{i}: 64 registers, none spilled, occupancy 50% at most" for i in range(5))
    verdict = Verdict("discard", "1.0x eager", latency_us=12.5, stages={"resources": (True, text)})
    row = Experiment(1, "t", "norm", latency_us=12.5, pct_peak=43.2, bound="dram", status="discard")
    out = io.StringIO()
    print_verdict(verdict, row, Console(file=out, width=1000))
    assert "latency 12.50 µs; bound: dram, 43 % of the roofline's speed" in out.getvalue()
    assert "k4: 64 registers" in out.getvalue()


def test_bench_shows_a_compilers_message_once_and_line_by_line() -> None:
    message = "CompileError: in function f\nkernel.cpp:1:38: error: y was not declared\n    1 | x[0] = y;"
    verdict = Verdict("compile_error", message, stages={"load": (False, message)})
    out = io.StringIO()
    print_verdict(verdict, Experiment(1, "t", "norm", status="compile_error"), Console(file=out, width=80))
    assert "    1 | x[0] = y;\n" in out.getvalue() and out.getvalue().count("kernel.cpp:1:38") == 1


def test_what_a_wrong_kernel_printed_is_shown() -> None:
    assert bench.printed(Verdict("crash", "ended", log="assertion i < n\n")) == "it printed:\nassertion i < n"
    assert bench.printed(Verdict("crash", "ended", log=" \n")) == ""
    assert bench.printed(Verdict("discard", "slow", log="hello")) == ""
    assert len(bench.printed(Verdict("crash", "ended", log="x\n" * 10**6))) < 5000


# --- the skill -------------------------------------------------------------------------------------------


def test_the_skill_has_the_form_that_agents_read() -> None:
    text = SKILL_FILE.read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    given = dict(line.split(": ", 1) for line in front.splitlines())
    assert given["name"] == SKILL_FILE.parent.name and re.fullmatch(r"[a-z0-9-]{1,64}", given["name"])
    assert 0 < len(given["description"]) <= 1024 and set(given) == {"name", "description"}
    assert ": " not in given["description"] and "#" not in given["description"]  # plain YAML scalar
    links = re.findall(r"\]\(([^)]+)\)", body)
    assert "../../program.md" in links and all((SKILL_FILE.parent / link).exists() for link in links)
    assert len(body.splitlines()) < 40


# --- all of it, for real ---------------------------------------------------------------------------------


def copy_of_the_repository(folder: Path) -> None:
    """What the commands need, with a small model under the name that program.md uses."""
    for name in (*SCRIPTS, "program.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "autokernel", folder / "autokernel", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "models").mkdir()
    small_file("nano", folder / "models")
    tools = {
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "autokernel": 'exec python -m autokernel "$@"',
        "ncu": 'while [ "$1" != python ]; do shift; done; exec "$@"',  # there is none on a CPU
    }
    (folder / "bin").mkdir()
    for name, line in tools.items():
        tool = folder / "bin" / name
        tool.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        tool.chmod(0o755)


def run(command: str, folder: Path) -> str:
    """Stdout and stderr of a command that must end well."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOKERNEL_", "PYTHONPATH"))}
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_command_runs_in_order(tmp_path: Path) -> None:
    copy_of_the_repository(tmp_path)
    tsv = tmp_path / "runs" / "nano" / "results.tsv"
    said: dict[str, str] = {}
    task = sha = ""
    for command in commands():
        if "<task>" in command and not task:
            task = sorted(p.name for p in (tmp_path / "runs" / "nano" / "tasks").iterdir() if p.is_dir())[0]
        kernel = tmp_path / "runs" / "nano" / "tasks" / task / "kernel.py"
        if "--strategy" in command:
            sha = next(r.candidate for r in read_results(tsv) if r.candidate)
            kernel.write_text(kernel.read_text(encoding="utf-8") + "\n# an edit\n", encoding="utf-8")
        if "run_once.py" in command:
            script = tmp_path / "runs" / "nano" / "run_once.py"
            script.write_text(next(m[2] for m in FENCE.finditer(PROGRAM) if "run_path" in m[2]), "utf-8")
        said[command] = run(command.replace("<task>", task).replace("<sha12>", sha), tmp_path)

    folder = tmp_path / "runs" / "nano" / "tasks" / task
    for name in ("reference.py", "task.json", "inputs.safetensors", "kernel.py", f"attempts/{sha}.py"):
        assert (folder / name).is_file() and name.split("/")[0] in PROGRAM
    rows = read_results(tsv)
    mine = [r for r in rows if r.task == task]
    assert {r.backend for r in mine if r.status == "baseline"} == {"eager", "compile"}
    starter, edit = (r for r in mine if r.candidate)
    assert starter.proposer == "starter" and starter.candidate == sha
    assert (edit.strategy, edit.proposer, edit.model) == ("fused-pass,openmp", "agent", "NAME")
    assert edit.description == "one pass over x, not three: 40 us, not 95"
    assert {starter.status, edit.status} <= TIMED and edit.latency_us
    assert [m.tried for m in recall(rows, Task.load(folder)) if m.strategy == "fused-pass,openmp"] == [1]

    judged = next(text for command, text in said.items() if "--strategy" in command)
    assert "memory of " in judged and f"logged as row {edit.experiment} in" in judged
    assert all("largest difference: " in text for c, text in said.items() if "run_once" in c)
    assert all("families" in text for c, text in said.items() if c.startswith("grep"))
    assert any(r.task == "model" and r.status == "baseline" for r in rows)
    assert [r.experiment for r in rows if r.candidate and r.task != "model"] == [
        starter.experiment,
        edit.experiment,
    ], "optimize --max-experiments 0 judges nothing by itself"
    assert "Result: " in said["autokernel report runs/nano"]


def test_the_python_in_it_parses() -> None:
    blocks = [m[2] for m in FENCE.finditer(PROGRAM) if m[1] == "python"]
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)
