"""Why do equal CUDA graphs differ?  Their results' memory, their executable, or their inputs.

    python benchmarks/graph_places.py

One process, seven short kernels of an RMS norm, twenty calls per graph.  Printed are, in percent, how far
graphs stray from the mean of all in interleaved rounds (median log-ratios), the deviation of that, and how
much of it is noise (odd rounds against even ones).  Then one graph stays and another is captured ten times:
in how many places does its memory lie, and what does it take against the first?
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from typing import Any

import torch

CALLS, BUFFERS, GRAPHS = 20, 10, 8
DEVICE = torch.device("cuda")


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def draw() -> list[Any]:
    return [(torch.randn(64, 256, device=DEVICE), torch.randn(256, device=DEVICE)) for _ in range(BUFFERS)]


def capture(inputs: list[Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, dict[int, torch.Tensor]]:
    graph, results = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        for i in range(CALLS):
            results[i % BUFFERS] = norm(*inputs[i % BUFFERS])
    return graph, results


class Bench:
    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self, graph: torch.cuda.CUDAGraph) -> float:
        self.flush.zero_()
        self.begin.record()
        graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end)

    def compare(self, graphs: list[torch.cuda.CUDAGraph], rounds: int = 60) -> tuple[list[float], float]:
        for graph in graphs * 2:
            self.sample(graph)
        rows = []
        for _ in range(rounds):
            order, row = random.sample(range(len(graphs)), len(graphs)), [0.0] * len(graphs)
            for i in order:
                row[i] = 100 * math.log(self.sample(graphs[i]))
            rows.append([t - statistics.mean(row) for t in row])
        typical = [
            [statistics.median(c) for c in zip(*some, strict=True)] for some in (rows, rows[::2], rows[1::2])
        ]
        return typical[0], statistics.pstdev(a - b for a, b in zip(*typical[1:], strict=True)) / 2

    def show(self, name: str, graphs: list[torch.cuda.CUDAGraph]) -> None:
        strays, noise = self.compare(graphs)
        cells = " ".join(f"{v:+.2f}" for v in strays)
        print(f"| {name} | {statistics.pstdev(strays):.2f} | {noise:.2f} | {cells} |", flush=True)


def in_pool(pool: Any, inputs: list[Any]) -> torch.cuda.CUDAGraph:
    """A graph whose results have been let go, so that the pool's next graph gets their memory."""
    graph, results = capture(inputs, pool)
    del results
    gc.collect()
    return graph


def one_process(bench: Bench, shared: list[Any]) -> None:
    print("| eight graphs of the same code | deviation | noise | one by one |\n| --- | --- | --- | --- |")
    held = [capture(shared) for _ in range(GRAPHS)]
    bench.show("each in a memory pool of its own", [graph for graph, _ in held])
    del held
    pool = torch.cuda.graph_pool_handle()
    bench.show("results in the same memory", [in_pool(pool, shared) for _ in range(GRAPHS)])
    pool, many = torch.cuda.graph_pool_handle(), [draw() for _ in range(GRAPHS)]
    bench.show("results in the same memory, inputs of its own each", [in_pool(pool, one) for one in many])
    graph, results = capture(shared)
    bench.show("one graph, eight times", [graph] * GRAPHS)
    del graph, results
    torch.cuda.empty_cache()
    pools = [torch.cuda.graph_pool_handle() for _ in range(4)]
    bench.show("four pools, four graphs in each", [in_pool(pool, shared) for pool in pools for _ in range(4)])


def recaptures(bench: Bench, shared: list[Any], name: str, blocks: dict[int, int]) -> None:
    """``blocks``: bytes -> how many at most are taken after the last graph's memory has gone back."""
    stay, held, taken = capture(shared), None, []
    strays, places = [], set()
    for _ in range(10):
        held, taken = None, []
        gc.collect()
        if blocks:
            torch.cuda.empty_cache()
        for size, most in blocks.items():
            taken += [
                torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(random.randint(0, most))
            ]
        held = capture(shared)
        places.add(held[1][0].data_ptr() >> 21)
        strays.append(2 * bench.compare([stay[0], held[0]], 40)[0][1])
    cells = " ".join(f"{v:+.2f}" for v in strays)
    print(f"| {name} | {len(places)} | {statistics.pstdev(strays):.2f} | {cells} |", flush=True)


def main() -> None:
    torch.manual_seed(0)
    bench, shared = Bench(), draw()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        norm(*shared[0])
    torch.cuda.synchronize()
    one_process(bench, shared)
    print("\n| captured ten times, against a graph that stays | places | deviation | one by one |")
    print("| --- | --- | --- | --- |")
    for name, blocks in {"as it comes": {}, "up to 64 blocks of 1 MB before": {1 << 20: 64}}.items():
        recaptures(bench, shared, name, blocks)


if __name__ == "__main__":
    main()
