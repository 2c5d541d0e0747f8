"""How long does another client wait while something rare and large happens?

A bystander puts a row and waits for its metadata with another client, again and again, while a worker process does one
of these: list 100,000 keys, save and load checkpoints, drop 10,000 partitions, put, get and clear rows of as many
fields as a partition may have, or run 1,000 clients. Each event has a system of its own. Two figures describe it: the
worst time from the call of a put to the return of the get that waits for it, and the processor time of the longest turn
of the controller's loop, which does not depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from benchmarks.harness.report import Row, Scale, quantiles
from benchmarks.harness.systems import Worker
from benchmarks.harness.turn_meter import MeteredSystem, metered_system
from transfer_queue import interface as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.client import TransferQueueClient
from transfer_queue.core.tables.fields import MAX_FIELDS
from transfer_queue.errors import TransferQueueError

QUESTION = "How long does another client wait while something rare and large happens?"
NOTE = """The wait of the bystander includes what the other processes of the machine take from it. The longest turn is
processor time of the controller's loop in which nobody else was served."""
KEPT = 256  # rows of the bystander until it clears them
FIRST = 256  # rows of the bystander before the measurement, because the first ones include imports
WORST, TURN = 5.0, 5.0  # milliseconds
MANY_FIELDS = 40.0  # the most milliseconds for the fields of a whole partition, which are put or read in one turn

Windows = list[tuple[float, float]]
"""(begin, end) of each event on CLOCK_MONOTONIC."""


# ---------------------------------------------------------------- in the process that makes the events

Acts = Iterator[Callable[[], object]]
"""Yields what to measure; the code between two of them prepares it."""


def nothing(size: int, rounds: int) -> Acts:
    """Do nothing for some time."""
    for _ in range(rounds):
        yield lambda: time.sleep(0.3)


def list_keys(keys: int, rounds: int) -> Acts:
    """List keys with two tags."""
    _make_keys(keys)
    for _ in range(rounds):
        yield lambda: tq.kv_list("many")


def save(keys: int, rounds: int) -> Acts:
    """Save a checkpoint of keys with two tags."""
    _make_keys(keys)
    with tempfile.TemporaryDirectory(prefix="tqb-") as folder:
        for number in range(rounds):
            yield lambda number=number: tq.save_checkpoint(Path(folder) / str(number))  # type: ignore[misc]


def load(keys: int, rounds: int) -> Acts:
    """Load a checkpoint of keys with two tags in place of everything."""
    _make_keys(keys)
    with tempfile.TemporaryDirectory(prefix="tqb-") as folder:
        tq.save_checkpoint(folder)
        for _ in range(rounds):
            yield lambda: tq.load_checkpoint(folder)


def load_partition(keys: int, rounds: int) -> Acts:
    """Load a partition of keys with two tags, beside everything else."""
    _make_keys(keys)
    with tempfile.TemporaryDirectory(prefix="tqb-") as folder:
        tq.save_checkpoint(folder)
        for _ in range(rounds):
            tq.get_client().clear_partition("many")
            yield lambda: tq.load_checkpoint(folder, partitions="many")


def drop_partitions(partitions: int, rounds: int) -> Acts:
    """Drop partitions one after the other."""

    def drop_all(partitions: int) -> None:
        for number in range(partitions):
            tq.get_client().clear_partition(f"p{number}")

    for _ in range(rounds):
        _make_partitions(partitions)
        yield lambda: drop_all(partitions)


def drop_together(partitions: int, rounds: int) -> Acts:
    """Drop partitions with concurrent requests."""
    client = tq.get_client()

    async def drop() -> None:
        await asyncio.gather(*(client.async_clear_partition(f"p{number}") for number in range(partitions)))

    for _ in range(rounds):
        _make_partitions(partitions)
        yield lambda: asyncio.run(drop())


def put_new_fields(fields: int, rounds: int) -> Acts:
    """Put a row with many fields that a partition does not have yet."""
    client, values = tq.get_client(), _wide(fields)
    for number in range(rounds):
        yield lambda number=number: client.put(values, partition_id=f"wide{number}")  # type: ignore[misc]


def put_known_fields(fields: int, rounds: int) -> Acts:
    """Put a row with the fields of the row before it. The last one of 16 rows needs longer columns."""
    client, values = tq.get_client(), _wide(fields)
    client.put(values, partition_id="wide")
    for _ in range(rounds):
        yield lambda: client.put(values, partition_id="wide")


