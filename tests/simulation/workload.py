"""The clients of a run with faults: producers, consumers, readers and a cleaner.

`rank_actors` has the ranks with replicas, `maintenance_actors` the clients that repair, save, load and drain. The
script of each client is a generator of calls that continues after every failure, and enters the results into the
ledger. A killed client has a successor, which starts with the state that all clients share.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator
from pathlib import Path

import torch
from tensordict import TensorDict

from tests.simulation import hand_over_actors, maintenance_actors, queue_actors, rank_actors, wide_actors
from tests.simulation.faulty_cluster import FaultyCluster
from tests.simulation.ledger import Ledger, LedgerError, content, read
from tests.simulation.retrying_client import RetryingClient, Script, sleep
from tests.simulation.run_features import EQUAL, MAIN, RANKS, REPLICAS, SIDE, TASKS, Features, fields_of
from transfer_queue.client.attachment import UNCERTAIN
from transfer_queue.errors import (
    InvalidArgumentError,
    StaleMetadataError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownPartitionError,
)
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Call, Operation
from transfer_queue.testing.simulated_client import Task

ASIDE_TASKS = 4
"""Tasks of a client that overwrites keys."""


class Workload:
    """All clients of one run.

    group: The number of samples in a group.
    width: The number of numbers in a value.
    closing: The clients must end.
    saved: The folders of complete checkpoints.
    drained: Units that may be drained at the moment.
    wide: The number of puts with many fields that succeeded.
    moved: How often samples of a partition were saved, and added to the running system again.
    """

    def __init__(self, draw: random.Random, features: Features, ledger: Ledger) -> None:
        self.draw = draw
        self.features = features
        self.ledger = ledger
        self.group = features.group
        self.width = draw.choice([8, 512, 2048, 6144])
        self.puts = draw.randint(2, 8)
        self.closing = False
        self.saved: list[Path] = []
        self.drained: set[int] = set()
        self.moved = self.wide = 0
        self.hand_overs = hand_over_actors.HandOvers(lambda: hand_over_actors.rows_taken_back(self.cluster))
        self._cluster: FaultyCluster | None = None
        self._running: dict[str, tuple[Script, Task[None]]] = {}
        self._born = 0

    @property
    def cluster(self) -> FaultyCluster:
        """Return the cluster; `begin` must have been called."""
        assert self._cluster is not None
        return self._cluster

    # ------------------------------------------------------------ clients

    def begin(self, cluster: FaultyCluster) -> None:
        """Start every role, each with its own client."""
        self._cluster = cluster
        features = self.features
        maker = cluster.client("maker")
        maker.create_partition(MAIN, group_size=self.group if features.scenario == "groups" else None)
        if features.has_queue:
            queue_actors.create(maker)
        maker.close()
        for _ in range(2):
            self.role("producer", self._produce)
        if features.scenario == "ranks":
            self.ledger.acks["train"] = features.acks
            for rank in range(RANKS):
                self.begin_rank(rank)
        else:
            for task in TASKS:
                for _ in range(2):
                    self.role(task, self._consumer(task))
        for _ in range(2):
            self.role("side", self._aside(SIDE))
            self.role("reader", self._browse)
        self.role("cleaner", self._clean)
        if self.features.dedup:
            self.role("equal0", self._put_equal)
            self.role("equal1", self._put_equal)
        if features.wide:
            self.role("wide", wide_actors.putter(self))
        if features.has_queue:
            queue_actors.begin(self)
        hand_over_actors.begin(self)
        if features.loses:
            self.role("mender", maintenance_actors.mender(self))
        if features.checkpoints:
            self.role("archivist", maintenance_actors.archivist(self))
            self.role("mover", maintenance_actors.mover(self))
        if features.drains:
            self.role("operator", maintenance_actors.operator(self))

    def begin_rank(self, rank: int) -> None:
        """Start the replicas of a rank."""
        for _ in range(REPLICAS):
            self.role(f"rank{rank}", rank_actors.replica(self, rank))

    def role(self, name: str, script: Script) -> None:
        """Start a client that runs a script and then leaves."""
        self._born += 1
        client = self.cluster.client(f"{name}-{self._born}")
        self._running[client.name] = script, client.start(self._life(client, script))

    def _life(self, client: RetryingClient, script: Script) -> Generator[Call, AnyReply, None]:
        yield from sleep(self.draw.uniform(0, 1))
        yield from script(client)
        try:
            yield from client.leave()
        except TransferQueueError:
            self.hand_overs.doubt(client)

    def kill(self, client: RetryingClient) -> None:
        """Kill a client; another one takes its place."""
        found = self._end(client)
        if found is not None and not found[1].done:
            self.role(client.name.split("-")[0], found[0])

    def _end(self, client: RetryingClient) -> tuple[Script, Task[None]] | None:
        found = self._running.pop(client.name, None)
        if found is not None:
            self.hand_overs.doubt(client)
            client.die()
        return found

    def end_rank(self, rank: int) -> None:
        """End a rank permanently, and start a client that declares it gone. Another job then has it."""
        if self.features.scenario != "ranks" or not self.features.leased or self.closing:
            return
        found = [c for c in self.cluster.clients if c.name.split("-")[0] == f"rank{rank}" and c.name in self._running]
        if found:
            for client in found:
                self._end(client)
            self._born += 1
            client = self.cluster.client(f"declarer-{self._born}")
            script = rank_actors.declare(self, rank)
            self._running[client.name] = script, client.start(self._life(client, script))

    def close(self) -> None:
        """Ask the clients to finish."""
        self.closing = True

    def done(self) -> bool:
        """Return whether all clients have ended. Raises the error of a client."""
        for _, task in self._running.values():
            if task.error is not None:
                raise task.error
        return all(task.done for _, task in self._running.values())

    # ------------------------------------------------------------ shared by several roles

    def pause(self, most: float) -> Operation[None]:
        """Wait for a random time, or not at all."""
        yield from sleep(self.draw.choice([0.0, self.draw.uniform(0, most)]))

    def data(self, numbers: list[int], names: tuple[str, ...], version: int) -> TensorDict:
        """Return the values of these fields of these samples."""
        return TensorDict({n: content(numbers, n, version, self.width) for n in names}, batch_size=[len(numbers)])

    def look(self, client: RetryingClient, meta: BatchMeta, epoch: int) -> Operation[list[int] | None]:
        """Read a batch; return the numbers of its samples, None if that failed. epoch: The epoch of the metadata."""
        indexes = meta.global_indexes
        since = self.ledger.before(self.ledger.by_index[i] for i in indexes if i in self.ledger.by_index)
        try:
            data = yield from client.operations.get_data(meta, layout="dense")
        except TransferQueueError:
            return None
        if indexes and epoch < since.epoch:
            raise LedgerError(f"metadata of {indexes} is older than the state that was loaded, and was not refused")
        return self.ledger.seen(indexes, data, since)

    def acknowledge(self, client: RetryingClient, meta: BatchMeta, task: str, numbers: list[int]) -> Operation[None]:
        """Acknowledge these samples; sometimes their lease has ended by then."""
        epoch = self.ledger.maybe_acked(task, numbers)
        if (yield from client.operations.ack(meta)):
            self.ledger.acked(task, numbers, epoch)

    # ------------------------------------------------------------ roles

    def _produce(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Put new samples, in groups if the run has groups, and later their second field."""
        while self.puts > 0:
            self.puts -= 1
            groups, size = self.draw.randint(1, 3), self.group
            numbers: list[int] = []
            for _ in range(groups):
                numbers += self.ledger.new(MAIN, size, f"g{len(self.ledger.samples)}")
            names = ("x",) if self.draw.random() < 0.5 else ("x", "y")
            named = [str(self.ledger.samples[number].group) for number in numbers]
            grouped = self.features.scenario == "groups"
            meta = yield from self._put(client, numbers, names, named if grouped else None)
            epoch = self.ledger.epoch
            yield from self.pause(1.0)
            if meta is not None:
                yield from self._update(client, meta, numbers, 2, epoch)
            if self.draw.random() < 0.3:
                with contextlib.suppress(TransferQueueError):
                    yield from client.return_extents()

    def _put(
        self, client: RetryingClient, numbers: list[int], names: tuple[str, ...], groups: list[str] | None
    ) -> Operation[BatchMeta | None]:
        epoch = self.ledger.trying(numbers, names, 1, client.name)
        tags = [{"number": number} for number in numbers] if self.features.loses else None
        try:
            meta = yield from client.operations.put(
                self.data(numbers, names, 1),
                partition_id=MAIN,
                group_ids=groups,
                tags=tags,
                timeout=self.draw.choice([None, 5]),
            )
        except UNCERTAIN:
            return None
        except TransferQueueError:
            self.ledger.refused(numbers)
            return None
        self.ledger.put(numbers, meta.global_indexes, names, 1, client.name, epoch)
        return meta

    def _update(
        self, client: RetryingClient, meta: BatchMeta, numbers: list[int], version: int, known: int
    ) -> Operation[None]:
        """Put the second field of these samples until that has succeeded. known: The epoch of the metadata."""
        while not self.closing or version == 2:
            epoch = self.ledger.trying(numbers, ("y",), version, client.name)
            try:
                yield from client.operations.put(self.data(numbers, ("y",), version), meta, timeout=5)
            except StorageKeyNotFoundError as error:
                if isinstance(error, StaleMetadataError) and not self.ledger.epoch:
                    raise LedgerError(f"metadata was refused as stale, and nothing was loaded: {error}") from error
                return
            except TransferQueueError:
                version = 1 + max(self.ledger.samples[number].tried["y"] for number in numbers)
                yield from self.pause(1.0)
                continue
            if known < epoch:
                raise LedgerError("a put to metadata of before a load was not refused")
            self.ledger.put(numbers, meta.global_indexes, ("y",), version, client.name, epoch)
            return

    def _consumer(self, task: str) -> Script:
        fields = fields_of(task)

        def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
            while not self.closing:
                count = self.draw.randint(1, 2) * self.group
                lease = self.draw.uniform(0.2, 2.0)
                fetch = self._fetched if self.draw.random() < 0.5 else self._fetched_and_read
                with contextlib.suppress(TransferQueueError):
                    meta = yield from fetch(client, fields, count, task, lease)
                    yield from self._take(client, meta, task, self.ledger.epoch)

        return script

    def _fetched(
        self, client: RetryingClient, fields: list[str], count: int, task: str, lease: float
    ) -> Operation[BatchMeta]:
        return (yield from client.operations.get_meta(fields, count, MAIN, task_name=task, lease=lease, timeout=1.0))

    def _fetched_and_read(
        self, client: RetryingClient, fields: list[str], count: int, task: str, lease: float
    ) -> Operation[BatchMeta]:
        """Fetch a batch with its values, which may have any version that the samples had."""
        since = self.ledger.before([])
        values, meta, _ = yield from client.operations.await_data(
            fields, count, MAIN, task, lease=lease, layout="dense", timeout=1.0
        )
        if values is not None:
            self.ledger.seen(meta.global_indexes, values, since)
        return meta

    def _take(self, client: RetryingClient, meta: BatchMeta, task: str, epoch: int) -> Operation[None]:
        """Read a batch, and acknowledge or return it."""
        numbers = yield from self.look(client, meta, epoch)
        if numbers is None:
            return
        if self.features.scenario == "groups":
            self.ledger.whole(numbers)
        yield from self.pause(1.0)
        if self.draw.random() < 0.1:
            yield from client.operations.nack(meta)
        else:
            yield from self.acknowledge(client, meta, task, numbers)

    def _aside(self, partition: str) -> Script:
        """Return a script that overwrites, reads and clears keys of a partition repeatedly."""
        return lambda client: self._use_keys(client, partition)

    def _use_keys(self, client: RetryingClient, partition: str) -> Generator[Call, AnyReply, None]:
        """Use keys in several tasks, whose puts and gets may travel together."""
        others = [client.start(self._overwrite_repeatedly(client, partition)) for _ in range(ASIDE_TASKS - 1)]
        yield from self._overwrite_repeatedly(client, partition)
        while not all(other.done for other in others):
            yield from sleep(0.1)
        for other in others:
            other.result()

    def _overwrite_repeatedly(self, client: RetryingClient, partition: str) -> Generator[Call, AnyReply, None]:
        version = 0
        keys: dict[str, int] = {}
        epoch = self.ledger.epoch
        while not self.closing:
            if epoch != self.ledger.epoch:
                epoch = self.ledger.epoch
                keys.clear()
            key = f"k{self.draw.randint(0, 3)}"
            version += 1
            try:
                yield from self._overwrite(client, partition, keys, key, version)
                if self.draw.random() < 0.3:
                    yield from client.return_extents()
            except (StorageKeyNotFoundError, UnknownPartitionError, InvalidArgumentError) as error:
                if epoch == self.ledger.epoch and "lost with storage unit" not in str(error):
                    raise LedgerError(f"a key that was put does not exist: {error}") from error
                keys.pop(key, None)
            except TransferQueueError:
                keys.pop(key, None)
            yield from self.pause(0.5)

    def _overwrite(
        self, client: RetryingClient, partition: str, keys: dict[str, int], key: str, version: int
    ) -> Operation[None]:
        """Put, replace, read or clear a key. keys: The samples of the existing keys."""
        ledger, operations = self.ledger, client.operations
        new = key not in keys
        number = ledger.new(partition, 1, keyed=True)[0] if new else keys[key]
        name = f"{client.name}-{number}"
        if new or self.draw.random() < 0.4:
            epoch = ledger.trying([number], ("x",), version, client.name)
            if new:
                ledger.clearing([number])
            values = self.data([number], ("x",), version)
            if self.draw.random() < 0.8:
                yield from operations.kv_put(name, partition, {"x": values["x"][0]})
            else:
                yield from operations.kv_batch_put([name], partition, values)
            ledger.wrote([number], ("x",), version, client.name, epoch)
            keys[key] = number
        elif self.draw.random() < 0.6:
            since = ledger.before([number], ["x"])
            data = yield from operations.kv_batch_get([name], partition, layout="dense")
            got = ledger.seen(None, data, since)
            if got != [number]:
                raise LedgerError(f"foreign bytes: the key of sample {number} reads as sample {got}")
        else:
            epoch = ledger.clearing([number])
            yield from operations.kv_clear([name], partition)
            ledger.cleared([keys.pop(key)], epoch)

    def _put_equal(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Put, read and clear values of which many are equal, under a few keys that several clients use."""
        operations = client.operations
        while not self.closing:
            keys = self.draw.sample([f"e{number}" for number in range(8)], 3)
            values = [self.draw.randint(0, 2) for _ in keys]
            with contextlib.suppress(TransferQueueError):
                if self.draw.random() < 0.5:
                    yield from operations.kv_batch_put(keys, EQUAL, self.data(values, ("x",), 1), timeout=5)
                elif self.draw.random() < 0.7:
                    shared = self.draw.random() < 0.5
                    data = yield from operations.kv_batch_get(keys, EQUAL, layout="dense", shared=shared)
                    column = data["x"]
                    read("x", column if isinstance(column, torch.Tensor) else torch.stack(column.tolist()))
                else:
                    yield from operations.kv_clear(keys, EQUAL)
            yield from self.pause(0.5)

    def _browse(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Read random samples."""
        while not self.closing:
            with contextlib.suppress(TransferQueueError):
                place = self.draw.choice([MAIN, SIDE, SIDE])
                meta = yield from client.operations.get_meta(["x"], None, place, mode="force_fetch")
                some = self.draw.sample(range(len(meta)), min(len(meta), 3))
                yield from self.look(client, meta.select_samples(some), self.ledger.epoch)
            yield from self.pause(1.0)

    def _clean(self, client: RetryingClient) -> Generator[Call, AnyReply, None]:
        """Clear samples that every task has finished, and some that no task has finished."""
        tasks = ("train",) if self.features.scenario == "ranks" else TASKS
        while not self.closing:
            yield from self.pause(2.0)
            done = [
                number
                for number, sample in self.ledger.samples.items()
                if sample.partition == MAIN and sample.index is not None and not sample.cleared
                and all(sample.acked.get(task, 0) >= self.ledger.acks.get(task, 1) for task in tasks)
            ]  # fmt: skip
            if self.draw.random() < 0.2:
                done += [n for n, s in self.ledger.samples.items() if s.partition == MAIN and s.index is not None][:1]
            if not done:
                continue
            epoch = self.ledger.clearing(done)
            indexes = sorted({int(self.ledger.samples[number].index or 0) for number in done})
            try:
                yield from client.operations.clear_samples(BatchMeta(indexes, [MAIN] * len(indexes)))
            except TransferQueueError:
                continue
            self.ledger.cleared(done, epoch)
