"""Findings about matrix products: too small for the device, split in several, or in a slow number type."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autokernel import roofline
from autokernel.capture.nodes import op_name
from autokernel.findings.evidence import Evidence, nbytes, tensor
from autokernel.profile_records import Finding

_PRODUCTS = frozenset({"linear", "matmul", "bmm", "mm", "addmm", "baddbmm"})
_CONTRACTIONS = _PRODUCTS | {"scaled_dot_product_attention", "conv1d", "conv2d", "conv3d"}
# A rate this much higher is a number type's, not a fluctuation of the measurement.
_FASTER = 1.3


def _sizes(node: fx.Node) -> tuple[int, int, int, int] | None:
    """Batch, M, N and K of a product."""
    operands = [t for n in node.all_input_nodes if (t := tensor(n)) is not None]
    if op_name(node) in ("addmm", "baddbmm"):
        operands = operands[1:]
    result = tensor(node)
    if len(operands) < 2 or result is None or operands[0].dim() < 1 or result.dim() < 1:
        return None
    depth = operands[0].shape[-1]
    if op_name(node) == "linear":
        return 1, result.numel() // max(1, result.shape[-1]), result.shape[-1], depth
    if result.dim() < 2 or operands[1].dim() < 2:
        return None
    rows, columns = result.shape[-2:]
    return result.numel() // max(1, rows * columns), rows, columns, depth


def small_products(evidence: Evidence) -> Iterator[Finding]:
    """Products whose least time is below that of starting any kernel, and those of one row by a weight."""
    launch = evidence.ceilings.launch_us
    for graph, node in evidence.calls():
        if op_name(node) not in _PRODUCTS or (sizes := _sizes(node)) is None:
            continue
        batch, rows, columns, depth = sizes
        flops = 2.0 * batch * rows * columns * depth
        moved = nbytes(node) + sum(nbytes(a) for a in node.all_input_nodes)
        least = _least(evidence, node, flops, moved)
        form = f"{rows}×{depth} by {depth}×{columns}" + (f" (batch of {batch})" if batch > 1 else "")
        if launch and least is not None and least < launch:
            yield evidence.finding(
                "small products",
                f"a product of {form} is so small that starting it takes longer than its work",
                [node],
                "more rows per call (a larger batch), or one product in place of several; autokernel merges "
                "linears that share an input",
                graph=graph,
                time_us=max(0.0, evidence.us([node]) - least * graph.calls),
                up_to=True,
            )
        elif rows == 1 and batch == 1 and op_name(node) == "linear":
            yield evidence.finding(
                "small products",
                f"a product of {form} reads a whole weight for one row and is bound by memory",
                [node],
                "several rows per call (a larger batch) read it once for all; or a smaller number type",
                graph=graph,
                up_to=True,
            )


def sibling_linears(evidence: Evidence) -> Iterator[Finding]:
    """Linears on one input, which one product could do."""
    for part in evidence.partitions:
        for region in part.regions:
            linears = [n for n in region.nodes if op_name(n) == "linear"]
            if region.family != "sibling_linears" or len(linears) < 2:
                continue
            widths = " + ".join(str(v.shape[-1]) for n in linears if (v := tensor(n)) is not None)
            yield evidence.finding(
                "sibling linears",
                f"{len(linears)} linears ({widths} columns) read the same input, each in its own product",
                linears,
                "one product with the weights side by side; autokernel merges them if that pays",
                graph=part.graph,
                time_us=max(0.0, evidence.us(linears) - _floor(evidence, linears) * part.graph.calls),
                up_to=True,
            )


def _floor(evidence: Evidence, linears: list[fx.Node]) -> float:
    """Least microseconds of ``linears`` in one product: what is above that is at stake."""
    flops = sum(2.0 * s[1] * s[2] * s[3] for n in linears if (s := _sizes(n)) is not None)
    read = {a for n in linears for a in n.all_input_nodes}
    moved = sum(map(nbytes, read)) + sum(map(nbytes, linears))
    return _least(evidence, linears[0], flops, moved) or 0.0


def _least(evidence: Evidence, node: fx.Node, flops: float, moved: float) -> float | None:
    value = tensor(node)
    dtype = str(value.dtype).removeprefix("torch.") if value is not None else ""
    return roofline.roofline_us(flops, moved, dtype, evidence.ceilings, allow_tf32=evidence.tf32.products)


def float32_products(evidence: Evidence) -> Iterator[Finding]:
    """Products in float32 on a device that multiplies 16-bit numbers faster."""
    rates = evidence.ceilings.flops_per_s
    slow, fast = rates.get("float32"), max(rates.get("bfloat16", 0.0), rates.get("float16", 0.0))
    if not slow or fast < _FASTER * slow or evidence.tf32.products or not _has_16_bit(evidence.device.kind):
        return
    nodes = [
        node
        for _, node in evidence.calls()
        if op_name(node) in _CONTRACTIONS
        and all(t.dtype == torch.float32 for n in node.all_input_nodes[:2] if (t := tensor(n)) is not None)
    ]
    if nodes:
        tf32 = "TF32, " if rates.get("tf32", 0.0) > _FASTER * slow else ""
        one = evidence.finding(
            "float32",
            f"{len(nodes)} products and attention calls run in float32; this device multiplies 16-bit "
            f"numbers {fast / slow:.1f} times as fast",
            nodes,
            f"{tf32}bfloat16 or float16 (`--dtype`): a change of numerics, which you decide and "
            "autokernel does not make",
            time_us=evidence.us(nodes) * (1.0 - slow / fast),
            up_to=True,
        )
        one.modules, one.source = [], ""
        yield one


def _has_16_bit(kind: str) -> bool:
    """On a CPU only with instructions for it; a GPU's measured rate says it all."""
    if kind == "cuda":
        return True
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
    asked = [getattr(torch.cpu, name, None) for name in names]
    return any(bool(ask()) for ask in asked if ask is not None)
