"""Attention written out by hand → scaled_dot_product_attention.

The scale is folded from the scalings on the way, the mask is recognised by its *value* (no mask, causal, any
other boolean or additive mask), and keys and values that were repeated for grouped queries are taken
before the repetition.  On a GPU the library's backends are offered one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autokernel.capture.nodes import op_name
from autokernel.playbook.attention_operands import OperandWriter, after, ungrouped, untransposed
from autokernel.playbook.attention_scores import Scores, mask_kind, read_scores
from autokernel.playbook.context import StrategyContext, dtype_of, find, shape_of
from autokernel.playbook.emit import kernel_file
from autokernel.proposers.proposal import Proposal
from autokernel.regions import ops
from autokernel.regions.code import statements

NAME = "attention_sdpa"
FAMILIES = ("attention",)
BACKEND = "torch"

_HEADER = "from torch.nn.attention import SDPBackend, sdpa_kernel"


def propose(ctx: StrategyContext) -> Iterator[Proposal]:
    softmax = find(ctx.nodes, "softmax")
    if len(softmax) != 1 or softmax[0] in ctx.static or not _last_dim(softmax[0]):
        return
    scores = read_scores(ctx, softmax[0].all_input_nodes[0])
    final = _value_product(softmax[0])
    if scores is None or final is None or len(shape_of(scores.product)) != 4:
        return
    query, key_t = scores.product.args[:2]
    value = final.args[1]
    if not all(isinstance(n, fx.Node) for n in (query, key_t, value)):
        return
    query, query_scale = _strip_scalings(query)  # type: ignore[arg-type]
    key_t, key_scale = _strip_scalings(key_t)  # type: ignore[arg-type]
    key = untransposed(key_t)
    scale = scores.scale * query_scale * key_scale

    grouped_key = ungrouped(key) if key is not None else None
    grouped_value = ungrouped(value)  # type: ignore[arg-type]
    variants = [(False, "")]
    if grouped_key is not None and grouped_value is not None:
        variants.insert(0, (True, "grouped heads unexpanded"))
    for grouped, note in variants:
        # Expanded heads only cost where grouped ones can be had: once, by the library's own choice, will do.
        for backend in _backends(ctx) if grouped or len(variants) == 1 else [""]:
            source = _source(ctx, scores, scale, final, query, key, key_t, value, grouped, backend)  # type: ignore[arg-type]
            if source is None:
                continue
            what = [mask_kind(scores)] + ([note] if note else []) + ([backend.lower()] if backend else [])
            yield Proposal(
                source,
                strategy=",".join(
                    ["sdpa", *(["gqa"] if grouped else []), *([backend.lower()] if backend else [])]
                ),
                description=f"attention by hand -> scaled_dot_product_attention ({', '.join(what)})",
                backend=BACKEND,
            )


def _backends(ctx: StrategyContext) -> list[str]:
    if ctx.device.startswith("cuda"):
        half = any(p.dtype in ("float16", "bfloat16") for p in ctx.task.inputs)
        return ["CUDNN_ATTENTION", "FLASH_ATTENTION", ""] if half else [""]
    return [""]


def _last_dim(softmax: fx.Node) -> bool:
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    rank = len(shape_of(softmax))
    return dim in (-1, rank - 1)


def _value_product(softmax: fx.Node) -> fx.Node | None:
    node = softmax
    while len(node.users) == 1:
        user = next(iter(node.users))
        if op_name(user) in ("matmul", "bmm") and user.args[0] is node:
            return user
        if op_name(user) == "dropout":
            training = user.kwargs.get("training", user.args[2] if len(user.args) > 2 else True)
            rate = user.kwargs.get("p", user.args[1] if len(user.args) > 1 else 0.5)
            if training and rate:
                return None
        elif op_name(user) not in ops.CASTS | {"contiguous"}:
            return None
        node = user
    return None


# --- queries, keys, values ------------------------------------------------------------------------------


def _strip_scalings(node: fx.Node) -> tuple[fx.Node, float]:
    factor = 1.0
    while ops.is_scalar_scaling(node) and isinstance(node.args[0], fx.Node):
        scalar = node.args[1]
        if not isinstance(scalar, int | float) or scalar <= 0:
            break
        factor *= 1.0 / scalar if op_name(node) == "div" else scalar
        node = node.args[0]
    return node, factor


# --- writing it down ------------------------------------------------------------------------------------


def _source(
    ctx: StrategyContext,
    scores: Scores,
    scale: float,
    final: fx.Node,
    query: fx.Node,
    key: fx.Node | None,
    key_t: fx.Node,
    value: fx.Node,
    grouped: bool,
    backend: str,
) -> str | None:
    names = ctx.names
    writer = OperandWriter(ctx)
    body, done, emit = writer.body, writer.done, writer.emit
    emit(query)
    q = names[query]
    if key is not None:
        k = writer.operand(key, grouped)
    else:
        emit(key_t)
        k = f"{names[key_t]}.transpose(-2, -1)"
    v = writer.operand(value, grouped)
    kind = mask_kind(scores)
    arguments = [q, k, v]
    prepack: list[str] | None = None
    if kind == "causal":
        if backend == "CUDNN_ATTENTION" and scores.additive is not None:
            return None
        arguments.append("is_causal=True")
    elif kind != "no mask":
        if backend == "FLASH_ATTENTION":
            return None  # flash takes no mask tensor
        if kind == "mask given at run time":
            if len(scores.dynamic) != 1 or scores.allowed is not None or scores.additive is not None:
                return None
            factor, mask = scores.dynamic[0]
            emit(mask)
            text = names[mask] if factor == 1.0 else f"{names[mask]} * {factor!r}"
            arguments.append(f"attn_mask=({text}).to({q}.dtype)")
        else:
            if not ctx.statics:
                return (
                    None  # the mask is made inside the region and isn't causal: leave it to the general code
                )
            prepack = _mask_prepack(ctx, scores, final)
            if prepack is None:
                return None
            arguments.append("attn_mask=mask")
    arguments.append(f"scale={scale!r}")
    if grouped:
        arguments.append("enable_gqa=True")
    body.append(f"{names[final]} = F.scaled_dot_product_attention({', '.join(arguments)})")
    if backend:
        body[-1] = f"with sdpa_kernel([SDPBackend.{backend}]):\n        " + body[-1]
    done.add(final)
    for node in ctx.nodes:
        if node not in done and node not in ctx.static and after(node, final):
            body.append(statements([node], names)[0])
    return kernel_file(
        ctx,
        doc=f"Attention through the library's fused kernel ({kind}).",
        backend=BACKEND,
        body=body,
        header=[_HEADER] if backend else [],
        prepack=prepack,
        packed=["mask"] if prepack else None,
    )


def _mask_prepack(ctx: StrategyContext, scores: Scores, final: fx.Node) -> list[str] | None:
    """Body of ``prepack``: run the steps in front of softmax on zero scores, which leaves the mask."""
    softmax = find(ctx.nodes, "softmax")[0]
    product = scores.product
    steps = ctx.needed_for([softmax.all_input_nodes[0]], stop=[product])
    if any(not (set(s.all_input_nodes) <= ctx.static | {product} | set(steps)) for s in steps):
        return None
    like = ctx.names[ctx.statics[0]]
    size = shape_of(product)
    dtype = dtype_of(product)
    return [
        "# The steps in front of softmax, run on zero scores, leave exactly the mask.",
        f"{ctx.names[product]} = torch.zeros(",
        f"    (1, 1, {size[-2]}, {size[-1]}), dtype={dtype}, device={like}.device",
        ")",
        *statements(steps, ctx.names),
        f"return ({ctx.names[softmax.all_input_nodes[0]]}.to({dtype_of(final)}),)",
    ]
