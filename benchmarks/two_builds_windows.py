"""The process of one build in `benchmarks.two_builds`.

It prepares a measure, or measures one short window of it, for each line that it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

import transfer_queue
from benchmarks.harness import payloads
from benchmarks.harness.counted.sitecustomize import count_instructions, counted
from benchmarks.harness.machine import RawSocket, clocked, cpu_seconds
from benchmarks.harness.payloads import Payload
from benchmarks.harness.systems import System, Worker, raw_socket, system, waiting_claims
from transfer_queue import interface as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.client import TransferQueueClient
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.queues import Queue

BATCH = Payload("dense", 64, 3, 64)
KEYS = BATCH.keys
LARGE = {"288 MiB": Payload("dense", 1024, 9, 8192), "35 MiB of ragged rows": Payload("jagged", 1024, 4, 1500)}
CLAIM = 32
"""Rows of a claim, and of a batch of a loader."""
AHEAD = 8
"""Batches that are ready beyond those of a window, so that the workers of a loader never wait."""
TOGETHER = 16
"""Items of one `get_many`, and of a prefetching get."""
IN_FLIGHT = 64
RANKS, RANKS_OF_A_CLIENT = 1024, 32
PARTITIONS = 10_000
LISTED, SAVED = 10_000, 1000
"""Keys of a long list, and rows of a checkpoint."""
BYTES = (300, 100)
"""Bytes of a request and a reply of the bare socket, as in a put of a row."""
ITEM = {"prompt": torch.arange(16), "score": 0.5}


class Measure(NamedTuple):
    """A small operation."""

    calls: int
    """How often a window makes it."""
    run: Callable[[int], list[float]]
    """Makes this number of calls and returns the seconds of each."""
    prepare: Callable[[int], object] = bool
    """Makes what this number of calls needs. Its time is not counted."""
    finish: Callable[[], object] = bool
    """Removes what a window has left. Its time is not counted."""


def first_get(partition: str) -> float:
    """Return the seconds of a get of 64 rows in a new client. Runs in a worker."""
    client = tq.get_client()
    return clocked(client.kv_batch_get, KEYS, partition)


def each(act: Callable[[], Any]) -> Callable[[int], list[float]]:
    """Return a function that makes a number of calls, one after the other."""
    return lambda calls: [clocked(act) for _ in range(calls)]


def table(rows: int) -> TensorDict:
    """Return rows with two fields."""
    numbers = torch.arange(rows, dtype=torch.int32)
    return TensorDict({"x": numbers, "y": numbers}, [rows])


class Windows:
    """Measures small operations of one client of one system."""

    def __init__(self, queue: System, bare: RawSocket | None, quick: bool = False) -> None:
        self._queue, self._bare = queue, bare
        self._ranks, self._partitions = (RANKS_OF_A_CLIENT, 100) if quick else (RANKS, PARTITIONS)
        self._client = tq.get_client()
        self._number = count()
        self._loop = asyncio.new_event_loop()
        self._batch = payloads.make(BATCH, 1)
        self._row = {"prompt": torch.arange(16), "score": torch.tensor(0.5), "mask": torch.ones(16)}
        self._tags = [{"n": number, "status": "ready"} for number in range(64)]
        tq.kv_batch_put(KEYS, "kept", self._batch, self._tags)
        self._meta = self._client.kv_retrieve_meta(KEYS, "kept")
        self._queues = {prefetch: Queue(f"items-{prefetch}", prefetch=prefetch) for prefetch in (1, TOGETHER)}
        self._loaders: dict[int, Iterator[Any]] = {}
        self._received: list[Any] = []
        self._views: list[TensorDict] = []
        self._large: dict[str, TensorDict] = {}
        self._of_ranks: list[TransferQueueClient] = []
        self._folder = tempfile.TemporaryDirectory(prefix="tqb-")
        self._made: list[list[str]] = []
        """The partitions that each of the next drops removes."""
        self.measures = (
            self._puts_and_gets() | self._claims() | self._queue_calls() | self._asynchronous_calls() | self._copies()
            | self._rare()
        )  # fmt: skip

    def _clearing(self, partition: str) -> Callable[[], object]:
        return lambda: self._client.clear_partition(partition)

    def _puts_and_gets(self) -> dict[str, Measure]:
        client, bare, measures = self._client, self._bare, {}
        view = partial(client.get_data, self._meta, copy=False)
        if bare is not None:
            measures["bare socket"] = Measure(200, lambda calls: [bare.seconds(*BYTES) for _ in range(calls)])
        return measures | {
            "empty round trip": Measure(200, each(client.get_partition_list)),
            "put of a row": Measure(80, each(self._put_row), finish=self._clearing("rows")),
            "put of 64 rows x 3 fields": Measure(30, each(self._put_batch), finish=self._clearing("batches")),
            "get of 64 rows x 3 fields": Measure(40, each(lambda: tq.kv_batch_get(KEYS, "kept"))),
            "get_data of 64 rows x 3 fields": Measure(40, each(lambda: client.get_data(self._meta))),
            "get_data of 64 rows x 3 fields as views": Measure(
                40, each(lambda: self._hold(view)), finish=self._views.clear
            ),
            "tag update of a row": Measure(80, each(self._update_tag)),
            "tag update of 64 rows": Measure(30, each(lambda: tq.kv_batch_put(KEYS, "kept", tags=self._tags))),
            "kv_list of 64 keys": Measure(80, each(lambda: tq.kv_list("kept"))),
            "first get of a client": Measure(1, self._first_gets),
        }

    def _copies(self) -> dict[str, Measure]:
        measures: dict[str, Measure] = {}
        for what, payload in LARGE.items():
            get, ready = partial(tq.kv_batch_get, payload.keys, what), partial(self._put_large, what)
            measures |= {
                f"put of {what}": Measure(2, each(partial(self._copy, what)), ready, self._clearing("copied")),
                f"get of {what}": Measure(2, each(get), ready),
                f"get of {what} as views": Measure(
                    2, each(partial(self._hold, partial(get, copy=False))), ready, self._views.clear
                ),
            }
        return measures

    def _claims(self) -> dict[str, Measure]:
        def rows_for(partition: str) -> Callable[[int], object]:
            return lambda calls: self._client.put(table(CLAIM * calls), partition_id=partition)

        measures = {
            what: Measure(40, each(act), rows_for(partition), self._clearing(partition))
            for what, partition, act in (
                (f"claim of {CLAIM}", "claimed", self._claim),
                (f"claim of {CLAIM} by rank and batch", "by-rank", self._claim_by_rank),
            )
        }
        for workers in (0, 2):
            rows_for(f"loaded-{workers}")(AHEAD)
            what = f"batch of {CLAIM} of a loader, {workers} workers"
            take = each(lambda workers=workers: self._received.append(next(self._loader(workers))))  # type: ignore[misc]
            measures[what] = Measure(30, take, rows_for(f"loaded-{workers}"), self._clear_received)
        return measures

    def _queue_calls(self) -> dict[str, Measure]:
        queue, ahead = (self._queues[prefetch] for prefetch in (1, TOGETHER))

        def items(into: Queue, times: int) -> Callable[[int], object]:
            return lambda calls: into.put_many([ITEM] * (calls * times))

        def empty() -> object:
            return queue.get_many(1_000_000)

        return {
            "put to a queue": Measure(80, each(lambda: queue.put(ITEM)), finish=empty),
            "get of a queue": Measure(80, each(queue.get), items(queue, 1)),
            "get_async of a queue": Measure(80, self._awaited(queue.get_async), items(queue, 1)),
            f"get_many of {TOGETHER} items": Measure(
                30, each(lambda: queue.get_many(TOGETHER)), items(queue, TOGETHER)
            ),
            f"{TOGETHER} gets with a prefetch of {TOGETHER}": Measure(
                30, each(lambda: [ahead.get() for _ in range(TOGETHER)]), items(ahead, TOGETHER)
            ),
        }

    def _asynchronous_calls(self) -> dict[str, Measure]:
        def put() -> Awaitable[Any]:
            return tq.async_kv_put(f"row-{next(self._number)}", "rows", self._row, {"n": 1, "status": "ready"})

        def get() -> Awaitable[Any]:
            return tq.async_kv_batch_get(KEYS[next(self._number) % 64], "kept")

        return {
            f"{IN_FLIGHT} async puts of a row at once": Measure(
                4, self._awaited(put, IN_FLIGHT), finish=self._clearing("rows")
            ),
            f"{IN_FLIGHT} async gets of a row at once": Measure(4, self._awaited(get, IN_FLIGHT)),
        }

    def _rare(self) -> dict[str, Measure]:
        return {
            f"{RANKS:,} ranks woken by one put": Measure(
                1, self._wake_ranks, lambda calls: self._client.create_partition("woken"), self._clearing("woken")
            ),
            f"kv_list of {LISTED:,} keys": Measure(2, each(lambda: tq.kv_list("listed")), self._once("listed", LISTED)),
            f"save of {SAVED:,} rows": Measure(1, each(self._save), self._once("saved", SAVED)),
            f"load of {SAVED:,} rows": Measure(1, self._load, self._once("saved", SAVED)),
            f"drop of {PARTITIONS:,} partitions": Measure(1, self._drop, self._make_partitions),
        }

    def _once(self, partition: str, rows: int) -> Callable[[int], object]:
        """Return a function that puts keys with a tag into a partition, unless it exists."""
        keys, tags = [f"k{number}" for number in range(rows)], [{"n": number} for number in range(rows)]

        def put(calls: int) -> None:
            if partition not in self._client.get_partition_list():
                tq.kv_batch_put(keys, partition, table(rows), tags=tags)

        return put

    # ------------------------------------------------------------ operations

    def _put_row(self) -> None:
        tq.kv_put(f"row-{next(self._number)}", "rows", self._row, {"n": 1, "status": "ready"})

    def _put_batch(self) -> None:
        number = next(self._number)
        tq.kv_batch_put([f"{key}-{number}" for key in KEYS], "batches", self._batch, self._tags)

    def _update_tag(self) -> None:
        tq.kv_put(KEYS[0], "kept", tag={"n": next(self._number), "status": "running"})

    def _hold(self, get: Callable[[], TensorDict]) -> None:
        """Get views, and keep them until the end of a window, so that their end is not measured."""
        self._views.append(get())

    def _put_large(self, what: str, calls: int) -> None:
        """Put the rows of large gets, unless this was done before."""
        if what not in self._large:
            self._large[what] = payloads.make(LARGE[what], 1)
            tq.kv_batch_put(LARGE[what].keys, what, self._large[what])

    def _copy(self, what: str) -> None:
        tq.kv_batch_put(LARGE[what].keys, "copied", self._large[what])

    def _claim(self) -> None:
        self._client.get_meta(["x", "y"], CLAIM, "claimed", task_name="train")

    def _claim_by_rank(self) -> None:
        sampling = {"sampler": "RankAwareSampler", "dp_rank": 0, "batch_index": next(self._number)}
        self._client.get_meta(["x", "y"], CLAIM, "by-rank", task_name="train", sampling_config=sampling)

    def _loader(self, workers: int) -> Iterator[Any]:
        if workers not in self._loaders:
            dataset = StreamingDataset(
                {"system": {"folder": self._queue.address}}, CLAIM, CLAIM, ["x", "y"], f"loaded-{workers}", "train", 0,
                keep_batches=0,
            )  # fmt: skip
            self._loaders[workers] = iter(StreamingDataLoader(dataset, num_workers=workers))
        return self._loaders[workers]

    def _clear_received(self) -> None:
        for _, meta in self._received:
            self._client.clear_samples(meta)
        self._received.clear()

    def _awaited(self, act: Callable[[], Awaitable[Any]], at_once: int = 1) -> Callable[[int], list[float]]:
        """Return a function that makes calls in an event loop, this number at once."""

        async def run(calls: int) -> list[float]:
            found = []
            for _ in range(calls):
                began = time.perf_counter()
                if at_once == 1:
                    await act()
                else:
                    await asyncio.gather(*(act() for _ in range(at_once)))
                found.append(time.perf_counter() - began)
            return found

        return lambda calls: self._loop.run_until_complete(run(calls))

    def _first_gets(self, calls: int) -> list[float]:
        found = []
        for _ in range(calls):
            with Worker(self._queue.address) as reader:
                found.append(reader.do(first_get, "kept"))
        return found

    def _wake_ranks(self, calls: int) -> list[float]:
        """Return the seconds from a put to the last batch of the ranks that wait for it."""
        assert CURRENT.system is not None
        while len(self._of_ranks) * RANKS_OF_A_CLIENT < self._ranks:
            self._of_ranks.append(TransferQueueClient(CURRENT.system))

        async def wake() -> float:
            batch = next(self._number)
            samplings = [
                {"sampler": "RankAwareSampler", "dp_rank": n, "batch_index": batch} for n in range(self._ranks)
            ]
            waits = [
                asyncio.ensure_future(
                    self._of_ranks[n // RANKS_OF_A_CLIENT].async_get_meta(
                        ["x"], 1, "woken", task_name="train", sampling_config=sampling, timeout=100
                    )
                )
                for n, sampling in enumerate(samplings)
            ]
            while waiting_claims("woken") < self._ranks:
                await asyncio.sleep(0.01)
            began = time.perf_counter()
            await self._client.async_put(table(self._ranks), partition_id="woken")
            await asyncio.gather(*waits)
            return time.perf_counter() - began

        return [self._loop.run_until_complete(wake()) for _ in range(calls)]

    def _save(self) -> None:
        tq.save_checkpoint(Path(self._folder.name) / str(next(self._number)), partitions="saved")

    def _load(self, calls: int) -> list[float]:
        """Return the seconds of loads of a partition that was dropped before each of them."""
        folder = Path(self._folder.name) / "loaded"
        if not folder.exists():
            tq.save_checkpoint(folder, partitions="saved")
        found = []
        for _ in range(calls):
            self._client.clear_partition("saved")
            found.append(clocked(lambda: tq.load_checkpoint(folder, partitions="saved")))
        return found

    def _make_partitions(self, calls: int) -> None:
        """Make the partitions of a short drop, which is a warm-up, and of further ones."""
        self._made = [
            [f"p{n}-{next(self._number)}" for n in range(many)] for many in (10, *[self._partitions] * (calls - 1))
        ]
        names = [name for names in self._made for name in names]
        self._loop.run_until_complete(
            self._of_all(names, lambda name: self._client.async_put(table(1), partition_id=name))
        )

    def _drop(self, calls: int) -> list[float]:
        def drop() -> None:
            self._loop.run_until_complete(self._of_all(self._made.pop(0), self._client.async_clear_partition))

        return each(drop)(calls)

    async def _of_all(self, names: list[str], act: Callable[[str], Awaitable[Any]]) -> None:
        """Make a call for each name, `IN_FLIGHT` at a time."""
        for first in range(0, len(names), IN_FLIGHT):
            await asyncio.gather(*(act(name) for name in names[first : first + IN_FLIGHT]))

    def close(self) -> None:
        """End the clients of ranks, and the workers of loaders, which hold copies of all descriptors."""
        self._loaders.clear()
        for client in self._of_ranks:
            client.close()
        self._folder.cleanup()

    # ------------------------------------------------------------ windows

    def prepare(self, what: str, calls: int) -> None:
        """Make what a window needs, and make a call, which uses for the first time what it uses."""
        measure = self.measures[what]
        measure.prepare(calls + 1)
        measure.run(1)
        gc.collect()

    def count(self, what: str, calls: int) -> dict[str, float]:
        """Return the bytecode instructions of a call in all processes."""
        folder = os.environ["TQB_INSTRUCTIONS"]
        before = counted(folder)
        self.measures[what].run(calls)
        found = (counted(folder) - before) / calls
        self.measures[what].finish()
        return {"instructions": found}

    def window(self, what: str, calls: int) -> dict[str, float]:
        """Return the median time of a call, and the processor time of a call in all processes, in microseconds."""
        others = [*self._queue.pids.values(), *(each.pid or 0 for each in multiprocessing.active_children())]
        cpu = time.process_time() + cpu_seconds(others)
        found = self.measures[what].run(calls)
        cpu = time.process_time() + cpu_seconds(others) - cpu
        self.measures[what].finish()
        return {"time": statistics.median(found) * 1e6, "cpu": cpu / calls * 1e6}


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Count the instructions of this process and of the servers that it starts."""
    with tempfile.TemporaryDirectory(prefix="tqb-counts-") as folder:
        os.environ["TQB_INSTRUCTIONS"] = folder
        count_instructions(folder)
        try:
            yield
        finally:
            sys.settrace(None)


def serve(quick: bool, counts: bool) -> None:
    """Write the folder of the build and its measures, then a line for each line that is read."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.ExitStack() as stack:
        if counts:
            stack.enter_context(counting())
        bare = None if counts else stack.enter_context(raw_socket())  # its instructions are not counted
        windows = Windows(stack.enter_context(system()), bare, quick)
        stack.callback(windows.close)
        gc.freeze()  # so that collecting takes less time than a window
        head = {"build": str(Path(transfer_queue.__file__).parent.parent), "measures": list(windows.measures)}
        print(json.dumps(head), file=out, flush=True)
        for line in sys.stdin:
            act, what = json.loads(line)
            calls = min(windows.measures[what].calls, 3) if quick else windows.measures[what].calls
            print(json.dumps(getattr(windows, act)(what, calls)), file=out, flush=True)


if __name__ == "__main__":
    serve("--quick" in sys.argv, "--instructions" in sys.argv)
