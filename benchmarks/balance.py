"""How even balancing comes out and what it takes: lengths, costs, counts and sizes; and packing under a cap.

    python benchmarks/balance.py [--sizes 8192:128 100000:1024] [--rounds 3]

Prints tables and, last, one JSON line. Imbalance is the largest load over the least it could be (the mean load, or the
largest item); with equal counts of a long tail 1 cannot be reached. Fill is the mean load of bins within the cap, as a
share of it. Times are medians of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeVar

import numpy as np

from transfer_queue.sampler.balance import Cost, balance, imbalance, linear, pack, quadratic

T = TypeVar("T")

COSTS: dict[str, Cost] = {"L": linear, "L+L^2": quadratic(1, 1)}
CAPS = [8192, 32768, 131072]


def lognormal(generator: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(generator.normal(6.5, 1, n))


def bimodal(generator: np.random.Generator, n: int) -> np.ndarray:
    """Nine short answers for one long chain of thought."""
    short, long = generator.normal(300, 50, n), generator.normal(12000, 1000, n)
    return np.where(generator.random(n) < 0.9, short, long)


def pareto(generator: np.random.Generator, n: int) -> np.ndarray:
    return 200 * (1 + generator.pareto(1.2, n))


DRAWS = {draw.__name__: draw for draw in (lognormal, bimodal, pareto)}


def lengths_of(kind: str, n: int) -> np.ndarray:
    """Whole numbers of 16..32768 tokens."""
    return np.clip(DRAWS[kind](np.random.default_rng(0), n), 16, 32768).astype(np.int64)


def timed(work: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Milliseconds, the median, and the result."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), result


def balancing(n: int, k: int, rounds: int) -> Iterator[dict[str, object]]:
    for kind, name, equal in product(DRAWS, COSTS, (True, False)):
        lengths, cost = lengths_of(kind, n), COSTS[name]
        ms, parts = timed(lambda: balance(lengths, k, equal_counts=equal, cost=cost), rounds)  # noqa: B023
        quality = imbalance(cost(lengths.astype(float)), parts)
        counts = "equal" if equal else "free"
        print(f"{kind:10}{name:>7}{counts:>7}{n:>8}{k:>6}{ms:>9.1f}{quality:>12.6f}", flush=True)
        yield {"lengths": kind, "cost": name, "counts": counts, "n": n, "k": k, "ms": ms, "imbalance": quality}


def packing(n: int, rounds: int) -> Iterator[dict[str, object]]:
    for kind, cap, multiple in product(DRAWS, CAPS, (1, 8)):
        lengths = lengths_of(kind, n)
        ms, bins = timed(lambda: pack(lengths, cap, multiple), rounds)  # noqa: B023
        loads = [int(lengths[each].sum()) for each in bins]
        fill = statistics.mean(load for load in loads if load <= cap) / cap
        print(f"{kind:10}{cap:>8}{multiple:>4}{n:>8}{len(bins):>7}{ms:>9.1f}{fill:>10.4f}", flush=True)
        yield {"lengths": kind, "cap": cap, "multiple_of": multiple, "n": n, "bins": len(bins), "ms": ms, "fill": fill}


def size(text: str) -> tuple[int, int]:
    n, k = text.split(":")
    return int(n), int(k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=size, nargs="+", metavar="N:K",
                        default=[(256, 8), (8192, 128), (8192, 1024), (100_000, 128), (100_000, 1024)])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'lengths':10}{'cost':>7}{'counts':>7}{'n':>8}{'k':>6}{'ms':>9}{'imbalance':>12}")
    balanced = [row for n, k in options.sizes for row in balancing(n, k, options.rounds)]
    print(f"\n{'lengths':10}{'cap':>8}{'x':>4}{'n':>8}{'bins':>7}{'ms':>9}{'fill':>10}")
    packed = [row for n in sorted({n for n, _ in options.sizes}) for row in packing(n, options.rounds)]
    print(json.dumps({"benchmark": "balance", "balance": balanced, "pack": packed}))


if __name__ == "__main__":
    main()
