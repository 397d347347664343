"""The command line.  Nothing heavy is imported until a verb needs it: ``--help`` answers at once.

Exit codes: 0 done, 1 the work failed (a kernel is wrong), 2 bad usage or environment, 130 interrupted.
Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel.errors import AutokernelError

if TYPE_CHECKING:
    from autokernel.capture.source import SourceSpec

app = typer.Typer(
    name="autokernel",
    help="Make a PyTorch model faster than torch.compile does, and prove it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

MODEL_FORMS = "models/gpt2.py, package.module:callable, hf:ORG/NAME, a Hugging Face folder, or timm:NAME"
ModelArg = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_FORMS)]
Run = Annotated[Path | None, typer.Option("--run", "--run-dir", metavar="DIR", help="Run folder.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda|cuda:N", help="Default: cuda if there is one.")
]
ClassName = Annotated[
    str | None, typer.Option("--class-name", help="The nn.Module class in a file without build().")
]
InputShape = Annotated[
    list[str] | None, typer.Option("--input-shape", metavar="1,1024", help="One per input.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", metavar="FILE", help="Weights laid over the model.")
]
Top = Annotated[int, typer.Option("--top", min=1, help="How many tasks, by what they can give the model.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move an earlier run in this folder aside.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
JsonOut = Annotated[
    Path | None, typer.Option("--json-out", metavar="FILE", help="The same object into a file.")
]


@app.command()
def doctor(device: Device = None, as_json: Json = False, json_out: JsonOut = None) -> None:
    """Check device, driver, torch, triton and compilers."""
    from autokernel.doctor import examine

    checks = examine(device)
    failed = any(c.level == "fail" for c in checks)
    data = {"ok": not failed, "checks": [{"name": c.name, "level": c.level, "text": c.text} for c in checks]}
    if not _emit(data, as_json, json_out):
        from rich.text import Text

        from autokernel.report.terminal import console

        styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        out = console()
        for check in checks:
            out.print(
                Text.assemble((f"{check.level:<5}", styles[check.level]), f"{check.name:<22}", check.text)
            )
    raise typer.Exit(2 if failed else 0)


@app.command()
def profile(
    model: ModelArg,
    run: Run = None,
    device: Device = None,
    class_name: ClassName = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    checkpoint: Checkpoint = None,
    top: Top = 20,
    fresh: Fresh = False,
    as_json: Json = False,
    json_out: JsonOut = None,
) -> None:
    """Show where a model's time goes, and what each part could give."""
    from autokernel.report.terminal import console
    from autokernel.session import Session

    _check_writable(json_out)
    spec = _spec(model, device, class_name, input_shape, dtype, checkpoint)
    with _stdout_kept(), Session.start(spec, run, fresh=fresh, out=console(stderr=True)) as session:
        result = session.profile()
    if not _emit({**result.to_json(), "run": str(session.path)}, as_json, json_out):
        from autokernel.report.ranking import print_profile

        print_profile(result, console(), top)
    _last_line(session.path, as_json)


@app.command()
def extract(
    model: ModelArg,
    run: Run = None,
    device: Device = None,
    class_name: ClassName = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    checkpoint: Checkpoint = None,
    top: Top = 8,
    fresh: Fresh = False,
    as_json: Json = False,
    json_out: JsonOut = None,
) -> None:
    """Cut the top regions out of a model, each into a folder with a reference and a working kernel."""
    from autokernel.report.terminal import console
    from autokernel.session import Session

    _check_writable(json_out)
    spec = _spec(model, device, class_name, input_shape, dtype, checkpoint)
    with _stdout_kept(), Session.start(spec, run, fresh=fresh, out=console(stderr=True)) as session:
        tasks = session.tasks(top)
    if not tasks:
        from autokernel.errors import UsageError

        raise UsageError(
            f"{model}: there is nothing to extract: none of its operations form a region for a kernel "
            "(autokernel profile shows what there is)"
        )
    data = {
        "run": str(session.path),
        "tasks": [{**json.loads((t.dir / "task.json").read_text()), "dir": str(t.dir)} for t in tasks],
    }
    if not _emit(data, as_json, json_out):
        from autokernel.report.ranking import print_tasks

        print_tasks(tasks, console())
    _last_line(session.path, as_json)


