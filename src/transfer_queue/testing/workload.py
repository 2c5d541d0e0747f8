"""What the clients of a run with faults do: producers, consumers, ranks with replicas, readers and a cleaner.

Each is a generator of a client's calls that goes on whatever fails, and enters into the ledger what it sees. One whose
client was killed has a successor, which begins with what is known to all.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator

from tensordict import TensorDict

from transfer_queue.client.calls import Call
from transfer_queue.client.transfers import UNCERTAIN, Operation
from transfer_queue.errors import (
    BatchGoneError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownPartitionError,
)
from transfer_queue.messages import AnyReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.testing.cluster import Task
from transfer_queue.testing.faulty import FaultyCluster
from transfer_queue.testing.ledger import Ledger, LedgerError, content
from transfer_queue.testing.retrying import RetryingClient, sleep

MAIN, SIDE = "main", "side"  # partitions: one in which nothing may be lost, one in which anything is overwritten
TASKS = ("train", "judge")
RANKS, REPLICAS = 2, 2
SCENARIOS = ("rows", "groups", "ranks")

Script = Callable[[RetryingClient], Generator[Call, AnyReply, None]]


def fields_of(task: str) -> list[str]:
    """What a task wants of a sample."""
    return ["x"] if task == "judge" else ["x", "y"]


class Workload:
    """All clients of one run. group: samples in a group. width: numbers in a value. closing: they shall end."""

    def __init__(self, draw: random.Random, scenario: str, ledger: Ledger) -> None:
        self.draw = draw
        self.scenario = scenario
        self.ledger = ledger
        self.group = draw.randint(2, 3)
        self.width = draw.choice([8, 512, 2048, 6144])
        self.puts = draw.randint(2, 8)
        self.closing = False
        self._cluster: FaultyCluster | None = None
        self._running: dict[str, tuple[Script, Task[None]]] = {}
        self._born = 0

    def sampler(self) -> BaseSampler:
        """Of the controller."""
        if self.scenario == "groups":
            return GRPOGroupNSampler(self.group)
        return RankAwareSampler(RANKS) if self.scenario == "ranks" else SequentialSampler()

    # ------------------------------------------------------------ clients

    def begin(self, cluster: FaultyCluster) -> None:
        """Every role, each with a client of its own."""
        self._cluster = cluster
        maker = cluster.client("maker")
        maker.create_partition(MAIN, group_size=self.group if self.scenario == "groups" else None)
        maker.close()
        for _ in range(2):
            self._role("producer", self._produce)
        if self.scenario == "ranks":
            for rank in range(RANKS):
                for _ in range(REPLICAS):
                    self._role(f"rank{rank}", self._ranked(rank))
        else:
            for task in TASKS:
                for _ in range(2):
                    self._role(task, self._consumer(task))
        for _ in range(2):
            self._role("side", self._aside)
            self._role("reader", self._browse)
        self._role("cleaner", self._clean)

    def _role(self, name: str, script: Script) -> None:
        assert self._cluster is not None
        self._born += 1
        client = self._cluster.client(f"{name}-{self._born}")
        self._running[client.name] = script, client.start(self._life(client, script))

    def _life(self, client: RetryingClient, script: Script) -> Generator[Call, AnyReply, None]:
        yield from sleep(self.draw.uniform(0, 1))
        yield from script(client)
        with contextlib.suppress(TransferQueueError):
            yield from client.leave()

    def kill(self, client: RetryingClient) -> None:
        """One ends as if killed; another takes its place."""
        found = self._running.pop(client.name, None)
        if found is None:
            return
        client.die()
        role = client.name.split("-")[0]
        if not found[1].done:
            self._role(role, found[0])

    def done(self) -> bool:
        """Whether all have ended. Raises what one of them raised."""
        for _, task in self._running.values():
            if task.error is not None:
                raise task.error
        return all(task.done for _, task in self._running.values())

    # ------------------------------------------------------------ roles

    def _pause(self, most: float) -> Operation[None]:
        yield from sleep(self.draw.choice([0.0, self.draw.uniform(0, most)]))

    def _data(self, numbers: list[int], names: tuple[str, ...], version: int) -> TensorDict:
        return TensorDict({n: content(numbers, n, version, self.width) for n in names}, batch_size=[len(numbers)])

    def _produce(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """New samples, in groups where these count, and their second field a while later."""
        while self.puts > 0:
            self.puts -= 1
            groups, size = self.draw.randint(1, 3), self.group
            numbers: list[int] = []
            for _ in range(groups):
                numbers += self.ledger.new(MAIN, size, f"g{len(self.ledger.samples)}")
            names = ("x",) if self.draw.random() < 0.5 else ("x", "y")
            named = [str(self.ledger.samples[number].group) for number in numbers]
            meta = yield from self._put(client, numbers, names, named if self.scenario == "groups" else None)
            yield from self._pause(1.0)
            if meta is not None:
                yield from self._update(client, meta, numbers, 2)
            if self.draw.random() < 0.3:
                with contextlib.suppress(TransferQueueError):
                    yield from client.state.hand_back()

    def _put(
        self, client: RetryingClient, numbers: list[int], names: tuple[str, ...], groups: list[str] | None
    ) -> Operation[BatchMeta | None]:
        self.ledger.trying(numbers, names, 1)
        try:
            meta = yield from client.operations.put(
                self._data(numbers, names, 1), partition_id=MAIN, group_ids=groups, timeout=self.draw.choice([None, 5])
            )
        except UNCERTAIN:
            return None
        except TransferQueueError:
            self.ledger.refused(numbers)
            return None
        self.ledger.put(numbers, meta.global_indexes, names, 1)
        return meta

    def _update(self, client: RetryingClient, meta: BatchMeta, numbers: list[int], version: int) -> Operation[None]:
        """The second field of these samples, until it is known to be there."""
        while not self.closing or version == 2:
            self.ledger.trying(numbers, ("y",), version)
            try:
                yield from client.operations.put(self._data(numbers, ("y",), version), meta, timeout=5)
            except StorageKeyNotFoundError:
                return
            except TransferQueueError:
                version += 1
                yield from self._pause(1.0)
                continue
            self.ledger.put(numbers, meta.global_indexes, ("y",), version)
            return

    def _consumer(self, task: str) -> Script:
        fields = fields_of(task)

        def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
            while not self.closing:
                count = self.draw.randint(1, 2) * self.group
                lease = self.draw.uniform(0.2, 2.0)
                with contextlib.suppress(TransferQueueError):
                    meta = yield from client.operations.get_meta(
                        fields, count, MAIN, task_name=task, lease=lease, timeout=1.0
                    )
                    yield from self._take(client, meta, task)

        return script

    def _take(self, client: RetryingClient, meta: BatchMeta, task: str) -> Operation[None]:
        """Reads a batch, and acknowledges it, or gives it back; sometimes its lease is over by then."""
        numbers = yield from self._look(client, meta)
        if numbers is None:
            return
        if self.scenario == "groups":
            self.ledger.whole(numbers)
        self.ledger.handed(task, numbers)
        yield from self._pause(1.0)
        if self.draw.random() < 0.1:
            yield from client.operations.nack(meta)
            return
        self.ledger.maybe_acked(task, numbers)
        if (yield from client.operations.ack(meta)):
            self.ledger.acked(task, numbers)

    def _look(self, client: RetryingClient, meta: BatchMeta) -> Operation[list[int] | None]:
        indexes = meta.global_indexes
        known = [self.ledger.by_index[i] for i in indexes if i in self.ledger.by_index]
        since = {name: self.ledger.before(known, name) for name in ("x", "y")}
        try:
            data = yield from client.operations.get_data(meta, layout="dense")
        except TransferQueueError:
            return None
        return self.ledger.seen(indexes, data, since)

    def _ranked(self, rank: int) -> Script:
        def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
            number = 0
            while not self.closing:
                sampling = {"dp_rank": rank, "batch_index": number}
                try:
                    meta = yield from client.operations.get_meta(
                        ["x"], self.group, MAIN, task_name="train", sampling_config=sampling, timeout=1.0
                    )
                except BatchGoneError:
                    number += 1
                    continue
                except TransferQueueError:
                    continue
                self.ledger.dealt((MAIN, "train", rank, number), meta.global_indexes)
                yield from self._look(client, meta)
                yield from self._pause(1.0)
                number += 1

        return script

    def _aside(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Keys that are overwritten, read and cleared again and again."""
        version = 0
        keys: dict[str, int] = {}
        while not self.closing:
            key = f"k{self.draw.randint(0, 3)}"
            version += 1
            try:
                if key not in keys:
                    numbers = self.ledger.new(SIDE, 1)
                    self.ledger.clearing(numbers)
                    self.ledger.trying(numbers, ("x",), version)
                    data = self._data(numbers, ("x",), version)
                    name = f"{client.name}-{numbers[0]}"
                    yield from client.operations.kv_batch_put([name], SIDE, data)
                    keys[key] = numbers[0]
                elif self.draw.random() < 0.4:
                    self.ledger.trying([keys[key]], ("x",), version)
                    data = self._data([keys[key]], ("x",), version)
                    yield from client.operations.kv_batch_put([f"{client.name}-{keys[key]}"], SIDE, data)
                    self.ledger.samples[keys[key]].sure["x"] = version
                elif self.draw.random() < 0.6:
                    since = {"x": self.ledger.before([keys[key]], "x")}
                    data = yield from client.operations.kv_batch_get(
                        [f"{client.name}-{keys[key]}"], SIDE, layout="dense"
                    )
                    got = self.ledger.seen(None, data, since)
                    if got != [keys[key]]:
                        raise LedgerError(f"key of sample {keys[key]} reads as sample {got}")
                else:
                    yield from client.operations.kv_clear([f"{client.name}-{keys[key]}"], SIDE)
                    self.ledger.cleared([keys.pop(key)])
                if self.draw.random() < 0.3:
                    yield from client.state.hand_back()
            except (StorageKeyNotFoundError, UnknownPartitionError) as error:
                raise LedgerError(f"a key that was put is not there: {error}") from error
            except TransferQueueError:
                keys.pop(key, None)
            yield from self._pause(0.5)

    def _browse(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Reads whatever is there."""
        while not self.closing:
            with contextlib.suppress(TransferQueueError):
                place = self.draw.choice([MAIN, SIDE, SIDE])
                meta = yield from client.operations.get_meta(["x"], None, place, mode="force_fetch")
                some = self.draw.sample(range(len(meta)), min(len(meta), 3))
                yield from self._look(client, meta.select_samples(some))
            yield from self._pause(1.0)

    def _clean(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Clears samples that every task is through with, and some that none is."""
        tasks = ("train",) if self.scenario == "ranks" else TASKS
        while not self.closing:
            yield from self._pause(2.0)
            done = [
                number
                for number, sample in self.ledger.samples.items()
                if sample.partition == MAIN and sample.index is not None and not sample.cleared
                and all(sample.acked.get(task) for task in tasks)
            ]  # fmt: skip
            if self.draw.random() < 0.2:
                done += [n for n, s in self.ledger.samples.items() if s.partition == MAIN and s.index is not None][:1]
            if not done:
                continue
            self.ledger.clearing(done)
            indexes = sorted({int(self.ledger.samples[number].index or 0) for number in done})
            try:
                yield from client.operations.clear_samples(BatchMeta(indexes, [MAIN] * len(indexes)))
            except TransferQueueError:
                continue
            self.ledger.cleared(done)