def get_fields(fields: int, rounds: int) -> Acts:
    """Get a row with many fields."""
    client = tq.get_client()
    meta = client.put(_wide(fields), partition_id="wide")
    for _ in range(rounds):
        yield lambda: client.get_data(meta)


def clear_fields(fields: int, rounds: int) -> Acts:
    """Clear a row with many fields, while another row has them, too."""
    client, values = tq.get_client(), _wide(fields)
    client.put(values, partition_id="wide")
    for _ in range(rounds):
        meta = client.put(values, partition_id="wide")
        yield lambda meta=meta: client.clear_samples(meta)  # type: ignore[misc]


def drop_fields(fields: int, rounds: int) -> Acts:
    """Drop a partition with many fields."""
    client, values = tq.get_client(), _wide(fields)
    for _ in range(rounds):
        client.put(values, partition_id="wide")
        yield lambda: client.clear_partition("wide")


def many_clients(clients: int, rounds: int) -> Acts:
    """Connect clients, each of which puts a row and gets its values again and again."""
    tq.get_client()
    assert CURRENT.system is not None
    connected = [TransferQueueClient(CURRENT.system) for _ in range(clients)]
    row = TensorDict({"x": torch.zeros(1, 16)}, batch_size=[1])
    seconds = min(2.0, clients / 100)  # a smoke test has few clients

    async def work(client: TransferQueueClient, number: int, until: float) -> None:
        while time.monotonic() < until:
            meta = await client.async_put(row, partition_id=f"work{number % 16}")
            await client.async_get_data(meta)
            await client.async_clear_samples(meta)

    async def all_of_them(until: float) -> None:
        await asyncio.gather(*(work(client, number, until) for number, client in enumerate(connected)))

    for client in connected:
        client.get_partition_list()
    for _ in range(rounds):
        yield lambda: asyncio.run(all_of_them(time.monotonic() + seconds))
    for client in connected:
        client.close()


def _make_keys(keys: int) -> None:
    for first in range(0, keys, 10_000):
        part = range(first, min(keys, first + 10_000))
        tq.kv_batch_put([f"k{i}" for i in part], "many", tags=[{"status": "running", "n": i} for i in part])


def _make_partitions(partitions: int) -> None:
    row = TensorDict({"x": torch.zeros(4, 4)}, batch_size=[4])

    async def make(name: str) -> None:
        await tq.get_client().async_put(row, partition_id=name)

    async def make_all() -> None:
        await asyncio.gather(*(make(f"p{number}") for number in range(partitions)))

    asyncio.run(make_all())


def _wide(fields: int) -> TensorDict:
    return TensorDict({f"field{number}": torch.zeros(1, 1) for number in range(fields)}, batch_size=[1])


def make_events(make: Callable[[int, int], Acts], size: int, rounds: int) -> Windows:
    """Make the events of a kind, and return when they happened. Runs in a worker."""
    torch.set_num_threads(1)
    tq.init()
    windows = []
    for act in make(size, rounds):
        begin = time.monotonic()
        act()
        windows.append((begin, time.monotonic()))
    return windows


# ---------------------------------------------------------------- here


class Bystander:
    """Puts rows, and waits for the metadata of each with another client."""

    def __init__(self) -> None:
        tq.get_client()
        assert CURRENT.system is not None
        self._putter, self._getter = (TransferQueueClient(CURRENT.system) for _ in range(2))
        self._row = TensorDict({"x": torch.zeros(1, 16)}, batch_size=[1])
        self.waits: Windows = []
        """(call of the put, return of the get) of each row."""

    async def run(self, done: Callable[[], bool]) -> None:
        """Put rows until `done` returns True."""
        number = 0
        while not done():
            partition = f"bystander {number // KEPT}"
            number += 1
            getting = asyncio.create_task(self._get(partition))
            await asyncio.sleep(0)  # the get is sent before the put
            called = time.monotonic()
            try:
                await self._putter.async_put(self._row, partition_id=partition)
            except TransferQueueError:  # a load ends what waits with an error
                await asyncio.wait([getting], timeout=0.1)
                getting.cancel()
            returned = await getting
            if returned is not None:
                self.waits.append((called, returned))
            if number % KEPT == 0:
                await self._putter.async_clear_partition(partition)

    async def _get(self, partition: str) -> float | None:
        try:
            await self._getter.async_get_meta(["x"], 1, partition, "fetch", "train", timeout=10)
        except (TransferQueueError, asyncio.CancelledError):
            return None
        return time.monotonic()

    def close(self) -> None:
        """Close the connections."""
        self._putter.close()
        self._getter.close()


