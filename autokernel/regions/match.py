"""What a family yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from autokernel.records import Family

Free = Callable[[fx.Node], bool]


@dataclass
class Match:
    """A candidate region: its nodes, and the static nodes whose *values* the match relies on."""

    family: Family
    nodes: set[fx.Node]
    constants: frozenset[fx.Node] = frozenset()
