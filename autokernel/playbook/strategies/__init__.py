"""Rewriting strategies, one small file each.

A strategy has ``NAME``, ``FAMILIES`` (or ``("*",)``) and ``propose(ctx)``, which yields `Proposal`s.  It may
propose what it can't prove: the judge decides.  `STRATEGIES` is in the order in which they are tried.
"""

from __future__ import annotations

from autokernel.playbook.context import StrategyContext
from autokernel.playbook.strategies import (
    attention_call,
    attention_sdpa,
    channels_last,
    fold_batch_norm,
    generated,
    linear_epilogue,
    merge_linears,
    norm_library,
    pad_features,
    rope_real,
)

STRATEGIES = [
    attention_sdpa,
    attention_call,
    merge_linears,
    linear_epilogue,
    pad_features,
    rope_real,
    norm_library,
    fold_batch_norm,
    channels_last,
    generated,
]

__all__ = ["STRATEGIES", "StrategyContext"]
