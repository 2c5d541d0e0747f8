"""What does a claim cost, depending on rows, ready sets, tasks, partitions and the sampler?

Measured through a client, compared with an empty round trip; and in the controller's core alone, compared with the same
claim among few rows. In the core, rows are consumed with gaps, or except for the end of the partition. Twenty ready
sets (5 tasks x 4 sets of fields) are kept all the time.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness.core_driver import BATCH, FIELDS, Core, claim, rows_of
from benchmarks.harness.machine import clocked
from benchmarks.harness.report import Row, Scale, against, quantiles
from benchmarks.harness.systems import system
from transfer_queue import interface as tq
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    SequentialSampler,
)

QUESTION = "How does the cost of a claim depend on the number of rows, ready sets, tasks and partitions?"
TASKS = [f"task{number}" for number in range(5)]
FIELD_SETS = [("x",), ("y",), ("x", "y"), FIELDS]
PUT = 100_000  # rows of a put that fills a partition
THEN = {1000: 0.84, 131_072: 23.6}  # rows -> ms of the peer's claim


class ListSampler(BaseSampler):
    """A sampler as users may write it: it needs a list of all ready rows."""

    def sample(self, ready_indexes: Sequence[int], batch_size: int, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
        """Return the first rows of the list."""
        chosen = list(ready_indexes)[:batch_size]
        return chosen, chosen


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    sizes = scale.pick((1000, 131_072, 10_000_000), (1000, 5000))
    with system() as queue:  # noqa: F841 (it is the current one)
        rows = _through_a_client(scale, sizes)
    gc.disable()
    try:
        rows += _in_the_core(sizes, scale.pick(2, 1))
        rows += _among_many(scale.pick(((1, 1), (20, 1), (200, 1), (1, 1000), (20, 100)), ((1, 1), (4, 4))))
        rows += _by_sampler(scale.pick((1000, 131_072, 1_000_000), (1000,)), scale.pick(30, 3))
    finally:
        gc.enable()
    for number, size in enumerate(sizes):
        peers = scale.ask_peers("claims", rows=size, batch=BATCH)
        rows[number] = replace(rows[number], peers={name: figures["ms"] for name, figures in peers.items()})
    return rows


def _through_a_client(scale: Scale, sizes: Sequence[int]) -> list[Row]:
    client, found = tq.get_client(), []
    for rows in sizes:
        for first in range(0, rows, PUT):
            numbers = torch.arange(first, min(rows, first + PUT), dtype=torch.int32)
            client.put(TensorDict(dict.fromkeys(FIELDS, numbers), batch_size=[len(numbers)]), partition_id="p")
        for task, fields in product(TASKS, FIELD_SETS):
            client.get_meta(list(fields), 1, "p", task_name=task)
        took, trips = [], []
        for number in range(scale.pick(20, 5)):
            seconds = clocked(lambda: client.get_meta(list(FIELDS), BATCH, "p", task_name=TASKS[0]))
            took.append(seconds * 1e3)
            trips.append(clocked(client.get_partition_list) * 1e3)
            del number
        meta = client.get_meta(list(FIELDS), BATCH, "p", task_name=TASKS[0])
        indexes = torch.tensor(meta.global_indexes)
        if not torch.equal(client.get_data(meta)["x"].long(), indexes - indexes[0] + _claimed(len(took))):
            raise AssertionError("a claim returned other rows than the next ones")
        found.append(against(
            f"claim of {BATCH} of {rows:,} rows by a client", "ms", statistics.median(took), statistics.median(trips),
            "empty round trip", target=0.12, then=THEN.get(rows), more=quantiles(took, 1.0),
        ))  # fmt: skip
        client.clear_partition("p")
    return found


def _claimed(claims: int) -> int:
    """Return the number of rows that the first task has received before the last claim."""
    return len(FIELD_SETS) + claims * BATCH


def patterns(rows: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a name, and the consumed rows."""
    every = np.arange(rows)
    yield "nothing consumed", every[:0]
    yield "every other row consumed", every[::2]
    yield "all but the far end consumed", every[(every % 2 == 0) | (every < rows - 512)]