@app.command()
def optimize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|KERNEL", help=f"{MODEL_FORMS}; or one kernel file with --ref"),
    ],
    run: Run = None,
    device: Device = None,
    class_name: ClassName = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    checkpoint: Checkpoint = None,
    ref: Annotated[Path | None, typer.Option("--ref", metavar="FILE", help="The kernel's reference.")] = None,
    top: Top = 8,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="8h", help="Time for experiments.")
    ] = None,
    max_experiments: Annotated[
        int | None, typer.Option("--max-experiments", "--max-iterations", min=0, help="Of the whole run.")
    ] = None,
    llm: Annotated[
        str | None,
        typer.Option("--llm", metavar="PROVIDER:MODEL", help="anthropic:, openai: or replay:FILE; none."),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="Another server for --llm.")
    ] = None,
    max_usd: Annotated[
        float | None,
        typer.Option("--max-usd", help="Spent on --llm in this run. Default 5; docs/llm.md"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="The same in tokens. Default 2000000 where no price is known."),
    ] = None,
    price: Annotated[
        str | None, typer.Option("--price", metavar="IN,OUT[,CACHED]", help="$ per million tokens of --llm.")
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option("--effort", metavar="low|medium|high|...", help="How long --llm thinks."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the first prompt for --llm and its cost; send nothing."),
    ] = False,
    no_playbook: Annotated[bool, typer.Option("--no-playbook", help="Only --llm proposes.")] = False,
    max_autotune: Annotated[
        bool, typer.Option("--max-autotune", help="Measure that baseline too; it takes minutes.")
    ] = False,
    fresh: Fresh = False,
    as_json: Json = False,
    json_out: JsonOut = None,
) -> None:
    """Make a model faster: profile, extract, try kernels, keep what makes the whole model faster.

    On an existing run folder it goes on where that run stopped.
    """
    from autokernel.optimize import Options, Stopped, optimize, optimize_kernel, parse_budget
    from autokernel.report.terminal import console, print_summary
    from autokernel.session import default_run

    _check_writable(json_out)
    options = Options(
        top=top,
        budget_s=parse_budget(budget) if budget else None,
        max_experiments=max_experiments,
        max_usd=max_usd,
        max_tokens=max_tokens,
        llm=llm,
        base_url=base_url,
        price=price,
        effort=effort,
        playbook=not no_playbook,
        fresh=fresh,
        max_autotune=max_autotune,
    )
    progress = console(stderr=True)
    if dry_run:
        from autokernel.dry_run import dry_run as preview

        spec = None if ref else _spec(model, device, class_name, input_shape, dtype, checkpoint)
        with _stdout_kept():
            path, shown = preview(model, ref, spec, device or _default_device(), run, options, progress)
        if not _emit({"run": str(path), **shown.to_json()}, as_json, json_out):
            print(shown.text())
        _last_line(path, as_json)
        return
    try:
        if ref is not None:
            where = device or _default_device()
            with _stdout_kept():
                path, summary = optimize_kernel(Path(model), ref, where, run, options, progress)
        else:
            spec = _spec(model, device, class_name, input_shape, dtype, checkpoint)
            with _stdout_kept():
                path, summary = optimize(spec, run, options, progress)
    except (Stopped, KeyboardInterrupt) as stopped:
        path = stopped.run if isinstance(stopped, Stopped) else run or default_run(model)
        print(f"Stopped. Everything measured is in {path}; to go on:", file=sys.stderr)
        print("  " + go_on_command(sys.argv[1:], path), file=sys.stderr)
        raise typer.Exit(130) from None
    if not _emit({"run": str(path), **summary.to_json()}, as_json, json_out):
        print_summary(summary, console())
        if summary.improved and (path / "optimized" / "manifest.json").exists():
            print(f'Load it: model = autokernel.load("{path}")(model)')
    _last_line(path, as_json)


