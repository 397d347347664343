"""Which kernel torch takes for a call of scaled_dot_product_attention, and why no faster one.

Torch itself is asked, with tensors of the call's own form on the call's own device; why flash attention
refuses is told by rules of our own, which name what the user can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autokernel.capture.graph import Graph
from autokernel.capture.nodes import arguments, op_name
from autokernel.findings.evidence import Evidence, real_value, source_of, tensor
from autokernel.masks import MASKED
from autokernel.profile_records import Finding
from autokernel.roofline import causal_share

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_PLAIN = {
    "FLASH_ATTENTION": "flash attention",
    "EFFICIENT_ATTENTION": "the memory-efficient kernel",
    "CUDNN_ATTENTION": "cuDNN's kernel",
    "MATH": "the math path, which writes all scores to memory",
}


def attention_backend(evidence: Evidence) -> Iterator[Finding]:
    """Calls that get a mask they could do without, or that no flash kernel takes."""
    for graph, node in evidence.calls():
        if op_name(node) == "scaled_dot_product_attention":
            yield from _of_call(evidence, graph, node)


def _of_call(evidence: Evidence, graph: Graph, node: fx.Node) -> Iterator[Finding]:
    given = arguments(node, _NAMES)
    chosen = chosen_backend(given, evidence.device.torch_name)
    refusals = flash_refuses(given, evidence.device.kind)
    mask = given.get("attn_mask")
    spared = 1.0
    taken = f"torch takes {_PLAIN.get(chosen, chosen)}" if chosen else ""
    if isinstance(mask, fx.Node):
        cause, remedy, worth, spared = _mask(evidence, graph, node, mask, chosen)
        others = [r for r in refusals if r != _DENSE]
        taken = ", and ".join(t for t in (taken, *others) if t)
        at = source_of(mask) or source_of(node)
    else:
        worth = chosen in ("MATH", "EFFICIENT_ATTENTION") and bool(refusals)
        cause = f"flash attention refuses this call: {'; '.join(refusals)}"
        remedy = _REMEDY.get(refusals[0], "change what it names") if refusals else ""
        at = source_of(node)
    if worth:
        text = f"{cause}; {taken}" if taken else cause
        stake = spared * evidence.us([node])
        one = evidence.finding(
            "attention backend", text, [node], remedy, graph=graph, time_us=stake, up_to=True
        )
        one.source = at  # of a mask that is made in the graph, the line that makes it
        yield one


_DENSE = "it takes no mask"
_FLOAT32 = "it takes 16-bit numbers only, these are float32"
_REMEDY = {
    _FLOAT32: "bfloat16 or float16 for attention: a change of numerics that you decide (`--dtype`)",
}


def _mask(
    evidence: Evidence, graph: Graph, node: fx.Node, mask: fx.Node, chosen: str | None
) -> tuple[str, str, bool, float]:
    """Cause, remedy, whether it is worth saying, and the share of the call's time that is at stake."""
    form = tensor(mask)
    shape = "×".join(str(s) for s in form.shape) if form is not None else "?"
    values = real_value(graph, mask)
    always = mask in evidence.static[graph]
    here = "" if always else " on these inputs"
    cause = f"attention gets a {shape} mask"
    if form is not None and form.dim() and form.stride(-1) == 0 and form.shape[-1] > 1:
        cause += " expanded along the keys (stride 0, for which a GPU has the math path only)"
    if values is not None and masks_nothing(values):
        remedy = "pass attn_mask=None" + ("" if always else " when nothing is padded")
        return f"{cause} that masks nothing{here}", remedy, True, 1.0
    if values is not None and is_causal(values, tensor(node)):
        remedy = "pass is_causal=True and no mask; half of the scores then need no work"
        return (
            f"{cause} that is equal to a causal one{here}",
            remedy,
            True,
            1.0 - causal_share(*values.shape[-2:]),
        )
    dense = "which flash attention refuses on a GPU, and reads for every score on a CPU"
    remedy = "a kernel that knows the mask, if it never changes; else packed sequences instead of padding"
    return f"{cause}, {dense}", remedy, chosen != "CUDNN_ATTENTION", 1.0


def masks_nothing(values: Tensor) -> bool:
    """Whether a mask leaves every score as it is."""
    return bool(values.all()) if values.dtype == torch.bool else not bool(values.count_nonzero())


def is_causal(values: Tensor, result: Tensor | None) -> bool:
    """Whether a mask is, for every head, what ``is_causal=True`` means: the lower triangle, zeros there."""
    if values.dim() < 2 or result is None:
        return False
    rows, columns = values.shape[-2:]
    if rows != columns or rows < 2:
        return False
    triangle = torch.ones(rows, columns, dtype=torch.bool, device=values.device).tril()
    if values.dtype == torch.bool:
        return bool((values == triangle).all())
    kept = values > MASKED
    return bool((kept == triangle).all()) and not bool(values.masked_fill(~triangle, 0).count_nonzero())


def chosen_backend(given: dict[str, Any], device: str) -> str | None:
    """The name in ``SDPBackend`` of what torch takes for the call; None when it can't be asked."""
    ask = getattr(torch, "_fused_sdp_choice", None)
    form = {name: tensor(given.get(name)) for name in ("query", "key", "value", "attn_mask")}
    if ask is None or any(form[n] is None for n in ("query", "key", "value")):
        return None
    from torch.nn.attention import SDPBackend

    real = {k: None if v is None else _like(v, device) for k, v in form.items()}
    more = {k: given[k] for k in ("scale", "enable_gqa") if given.get(k) is not None}
    try:
        with torch.no_grad():
            number = ask(
                real["query"], real["key"], real["value"], real["attn_mask"],
                float(given.get("dropout_p") or 0.0), bool(given.get("is_causal")), **more,
            )  # fmt: skip
        return SDPBackend(number).name
    except (RuntimeError, TypeError, ValueError):  # it has no answer for these arguments
        return None


def _like(value: Tensor, device: str) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def flash_refuses(given: dict[str, Any], kind: str) -> list[str]:
    """Why torch's flash attention does not take the call, by its documented rules."""
    query, key, value = (tensor(given.get(n)) for n in ("query", "key", "value"))
    if query is None or key is None or value is None:
        return []
    found: list[str] = []
    if kind == "cuda":
        if given.get("attn_mask") is not None:
            found.append(_DENSE)
        if query.dtype == torch.float32:
            found.append(_FLOAT32)
        elif query.dtype not in (torch.float16, torch.bfloat16):
            found.append(f"it takes no {str(query.dtype).removeprefix('torch.')}")
        if query.shape[-1] > 256:
            found.append(f"its head dimension is at most 256, this is {query.shape[-1]}")
        if given.get("is_causal") is True and query.shape[-2] != key.shape[-2]:
            found.append("is_causal needs as many queries as keys")
    if query.dim() != 4:
        found.append(f"it takes tensors of four dimensions, these have {query.dim()}")
    if query.shape[-1] != value.shape[-1]:
        found.append("query and value have head dimensions of different size")
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (query, key, value)):
        found.append("the head dimension is not dense in memory")
    return found
