"""How long is it from the return of a put in one process to the yield of a waiting loader in another one?

Measured alone, and while another process balances large batches; and with 1,024 waiting ranks, each with its own
connection. The processes share one clock (CLOCK_MONOTONIC). The time from the return of a put excludes the put; that
from its call includes it. `rare_events` has the waits beside lists and checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from benchmarks.harness.machine import clocked, cpu_seconds
from benchmarks.harness.report import Row, Scale, against, quantiles
from benchmarks.harness.systems import System, Worker, asked, system, tell, waiting_claims, workers
from transfer_queue import interface as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.client import TransferQueueClient
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

NOTE = """The trainer of Ray is an actor that waits in the get of `ray.util.queue.Queue` for a reference, and gets its
values. The loader of TransferQueue 0.1.11 asks once a second, which is its default."""
QUESTION = "How long is it from the return of a put in one process to the yield of a waiting loader in another one?"
ROWS = 8
RANKS = 16  # ranks of the balanced system
BALANCED = {"controller": {"sampler": "SeqlenBalancedSampler", "sampler_args": {"dp_size": RANKS}}}
RANK_AWARE = {"controller": {"sampler": "RankAwareSampler"}}


# ---------------------------------------------------------------- in the consuming process


def loads(partition: str) -> None:
    """Iterate over a loader until its partition is sealed; report the time and the number of each batch."""
    torch.set_num_threads(1)
    dataset = StreamingDataset(None, ROWS, ROWS, ["x", "y"], partition, "train", 0)
    for data, _ in StreamingDataLoader(dataset):
        tell((time.monotonic(), int(data["y"][0])))
    tell(None)


class Woken(NamedTuple):
    """The batch of a rank."""

    at: float
    indexes: list[int]
    process: int
    cpu: float
    """The processor seconds of the process so far."""


def waits(ranks: list[int], at_once: bool) -> None:
    """Wait for one batch with each rank, over separate connections, and report each batch.

    at_once: Report the batches after the last one, because a report takes as long as a wakeup.
    """
    tq.get_client()
    assert CURRENT.system is not None
    clients = [TransferQueueClient(CURRENT.system) for _ in ranks]

    async def one(client: TransferQueueClient, rank: int) -> None:
        sampling = {"dp_rank": rank, "batch_index": 0}
        meta = await client.async_get_meta(["x"], ROWS, "ranks", "fetch", "train", sampling, timeout=110)
        report(Woken(time.monotonic(), meta.global_indexes, os.getpid(), time.process_time()))

    async def all_of_them() -> None:
        await asyncio.gather(*(one(client, rank) for client, rank in zip(clients, ranks, strict=True)))

    found: list[Woken] = []
    report: Callable[[Woken], None] = found.append if at_once else tell
    asyncio.run(all_of_them())
    for woken in found:
        tell(woken)
    for client in clients:
        client.close()


# ---------------------------------------------------------------- in a process that loads the system meanwhile


def balances(rows: int) -> None:
    """Claim large balanced batches until the parent process sends another request; report the first one to it."""
    client = tq.get_client()
    tags = [{"total_lengths": 100 + (n * 7919) % 8000} for n in range(rows)]
    values = TensorDict({"x": torch.zeros(rows)}, batch_size=[rows])
    for count in itertools.count():
        client.put(values, partition_id="balanced", tags=tags)
        sampling = {"dp_rank": 0, "batch_index": count}
        meta = client.get_meta(["x"], rows // RANKS, "balanced", task_name="t", sampling_config=sampling)
        if len(meta) != rows // RANKS:
            raise AssertionError("a balanced batch has another size")
        if not count:
            tell(None)
        if asked():
            break
    client.clear_partition("balanced")


# ---------------------------------------------------------------- here


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    batches = scale.pick(300, 5)
    rows = []
    with system() as queue:
        rows.append(_woken(queue, batches, "alone", 1, target=(0.5, 5.0), then=(329.0, 999.0)))
    many = scale.pick(8192, 256)
    with system(BALANCED) as queue:
        words = f"a batch of {RANKS} ranks"
        rows.append(_woken(queue, batches, words, RANKS))
        with _loaded(queue, many):
            words += f", while another has {many:,} rows balanced"
            rows.append(_woken(queue, batches, words, RANKS, target=(0.5, 5.0)))
    with system(RANK_AWARE) as queue:
        rows += _ranks(queue, scale.pick(1024, 16))
    peers = scale.ask_peers("wakeup", rows=ROWS, batches=scale.pick(10, 2))
    rows[0] = replace(rows[0], peers={name: found["median_ms"] for name, found in peers.items()})
    called = {name: found["from_call_ms"] for name, found in peers.items()}
    whole = Row("call of a put to yield, alone, median", rows[0].more["from_the_call_p50"], "ms", peers=called)
    return [*(row for each in rows for row in _split(each)), whole]


def _split(row: Row) -> list[Row]:
    """Return a row of waits as two rows: the median and the worst."""
    if "worst_target" not in row.more:
        return [row]
    more = dict(row.more)
    target, then = more.pop("worst_target"), more.pop("worst_then", None)
    worst = Row(f"{row.what}, worst", more["max"], row.unit, target=target, then=then)
    return [replace(row, what=f"{row.what}, median", more=more), worst]


@contextlib.contextmanager
def _loaded(queue: System, rows: int) -> Iterator[None]:
    with Worker(queue.address) as other:
        other.begin(balances, rows)
        other.result()  # the load has run once, and continues
        yield
        other.begin(os.getpid)  # ends the load
        other.result()


def _woken(
    queue: System, batches: int, words: str, ranks: int,
    target: tuple[float, float] | None = None, then: tuple[float, float] | None = None,
) -> Row:  # fmt: skip
    """Measure the milliseconds from the return of a put to the yield of a loader that waits already."""
    client = tq.get_client()
    partition = f"wake {words}"
    client.create_partition(partition)
    since_return, since_call, trips = [], [], []
    rows = ROWS * ranks
    tags = [{"total_lengths": 10}] * rows
    with Worker(queue.address) as consumer:
        consumer.begin(loads, partition)
        for number in range(batches + 1):
            while not waiting_claims(partition):
                pass  # the condition asks the controller, and does not sleep
            values = TensorDict({"x": torch.zeros(rows, 64), "y": torch.full((rows,), number)}, batch_size=[rows])
            trip = clocked(client.get_partition_list)
            called = time.monotonic()
            client.put(values, partition_id=partition, tags=tags)
            returned = time.monotonic()
            yielded, which = consumer.result()
            if which != number:
                raise AssertionError(f"batch {which} was yielded instead of {number}")
            if number:  # the first batch also includes imports
                since_return.append(max(0.0, yielded - returned))
                since_call.append(yielded - called)
                trips.append(trip)
        client.seal(partition)
        while consumer.result() is not None:
            pass
        consumer.result()
    client.clear_partition(partition)
    more = quantiles(since_return) | {"from_the_call_p50": statistics.median(since_call) * 1e3}
    if target is not None:
        more |= {"worst_target": target[1]} | ({"worst_then": then[1]} if then else {})
    return against(
        f"put to yield, {words}", "ms", more["p50"], statistics.median(trips) * 1e3, "empty round trip", more=more,
        target=None if target is None else target[0], then=None if then is None else then[0],
    )  # fmt: skip


def _ranks(queue: System, ranks: int) -> list[Row]:
    """Measure many waiting ranks: each woken by its own put, then all by one put."""
    client = tq.get_client()
    rows = []
    with workers(2, queue.address) as processes:
        for at_once in (False, True):
            client.create_partition("ranks")
            shares = [list(range(ranks))[i :: len(processes)] for i in range(len(processes))]
            for worker, share in zip(processes, shares, strict=True):
                worker.begin(waits, share, at_once)
            while waiting_claims("ranks") < ranks:
                time.sleep(0.02)
            told = _Told(processes)
            rows.append(_all_at_once(queue, ranks, told) if at_once else _one_by_one(ranks, told))
            told.finish()
            client.clear_partition("ranks")
    return rows


def _one_by_one(ranks: int, told: _Told) -> Row:
    client, took, trips = tq.get_client(), [], []
    values = TensorDict({"x": torch.zeros(ROWS)}, batch_size=[ROWS])
    for _ in range(ranks):
        trips.append(clocked(client.get_partition_list))
        meta = client.put(values, partition_id="ranks")
        returned = time.monotonic()
        woken = told.next()
        if woken.indexes != meta.global_indexes:
            raise AssertionError("a rank received other rows than those of the put that woke it")
        took.append(max(0.0, woken.at - returned))
    more = quantiles(took)
    what = f"{ranks:,} waiting ranks, each woken by its own put, p99"
    trip = statistics.median(trips) * 1e3
    return against(what, "ms", more["p99"], trip, "empty round trip", more=more, target=0.4)


def _all_at_once(queue: System, ranks: int, told: _Told) -> Row:
    """Measure one put that wakes all ranks.

    put_ms: until the put returns. controller_ms: until the controller has sent all replies. The others are processor
    time: of the controller in that time, and of the processes of the ranks from their first batch to their last.
    """
    client = tq.get_client()
    trip = statistics.median(clocked(client.get_partition_list) for _ in range(100)) * 1e3
    values = TensorDict({"x": torch.zeros(ROWS * ranks)}, batch_size=[ROWS * ranks])
    controller = [queue.pids["controller"]]
    before = cpu_seconds(controller)
    called = time.monotonic()
    meta = client.put(values, partition_id="ranks")
    returned = time.monotonic()
    client.get_partition_list()  # is answered after all replies were sent
    through = time.monotonic()
    used = cpu_seconds(controller) - before
    found = [told.next() for _ in range(ranks)]
    if sorted(i for woken in found for i in woken.indexes) != meta.global_indexes:
        raise AssertionError("the ranks have not received each row once")
    more = quantiles([woken.at - called for woken in found])
    more |= {"put_ms": (returned - called) * 1e3, "controller_ms": (through - called) * 1e3}
    more |= {"controller_cpu_ms": used * 1e3, "ranks_cpu_ms": _cpu_of_ranks(found) * 1e3}
    what = f"{ranks:,} waiting ranks, all woken by one put: from its call to the last"
    return against(what, "ms", more["max"], trip, "empty round trip", more=more, target=60.0)


def _cpu_of_ranks(found: list[Woken]) -> float:
    """Return the processor seconds of all processes, from the first batch of each to its last."""
    by_process: dict[int, list[float]] = {}
    for woken in found:
        by_process.setdefault(woken.process, []).append(woken.cpu)
    return sum(max(times) - min(times) for times in by_process.values())


class _Told:
    """The reports of some workers, in the order of arrival, until each has ended."""

    def __init__(self, processes: list[Worker]) -> None:
        self._left = list(processes)

    def next(self) -> Any:
        """Return the next report of a worker."""
        while True:
            for worker in list(self._left):
                if worker.has_told():
                    found = worker.result()
                    if found is not None:
                        return found
                    self._left.remove(worker)

    def finish(self) -> None:
        """Wait until all workers have ended."""
        for worker in self._left:
            worker.result()
