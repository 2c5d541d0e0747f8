"""How many items per second go through `tq.Queue`, beside the queues of multiprocessing and of Ray?

One process puts an item and gets it, again and again, so that no time is hidden by work in other processes. With
prefetching it puts and gets 64 items at a time: the puts with `put_many`, the gets one by one. Each round measures both
queues, and compares every item that comes out.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from typing import Any

from benchmarks.harness.queue_items import LARGE, SMALL, check, item_of, pairs
from benchmarks.harness.report import Row, Scale, compared
from benchmarks.harness.systems import system
from transfer_queue.queues import Queue

QUESTION = "How many items per second go through a queue, in one process?"
NOTE = """An item is a dict of three tensors of 64 floats, or a tensor of 8 MB. The targets for one process are 10 times
the rate of `ray.util.queue` for 8 MB, and 1,000 small items a second, or 10,000 with prefetching."""
ROUNDS = 5
AT_ONCE = 64
WHAT = {SMALL: "put and get of 3 tensors of 64 f32", LARGE: "put and get of a tensor of 8 MB"}
TARGETS = {SMALL: (1000.0, 134.0), LARGE: (150.0, 15.0)}  # a second: target, and Ray's then


def batches(queue: Queue, item: Any, count: int) -> float:
    """Return the same with puts of many items and prefetched gets."""
    took = 0.0
    for _ in range(0, count, AT_ONCE):
        began = time.perf_counter()
        queue.put_many([item] * AT_ONCE)
        found = [queue.get() for _ in range(AT_ONCE)]
        took += time.perf_counter() - began
        for got in found:
            check(got, item)
    return count / took


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    rounds = scale.pick(ROUNDS, 1)
    rows = []
    with system():
        for kind, full in ((SMALL, 1000), (LARGE, 50)):
            rows.append(_beside_multiprocessing(kind, rounds, scale.pick(full, 5)))
        rows.append(_prefetched(rounds, scale.pick(8192, AT_ONCE)))
    return [_beside_peers(scale, row) for row in rows]


def _beside_multiprocessing(kind: str, rounds: int, count: int) -> Row:
    ours, item = Queue(), item_of(kind)
    theirs: Any = multiprocessing.Queue()
    pairs(ours.put, ours.get, item, count)  # warm up: the first pairs use memory for the first time
    found = [(pairs(ours.put, ours.get, item, count), pairs(theirs.put, theirs.get, item, count))
             for _ in range(rounds)]  # fmt: skip
    theirs.close()
    target, then = TARGETS[kind]
    mine, other = zip(*found, strict=True)
    return compared(WHAT[kind], "a second", mine, other, "multiprocessing", target=target, then=then)


def _prefetched(rounds: int, count: int) -> Row:
    single, queue, item = Queue(), Queue(prefetch=AT_ONCE), item_of(SMALL)
    batches(queue, item, AT_ONCE)
    found = [(batches(queue, item, count), pairs(single.put, single.get, item, count // 16 + 1)) for _ in range(rounds)]
    mine, other = zip(*found, strict=True)
    what = f"{WHAT[SMALL]}, put_many and prefetch of {AT_ONCE}"
    return compared(what, "a second", mine, other, "without prefetching", target=10_000.0)


def _beside_peers(scale: Scale, row: Row) -> Row:
    for kind, what in WHAT.items():
        if row.what == what:
            peers = scale.ask_peers("queue", kind=kind, count=scale.pick(100 if kind == SMALL else 20, 3))
            return replace(row, peers={name: figures["a_second"] for name, figures in peers.items()})
    return row
