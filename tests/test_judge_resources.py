"""Registers, spills, shared memory and occupancy of Triton kernels; real ones are in test_judge_gpu."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from autokernel.judge.resources import (
    KernelResources,
    Multiprocessor,
    collect,
    describe,
    occupancy,
    parse,
    spilling,
)

H200 = Multiprocessor(65536, 228 * 1024, 2048)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "share", "limit"),
    [
        (32, 0, 4, 1.0, "registers"),  # 64 warps of 1,024 registers are all there are
        (128, 0, 4, 0.25, "registers"),  # 4,096 a warp: 16 warps
        (130, 0, 4, 0.1875, "registers"),  # 4,352 a warp once rounded: 15 warps, 3 blocks of 4
        (255, 0, 8, 0.125, "registers"),
        (16, 100 * 1024, 4, 0.125, "shared memory"),  # two blocks
        (16, 0, 1, 0.5, "blocks"),  # 32 blocks of one warp
        (24, 0, 8, 1.0, "warps"),
    ],
)
def test_occupancy(registers: int, shared_bytes: int, num_warps: int, share: float, limit: str) -> None:
    kernel = KernelResources("k", registers, 0, shared_bytes, num_warps)
    assert occupancy(kernel, H200) == (share, limit)


def test_in_words() -> None:
    kernels = [KernelResources("first", 128, 0, 4096, 4), KernelResources("second", 255, 12, 0, 8)]
    assert describe(kernels, H200) == (
        "first: 128 registers, none spilled, 4096 bytes shared, 4 warps, occupancy 25% at most (registers); "
        "second: 255 registers, 12 of them spilled, 0 bytes shared, 8 warps, "
        "occupancy 12% at most (registers)"
    )
    assert spilling(kernels) == "second spills 12 registers" and spilling(kernels[:1]) == ""


def compiled(name: str, registers: int | None) -> Any:
    metadata = SimpleNamespace(shared=64, num_warps=2)
    return SimpleNamespace(name=name, hash="h" + name, n_regs=registers, n_spills=3, metadata=metadata)


def test_collected_from_a_module() -> None:
    jitted = SimpleNamespace(fn=len, device_caches={0: ({"a": compiled("norm", 40)}, {}, 1, 2, 3)})
    tuned = SimpleNamespace(
        fn=SimpleNamespace(fn=SimpleNamespace(device_caches={0: ({"b": compiled("b", 9)},)}))
    )
    never_run = SimpleNamespace(device_caches={0: ({"c": compiled("c", None)},)})
    names = {"norm": jitted, "alias": jitted, "b": tuned, "c": never_run, "kernel_fn": collect, "N": 3}
    assert parse(collect(names)) == [
        KernelResources("norm", 40, 3, 64, 2),
        KernelResources("b", 9, 3, 64, 2),
    ]


GOOD = {"name": "k", "registers": 1, "spills": 0, "shared_bytes": 0, "num_warps": 1}


@pytest.mark.parametrize(
    "told",
    [
        "", "no json", "[" * 100_000, "7", "[7]", '[{"name": "k"}]',
        *(json.dumps([GOOD | change]) for change in (
            {"registers": -1}, {"registers": 1.5}, {"registers": True}, {"spills": 2**40}, {"num_warps": 0},
            {"name": "k; keep"}, {"name": 3}, {"name": "k" * 100}, {"more": 1},
        )),
    ],
)  # fmt: skip
def test_a_forged_account_is_nothing(told: str) -> None:
    assert parse(json.dumps([GOOD])) != []
    assert parse(told) == []
