"""Write the text of a kernel.py from its parts."""

from __future__ import annotations

from collections.abc import Sequence

from autokernel.playbook.context import StrategyContext


def kernel_file(
    ctx: StrategyContext,
    *,
    doc: str,
    backend: str,
    body: Sequence[str],
    returns: str | None = None,
    header: Sequence[str] = (),
    prepack: Sequence[str] | None = None,
    packed: Sequence[str] | None = None,
    compiled: bool = False,
) -> str:
    """A whole kernel.py.

    ``body`` are the statements of ``kernel_fn``; it returns ``returns``, or the region's own outputs by
    name.  With ``prepack`` (statements, the last one a return), ``kernel_fn`` takes the activations and
    then the names in ``packed``.  ``compiled`` marks a rewrite that leaves work for the compiler: it is
    timed under torch.compile, as it will run in the model.
    """
    activations = [ctx.names[n] for n in ctx.activations]
    statics = [ctx.names[n] for n in ctx.statics]
    parameters = [*activations, *(packed if packed is not None else statics)]
    result = returns if returns is not None else ctx.named(ctx.results)
    where = ", ".join(ctx.task.module_paths[:3]) or "the model"
    lines = [
        f'"""{doc}',
        "",
        f"Takes the place of {where}.",
        '"""',
        "",
        "import torch",
        "import torch.nn.functional as F",
    ]
    lines += [*header, "", f'BACKEND = "{backend}"', *(["COMPILE = True"] if compiled else []), "", ""]
    if prepack is not None:
        lines += [f"def prepack({', '.join(statics)}):", *_indent(prepack), "", ""]
    lines += [f"def kernel_fn({', '.join(parameters)}):", *_indent([*body, f"return {result}"])]
    return "\n".join(lines) + "\n"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]