@app.command()
def bench(
    kernel: Annotated[Path, typer.Argument(metavar="KERNEL", help="A kernel.py.")],
    task: Annotated[Path | None, typer.Option("--task", metavar="DIR", help="A task folder.")] = None,
    ref: Annotated[Path | None, typer.Option("--ref", metavar="FILE", help="A reference.py.")] = None,
    run: Run = None,
    device: Device = None,
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="TAGS", help="The mechanism, as tags: fused-pass,openmp.")
    ] = "",
    note: Annotated[str, typer.Option("--note", help="Why it should help, in a sentence.")] = "",
    agent: Annotated[
        str, typer.Option("--agent", envvar="AUTOKERNEL_AGENT", metavar="NAME", help="Who proposes it.")
    ] = "",
    as_json: Json = False,
    json_out: JsonOut = None,
) -> None:
    """Judge one kernel: is it correct, and how fast.

    Logs to the results.tsv of --run, else of the run that the task lies in, else to ./results.tsv.
    """
    from autokernel.bench import bench, exit_code, printed, to_json

    done = bench(
        kernel,
        task=task,
        reference=ref,
        device=device,
        run=run,
        strategy=strategy,
        note=note,
        agent=agent,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if text := printed(done.verdict):
        print(text, file=sys.stderr, flush=True)
    if not _emit(to_json(done.verdict, done.row), as_json, json_out):
        from autokernel.report.terminal import console, print_verdict

        print_verdict(done.verdict, done.row, console())
        print("\n".join([*done.advice, f"logged as row {done.row.experiment} in", str(done.log)]))
    raise typer.Exit(exit_code(done.verdict))


@app.command()
def report(
    place: Annotated[Path, typer.Argument(metavar="RUN|TSV", help="A run folder, or a results.tsv.")],
    as_json: Json = False,
    json_out: JsonOut = None,
) -> None:
    """Print the final table of a run, from its results.tsv alone."""
    from autokernel.report.summary import summarize
    from autokernel.results import read_results

    summary = summarize(read_results(place))
    if not _emit(summary.to_json(), as_json, json_out):
        from autokernel.report.terminal import console, print_summary

        print_summary(summary, console())


def go_on_command(arguments: list[str], run: Path) -> str:
    """The command that continues a stopped one: the same without ``--fresh``, on the same folder."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--run", "--run-dir"):
            skip = True
        elif argument != "--fresh" and not argument.startswith(("--run=", "--run-dir=")):
            kept.append(argument)
    return shlex.join(["autokernel", *kept, "--run", str(run)])


def _default_device() -> str:
    from autokernel.bench import default_device

    return default_device()


def _spec(
    model: str,
    device: str | None,
    class_name: str | None,
    input_shape: list[str] | None,
    dtype: str | None,
    checkpoint: str | None,
) -> SourceSpec:
    from autokernel.capture.source import SourceSpec

    if model.endswith(".py") and not os.path.isfile(model):  # noqa: PTH113  Path.is_file raises for a name that is too long
        from autokernel.errors import UsageError

        raise UsageError(f"no such model file: {model}")  # before torch is asked for the default device
    return SourceSpec(
        model,
        class_name,
        tuple(input_shape or ()),
        dtype,
        checkpoint,
        _default_device() if device is None else device,
    )


def _stdout_kept() -> contextlib.AbstractContextManager[Any]:
    """While the model's own code runs: what it prints goes to stderr, since stdout is for results."""
    return contextlib.redirect_stdout(sys.stderr)


def _check_writable(json_out: Path | None) -> None:
    """Before the work, whose result would be lost otherwise."""
    if json_out is not None and (json_out.is_dir() or not json_out.parent.is_dir()):
        from autokernel.errors import UsageError

        raise UsageError(f"can't write {json_out}: give --json-out a file in a folder that exists")


def _emit(data: dict[str, Any], as_json: bool, json_out: Path | None) -> bool:
    """Write the JSON object where it was asked for; True when stdout has it and nothing else may follow."""
    text = json.dumps(_finite(data), indent=1, default=str)
    if json_out is not None:
        from autokernel.errors import UsageError

        try:
            json_out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write {json_out}: {error.strerror}") from None
    if as_json:
        print(text)
    return as_json


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _last_line(run: Path, as_json: bool) -> None:
    """The last line printed is the run folder; with --json it is a key of the object."""
    if not as_json:
        print(run)


def _usage_errors() -> tuple[type[Exception], ...]:
    """typer's own usage errors: its bundled click in new versions, the click package before."""
    try:
        from typer.exceptions import TyperException

        return (TyperException,)
    except ImportError:
        import importlib

        return (importlib.import_module("click").ClickException,)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.  What autokernel raises on purpose is one line on stderr."""
    if arguments is not None:
        sys.argv[1:] = arguments
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(OSError, AttributeError, ValueError):  # stderr may be no file
            faulthandler.register(signal.SIGUSR1)  # kill -USR1 shows where every thread of a stuck run is
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler talks on stderr otherwise
    try:
        code = app(prog_name="autokernel", standalone_mode=False)
    except AutokernelError as error:
        print(f"autokernel: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("autokernel: interrupted", file=sys.stderr)
        code = 130
    except _usage_errors() as error:
        code = 2
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
            print(f"autokernel: {message} (autokernel --help says what there is)", file=sys.stderr)
    raise SystemExit(code or 0)


if __name__ == "__main__":
    main()