@dataclass(frozen=True)
class Event:
    """What the bystander is measured beside."""

    words: str
    make: Callable[[int, int], Acts]
    size: int
    quick: int
    """The size of a smoke test."""
    rounds: int
    worst: float = WORST
    """The most milliseconds that the bystander should wait."""
    median: float | None = None
    turn: float = TURN
    """The most milliseconds of the longest turn."""


KEYS, PARTITIONS, WIDE = 100_000, 10_000, MAX_FIELDS
EVENTS = (
    Event("alone", nothing, 0, 0, 5),
    Event(f"list {KEYS:,} keys", list_keys, KEYS, 300, 5),
    Event(f"save {KEYS:,} keys", save, KEYS, 300, 5),
    Event(f"load {KEYS:,} keys", load, KEYS, 300, 3),
    Event(f"load a partition of {KEYS:,} keys", load_partition, KEYS, 300, 3),
    Event(f"drop {PARTITIONS:,} partitions one by one", drop_partitions, PARTITIONS, 50, 1),
    Event(f"drop {PARTITIONS:,} partitions at once", drop_together, PARTITIONS, 50, 2),
    Event(f"put {WIDE:,} new fields", put_new_fields, WIDE, 100, 3, worst=MANY_FIELDS, turn=MANY_FIELDS),
    Event(f"put {WIDE:,} known fields", put_known_fields, WIDE, 100, 16, worst=MANY_FIELDS, turn=MANY_FIELDS),
    Event(f"get {WIDE:,} fields", get_fields, WIDE, 100, 3, worst=MANY_FIELDS, turn=MANY_FIELDS),
    Event(f"clear {WIDE:,} fields", clear_fields, WIDE, 100, 3, worst=MANY_FIELDS, turn=MANY_FIELDS),
    Event(f"drop {WIDE:,} fields", drop_fields, WIDE, 100, 3, worst=MANY_FIELDS, turn=MANY_FIELDS),
    Event("1,000 clients at work", many_clients, 1000, 20, 2, worst=50.0, median=10.0),
)


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    rows = []
    for events in scale.pick([[event] for event in EVENTS], [EVENTS]):  # a smoke test has one system for all
        with metered_system() as queue, Worker(queue.system.address) as other:
            for event in events:
                rows += measure(event, scale, queue, other)
                for partition in tq.get_client().get_partition_list():
                    tq.get_client().clear_partition(partition)
    return rows


def measure(event: Event, scale: Scale, queue: MeteredSystem, other: Worker) -> list[Row]:
    """Return the waits of a bystander beside the events of a worker, and the longest turn of the loop."""
    size, rounds = scale.pick(event.size, event.quick), scale.pick(event.rounds, 1)
    bystander = Bystander()
    first = scale.pick(FIRST, 8)
    asyncio.run(bystander.run(lambda: len(bystander.waits) == first))
    gc.collect()
    gc.disable()
    other.begin(make_events, event.make, size, rounds)
    try:
        asyncio.run(bystander.run(other.has_ended))
    finally:
        gc.enable()
    windows: Windows = other.result()
    bystander.close()
    waits = [end - begin for begin, end in bystander.waits if _overlaps(begin, end, windows)]
    turns = _longest_turns(queue, windows)
    more = quantiles(waits or [0.0])
    turn = Row(f"longest turn of the loop, {event.words}", max(turns, default=0.0) * 1e3, "ms", target=event.turn)
    turn.more.update({f"{place}_ms": took * 1e3 for place, took in zip(("second", "third"), turns[1:3])})
    worst = Row(f"put to yield, {event.words}, worst", more.pop("max"), "ms", target=event.worst, more=more)
    if event.median is None:
        return [worst, turn]
    return [Row(f"put to yield, {event.words}, median", more["p50"], "ms", target=event.median), worst]


def _overlaps(begin: float, end: float, windows: Windows) -> bool:
    return any(begin <= last and first <= end for first, last in windows)


def _longest_turns(queue: MeteredSystem, windows: Windows) -> list[float]:
    """Return the processor seconds of the controller's turns during these windows, the longest first."""
    return sorted((took for ended, took in queue.turns() if _overlaps(ended - took, ended, windows)), reverse=True)