def ready_sets(core: Core, number: int) -> None:
    """Build `number` ready sets, for five tasks."""
    for task, fields in list(product(TASKS, FIELD_SETS))[:number]:
        core.controller.state.partitions["p"].ready_set(task, fields)


def _in_the_core(sizes: Sequence[int], rounds: int) -> list[Row]:
    took: dict[tuple[str, int], list[float]] = {}
    for _, rows, pattern in product(range(rounds), sizes, range(3)):
        name, consumed = list(patterns(rows))[pattern]
        core = Core()
        core.fill(rows)
        core.consume(consumed, TASKS[0])
        ready_sets(core, 20)
        took.setdefault((name, rows), []).extend(_some(core)[1:])
    found = []
    for (name, rows), times in took.items():
        ours, least = (statistics.median(each) * 1e6 for each in (times, took[name, sizes[0]]))
        what = f"claim of {BATCH} of {rows:,} rows in the core, {name}"
        found.append(against(what, "us", ours, least, f"of {sizes[0]:,} rows"))
    return found


def _some(core: Core, count: int = 7) -> list[float]:
    """Return the seconds of claims one after the other, each of which must be answered."""
    found = []
    for _ in range(count):
        took, effects = core.send(claim(TASKS[0]))
        if rows_of(effects) != BATCH:
            raise AssertionError(f"a claim of {BATCH} rows returned {rows_of(effects)}")
        found.append(took)
    return found


def _among_many(cases: Sequence[tuple[int, int]]) -> list[Row]:
    """Measure a claim, and a put of one row, with a ready set for each of many tasks, and with many partitions."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for tasks, partitions in cases:
        core = Core()
        for number in range(partitions):
            core.publish(1000, f"p{number}")
            for task in range(tasks):
                core.send(claim(f"task{task}", partition=f"p{number}", batch=1))
        claims = [core.send(claim("task0", partition=f"p{i % partitions}"))[0] for i in range(20)]
        puts = [core.publish(1, f"p{i % partitions}")[0] for i in range(500)]
        found[tasks, partitions] = statistics.median(claims) * 1e6, statistics.median(puts) * 1e6
    rows, least = [], found[cases[0]]
    for (tasks, partitions), figures in found.items():
        for kind, ours, base in zip(("claim", "put of a row"), figures, least, strict=True):
            what = f"{kind} in the core, {tasks} tasks in each of {partitions} partitions"
            rows.append(against(what, "us", ours, base, "one task, one partition"))
    return rows


# name -> (sampler, how many priorities there are; 0: as many as rows)
SAMPLERS: dict[str, tuple[Callable[[], BaseSampler], int]] = {
    "in order": (SequentialSampler, 0),
    "a user's, by list": (ListSampler, 0),
    "by priority, all different": (PrioritySampler, 0),
    "by priority, 3 levels": (PrioritySampler, 3),
    "groups of 8": (lambda: GRPOGroupNSampler(8), 0),
    "groups by priority": (lambda: PrioritySampler(inner=GRPOGroupNSampler(8)), 0),
    "fresh groups by priority": (lambda: FreshnessSampler(PrioritySampler(inner=GRPOGroupNSampler(8)), 2), 0),
}


def _by_sampler(sizes: Sequence[int], rounds: int) -> list[Row]:
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for (name, (make, levels)), rows in product(SAMPLERS.items(), sizes):
        found[name, rows] = _dealt(make(), levels, rows, min(rounds, rows // BATCH - 2))
    made = []
    for (name, rows), (first, later) in found.items():
        what = f"claim of {BATCH} of {rows:,} tagged rows in the core, {name}"
        more = {"first_us": first}
        made.append(against(what, "us", later, found["in order", rows][1], "in order", more=more))
    return made


def _dealt(sampler: BaseSampler, levels: int, rows: int, rounds: int) -> tuple[float, float]:
    """Return the microseconds of the first claim and of later ones."""
    core, draw = Core(sampler), np.random.default_rng(0)
    for first in range(0, rows, 4096):
        count = min(4096, rows - first)
        values = draw.integers(0, levels, count) if levels else draw.random(count)
        core.publish(count, tags=[{"priority": value, "policy_version": 1} for value in values.tolist()])
    took = _some(core, rounds + 1)
    return took[0] * 1e6, statistics.median(took[1:]) * 1e6
