"""How even is the result of balancing, how long does it take, and how long does it delay the controller?

Imbalance is the largest load over the least that it could be (the mean, or the largest item); with equal counts of a
long tail 1 cannot be reached. One thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar

import numpy as np

from benchmarks.harness.core_driver import Core, claim
from benchmarks.harness.report import Row, Scale, against
from transfer_queue.core.claims import deal
from transfer_queue.sampler import SeqlenBalancedSampler
from transfer_queue.sampler.balance import Cost, balance, imbalance, linear, quadratic

QUESTION = "How even is the result of balancing, how long does it take, and how long does it delay the controller?"
NOTE = """The peer balances 8,192 x 1,024 by free counts only for lognormal lengths: it takes 17 to 20 s for each
distribution."""
T = TypeVar("T")

COSTS: dict[str, Cost] = {"L": linear, "L+L^2": quadratic(1, 1)}
SIZES = [(256, 8), (8192, 128), (8192, 1024), (65_536, 256), (100_000, 1024)]
# (lengths, cost, equal counts, n, k) -> ms: target, the peer's then; imbalance to reach
TARGETS = {
    ("lognormal", "L", True, 8192, 128): (20.0, 19.0, 1.0001),
    ("lognormal", "L", False, 8192, 128): (50.0, 3100.0, 1.0001),
    ("lognormal", "L", False, 65_536, 256): (500.0, 37_000.0, 1.0001),
}


def lognormal(generator: np.random.Generator, n: int) -> np.ndarray:
    """exp(N(6.5, 1))."""
    return np.exp(generator.normal(6.5, 1, n))


def bimodal(generator: np.random.Generator, n: int) -> np.ndarray:
    """Return nine short answers for each long chain of thought."""
    short, long = generator.normal(300, 50, n), generator.normal(12000, 1000, n)
    return np.where(generator.random(n) < 0.9, short, long)


def pareto(generator: np.random.Generator, n: int) -> np.ndarray:
    """Return lengths with an unbounded tail."""
    return 200 * (1 + generator.pareto(1.2, n))


DRAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal": lognormal, "bimodal": bimodal, "pareto": pareto
}  # fmt: skip


def lengths_of(kind: str, n: int) -> np.ndarray:
    """Return whole numbers of tokens from 16 to 32768."""
    lengths: np.ndarray = np.clip(DRAWS[kind](np.random.default_rng(0), n), 16, 32768).astype(np.int64)
    return lengths


def timed(work: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Return the median time in milliseconds, and the result."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        result = work()
        times.append((time.thread_time() - start) * 1e3)
    return statistics.median(times), result


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    sizes = scale.pick(SIZES, [(64, 4)])
    rows = [row for n, k in sizes for row in _balancing(scale, n, k)]
    rows += [_long_deal(scale, size) for size in scale.pick((1, 8), (2,))]
    return rows


def _balancing(scale: Scale, n: int, k: int) -> list[Row]:
    found = []
    for kind, name, equal in product(DRAWS, COSTS, (True, False)):
        lengths, cost = lengths_of(kind, n), COSTS[name]
        ms, parts = timed(lambda: balance(lengths, k, equal_counts=equal, cost=cost), 1 if n > 10_000 else 3)  # noqa: B023
        _check(parts, n)
        quality = imbalance(cost(lengths.astype(float)), parts)
        sort_ms, _ = timed(lambda: np.argsort(lengths), 3)  # noqa: B023
        target, then, even = TARGETS.get((kind, name, equal, n, k), (None, None, None))
        counts = "equal counts" if equal else "free counts"
        what = f"balance {n:,} x {k}, {kind}, {name}, {counts}"
        peers = {}
        if name == "L" and n <= 8192 and (k <= 128 or equal or kind == "lognormal"):
            case: dict[str, Any] = {"lengths": lengths.tolist(), "k": k, "equal": equal}
            peers = {who: figures["ms"] for who, figures in scale.ask_peers("balance", **case).items()}
        found.append(against(
            f"{what}: time", "ms", ms, sort_ms, "np.argsort", target=target, then=then, peers=peers,
            more={"imbalance": quality},
        ))  # fmt: skip
        if even is not None:
            found.append(Row(f"{what}: max/mean", quality, "", target=even, then=1.15 if equal else 1.00001))
    return found


def _check(parts: Sequence[Any], n: int) -> None:
    if sorted(int(item) for part in parts for item in part) != list(range(n)):
        raise AssertionError("balancing has lost items, or used some twice")


def _long_deal(scale: Scale, size: int) -> Row:
    """Measure the longest event of the core in a deal of all rows to all ranks; reference: a deal within the loop."""
    groups, ranks = scale.pick((8192, 128), (64, 4))
    inside, _ = _deal(groups, ranks, size, 1 << 60)
    longest, work = _deal(groups, ranks, size, deal.LONG)
    what = f"longest event of a deal of {groups:,} groups of {size} to {ranks} ranks"
    return against(what, "ms", longest, inside, "within the loop", target=5.0, more={"the_work_ms": work})


def _deal(groups: int, ranks: int, size: int, long: int) -> tuple[float, float]:
    """Return (the longest event, the work beside the loop) in milliseconds; best of three."""
    before, deal.LONG = deal.LONG, long
    best = (float("inf"), 0.0)
    try:
        for _ in range(3):
            core, draw, rows = Core(SeqlenBalancedSampler(size, ranks)), np.random.default_rng(0), groups * size
            for first in range(0, rows, 4096):
                count = min(4096, rows - first)
                core.publish(count, tags=[{"total_lengths": n} for n in draw.integers(100, 8000, count).tolist()])
            partition = core.controller.state.partitions["p"]
            partition.ready_set("t", ("x",)).whole_groups(size, partition.groups)  # as by earlier claims
            sampling = {"dp_rank": 0, "batch_index": 0}
            took, _ = core.send(claim("t", ("x",), batch=rows // ranks, sampling=sampling, wait=10.0))
            best = min(best, (took * 1e3, core.work * 1e3))
    finally:
        deal.LONG = before
    return best
