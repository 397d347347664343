"""Regions: the fusion-sized pieces of a graph that a kernel may replace.

One file per op family.  A family has ``find(graph, static, free)``, which yields candidate node sets among
the nodes for which ``free`` holds.  `FAMILIES` is in order of priority: a node belongs to the first family
that claims it.
"""

from __future__ import annotations

from autokernel.regions import (
    attention,
    conv,
    cross_entropy,
    embedding,
    gated_mlp,
    linear,
    norm,
    pointwise,
    rope,
    sibling_linears,
    softmax,
)

FAMILIES = {
    "attention": attention,
    "rope": rope,
    "norm": norm,
    "gated_mlp": gated_mlp,
    "sibling_linears": sibling_linears,
    "linear": linear,
    "conv": conv,
    "cross_entropy": cross_entropy,
    "softmax": softmax,
    "embedding": embedding,
    "pointwise": pointwise,
}
