"""How many requests per second can one controller's core serve, when is it saturated, and how many can several serve?

The core alone is driven on a virtual clock by 1,024 ranks that claim rows of 64 storage units while producers publish
the same number of rows; at most 10 M rows are live. The cost of each kind of request is measured on the core at that
size, with some thousand requests, because all 10 M rows x 1,024 ranks would take hours. Queueing is simulated with
these costs and random arrivals at a rate. Several controllers are simulated as several cores that share the partitions.
"""

from __future__ import annotations

import gc
import statistics

import numpy as np

from benchmarks.harness.core_driver import BATCH, FIELDS, Core, claim, claimed
from benchmarks.harness.report import Row, Scale, against
from transfer_queue.messages.puts import ClearRows
from transfer_queue.messages.queries import Lookup
from transfer_queue.sampler import RankAwareSampler

QUESTION = "How many requests per second can one controller's core serve, when is it saturated, what do several give?"
UNITS = 64
PARTITIONS = 16
GROUP = 8  # rows of a put: the answers to one prompt
SHARES = (0.5, 0.8, 0.9, 0.95, 1.05)  # rates of arrival, as shares of the maximum rate of the core
CONTROLLERS = (1, 2, 4, 8)


class Cost:
    """The measured seconds of each kind of request."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {}

    def add(self, kind: str, seconds: float) -> None:
        """One more."""
        self.took.setdefault(kind, []).append(seconds)

    def drawn(self) -> np.ndarray:
        """Return all costs in random order."""
        every = np.array([each for kind in self.took.values() for each in kind])
        return np.random.default_rng(0).permutation(every)


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    live, ranks, rounds = scale.pick((10_000_000, 1024, 3), (4000, 16, 1))
    gc.disable()
    try:
        few = _played(_filled(2 * ranks * BATCH, PARTITIONS), ranks, rounds)
        cost = _played(_filled(live, PARTITIONS), ranks, rounds)
    finally:
        gc.enable()
    found = []
    for kind, took in cost.took.items():
        ours, least = (statistics.median(each) * 1e6 for each in (took, few.took[kind]))
        what = f"{kind}, {live:,} rows of {UNITS} units, {ranks:,} ranks"
        found.append(against(what, "us", ours, least, "among few rows"))
    drawn = cost.drawn()
    most = 1 / float(drawn.mean())
    least = 1 / float(few.drawn().mean())
    found.append(against("requests that one core carries", "a second", most, least, "among few rows"))
    arrivals = scale.pick(200_000, 2000)
    for share in SHARES:
        waits = queued(drawn, most * share, arrivals)
        words = f"wait for an answer at {share:.0%} of that"
        what = f"{words} ({'it is full: waits grow without end' if share > 1 else 'p99'})"
        more = {"p50_us": waits[0] * 1e6, "requests_a_second": most * share}
        found.append(against(what, "us", waits[1] * 1e6, float(drawn.mean()) * 1e6, "mean cost", more=more))
    alone = _sharded(drawn, 1, arrivals)
    for controllers in CONTROLLERS:
        what = f"{controllers} controllers, {PARTITIONS} partitions dealt to them: all requests, p99 within 5 ms"
        found.append(against(what, "a second", _sharded(drawn, controllers, arrivals), alone, "one controller"))
    return found


def _filled(rows: int, partitions: int) -> Core:
    """Return a core with rows on all units; the task has consumed the first half of them."""
    core = Core(RankAwareSampler(), UNITS)
    each = rows // partitions
    for number in range(partitions):
        name = f"p{number}"
        for i, first in enumerate(range(0, each, 10_000)):
            core.publish(min(10_000, each - first), name, unit=i % UNITS)
        core.controller.state.partitions[name].ready_set("train", FIELDS)
        live = core.controller.state.partitions[name].rows.live_positions()
        indexes = core.controller.state.partitions[name].rows.indexes_of(live[: each // 2])
        core.consume(indexes, "train", name)
    return core


def _played(core: Core, ranks: int, rounds: int) -> Cost:
    """Let each rank claim a batch, look it up and clear it, and let producers publish the same number of rows."""
    cost = Cost()
    for round_ in range(rounds):
        for rank in range(ranks):
            core.now += 1e-4
            partition, client = f"p{rank % PARTITIONS}", f"rank{rank}"
            for put in range(BATCH // GROUP):
                took, _ = core.publish(GROUP, partition, f"producer{rank % 64}", unit=(rank + put) % UNITS)
                cost.add(f"publish of {GROUP} rows", took)
            sampling = {"dp_rank": rank, "batch_index": round_}
            took, effects = core.send(claim(partition=partition, sampling=sampling, wait=60.0), client)
            rows = claimed(effects)
            if len(rows) != BATCH * 8:
                raise AssertionError(f"rank {rank} claimed {BATCH} rows and got {len(rows) // 8}")
            cost.add(f"claim of {BATCH} rows", took)
            cost.add("lookup of them", core.send(Lookup(partition, rows, fields=list(FIELDS)), client)[0])
            cost.add("clear of them", core.send(ClearRows(partition, rows), client)[0])
    return cost


def queued(costs: np.ndarray, rate: float, arrivals: int) -> tuple[float, float]:
    """Return the median and p99 of seconds from arrival to reply, if requests arrive at random at this rate."""
    draw = np.random.default_rng(1)
    at = np.cumsum(draw.exponential(1 / rate, arrivals))
    needs = draw.choice(costs, arrivals)
    # a request ends at the latest of: the arrival of an earlier one plus the costs of all requests from it to this one
    before = np.cumsum(needs) - needs
    ends = np.maximum.accumulate(at - before) + before + needs
    waits = ends - at
    return float(np.median(waits)), float(np.quantile(waits, 0.99))


def _sharded(costs: np.ndarray, controllers: int, arrivals: int, within: float = 5e-3) -> float:
    """Return the highest total rate at which the busiest controller still replies within `within` seconds.

    Partitions are assigned in turn. Requests are distributed over them by a Zipf law of exponent 0.5, so that some are
    busier than others.
    """
    asked = 1 / np.sqrt(np.arange(1, PARTITIONS + 1))
    asked /= asked.sum()
    busiest = max(float(asked[i::controllers].sum()) for i in range(controllers))
    low, high = 1.0, 1 / float(costs.mean())
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if queued(costs, middle, arrivals)[1] <= within else (low, middle)
    return low / busiest
