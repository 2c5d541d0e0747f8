"""The consumers without leases of a run with faults: they hand batches over late, return them, cancel, and are killed.

Their ledger checks what a claim without a key promises: each sample was handed over or can still be claimed, and
without a kill or a loaded checkpoint nothing is handed over twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.simulation.ledger import LedgerError
from tests.simulation.queue_actors import QUEUE
from tests.simulation.queue_actors import TASK as GET
from tests.simulation.retrying_client import Cancelled, RetryingClient, sleep
from tests.simulation.run_features import MAIN
from transfer_queue.core.events.records import LeaseEnded
from transfer_queue.core.tables.rows import CONSUMED
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Call, Operation

if TYPE_CHECKING:
    from tests.simulation.faulty_cluster import FaultyCluster
    from tests.simulation.workload import Workload

SEEN = "seen"  # the task
TAKERS = 2

Row = tuple[str, int]
"""The task and the global index of a row that was handed over."""


class _Yield(NamedTuple):
    epoch: int
    rows: list[Row]


class HandOvers:
    """What was handed over.

    gone: Returns the rows that were taken back from clients that were away for too long.
    sure: How often each row was handed over so that no other consumer may get it.
    maybe: The rows that may have been consumed.
    counts: How often batches were handed over, returned and cancelled.
    """

    def __init__(self, gone: Callable[[], set[Row]]) -> None:
        self._gone = gone
        self.sure: Counter[Row] = Counter()
        self.maybe: set[Row] = set()
        self.counts: Counter[str] = Counter()
        self._epoch = 0
        self._yields: dict[RetryingClient, list[_Yield]] = {}
        self._cuts: dict[float, tuple[Counter[Row], set[Row]]] = {}

    def handed_over(self, client: RetryingClient, task: str, indexes: Sequence[int], epoch: int) -> None:
        """Record that a client hands a batch over, and that the notice of it is the newest one of the client.

        epoch: The epoch in which the batch was claimed.
        """
        rows = [(task, index) for index in indexes]
        self.maybe.update(rows)
        self._yields.setdefault(client, []).append(_Yield(epoch, rows))
        if epoch != self._epoch:
            return  # the claim was forgotten, or is one of the loaded state
        self.counts["handed_over"] += 1
        self.sure.update(rows)
        again = [row for row in rows if self.sure[row] > 1]
        if again and set(again) - self._gone():
            raise LedgerError(f"{again} were handed over twice")

    def doubt(self, client: RetryingClient) -> None:
        """Record that a client is killed: the notices that the controller has not confirmed may be lost."""
        for row in self._unread_of(client):
            self.sure[row] -= 1

    def cut(self, time: float) -> None:
        """Record that a checkpoint's state was taken. Of the unread notices, it may have any."""
        sure = self.sure.copy()
        for client in self._yields:
            sure.subtract(self._unread_of(client))
        self._cuts[time] = sure, set(self.maybe)

    def loaded(self, time: float) -> None:
        """Record that the state of this time was loaded."""
        sure, maybe = self._cuts[time]
        self._epoch += 1
        self.sure, self.maybe = sure.copy(), set(maybe)

    def _unread_of(self, client: RetryingClient) -> list[Row]:
        unread = client.state.session.notices.unread
        newest = self._yields.get(client, [])[-unread:] if unread else []
        return [row for each in newest if each.epoch == self._epoch for row in each.rows]

    def settle(self, cluster: FaultyCluster) -> None:
        """Compare with the samples that exist. Raises LedgerError if one is lost, or can be claimed again."""
        for name, partition in cluster.controller.state.partitions.items():
            if partition.unseen_batches.by_token:
                raise LedgerError(f"batches of {name} still wait for clients that are gone")
        partition = cluster.controller.state.partitions[MAIN]
        positions = partition.rows.live_positions()
        states = partition.consumption_states(SEEN, positions)
        indexes = partition.rows.indexes_of(positions).tolist()
        done = {(SEEN, index) for index, state in zip(indexes, states.tolist(), strict=True) if state == CONSUMED}
        if done - self.maybe:
            raise LedgerError(f"{sorted(done - self.maybe)} are consumed, and nobody has seen them")
        again = {row for row, times in self.sure.items() if times > 0} & {(SEEN, index) for index in indexes} - done
        if again - self._gone():
            raise LedgerError(f"{sorted(again)} were handed over, and can be claimed again")


def rows_taken_back(cluster: FaultyCluster) -> set[Row]:
    """Return the rows that the controller has taken back from clients that were away for too long."""
    ends = [record for record in cluster.records if isinstance(record, LeaseEnded)]
    return {
        (end.task, index)
        for end in ends
        if end.reason == "gone"
        for index in np.frombuffer(end.returned, "<i8").tolist()
    }


def begin(work: Workload) -> None:
    """Start the consumers."""
    if work.features.scenario != "ranks":  # whose sampler deals only batches under a key
        for _ in range(2):
            work.role("seer", lambda client: _consume(work, client, MAIN, SEEN))
    if work.features.has_queue:
        for _ in range(TAKERS):
            work.role("getter", lambda client: _consume(work, client, QUEUE, GET))


def _consume(work: Workload, client: RetryingClient, partition: str, task: str) -> Generator[Call, AnyReply, None]:
    """Claim batches in every way, and cancel some of the calls."""
    count = work.group if work.features.scenario == "groups" else 1
    while not work.closing:
        how = work.draw.choice([_read, _held, *([_fetched] if partition == MAIN else [])])
        running = client.start(how(work, client, partition, task, count))
        if work.draw.random() < 0.4:
            yield from sleep(work.draw.choice([0.0, work.draw.uniform(0, 0.3), work.draw.uniform(0, 1.2)]))
            work.hand_overs.counts["cancelled"] += client.cancel(running)
        while not running.done:
            yield from sleep(0.02)
        if running.error is not None and not isinstance(running.error, (TransferQueueError, Cancelled)):
            raise running.error
        yield from work.pause(0.5)


def _fetched(work: Workload, client: RetryingClient, partition: str, task: str, count: int) -> Operation[None]:
    """Fetch a batch, and read it later."""
    epoch = work.ledger.epoch
    meta = yield from client.operations.get_meta(["x"], count, partition, task_name=task, timeout=1.0)
    known = work.ledger.by_index
    _note(work, client, task, meta, [known[index] for index in meta.global_indexes if index in known], epoch)
    yield from work.look(client, meta, work.ledger.epoch)


def _read(work: Workload, client: RetryingClient, partition: str, task: str, count: int) -> Operation[None]:
    """Fetch a batch with its values."""
    epoch, since = work.ledger.epoch, work.ledger.before([])
    values, meta, _ = yield from client.operations.await_data(
        ["x"], count, partition, task, layout="dense", timeout=1.0
    )
    if values is not None:
        _note(work, client, task, meta, work.ledger.seen(meta.global_indexes, values, since), epoch)


def _held(work: Workload, client: RetryingClient, partition: str, task: str, count: int) -> Operation[None]:
    """Fetch batches ahead as a loader does, and hand each over later, or return it."""
    operations, epoch = client.operations._claiming(), work.ledger.epoch
    ahead: list[tuple[BatchMeta, list[int]]] = []
    for _ in range(work.draw.randint(1, 2)):
        since = work.ledger.before([])
        values, meta, _ = yield from operations.await_data(
            ["x"], count, partition, task, layout="dense", hold=True, timeout=0.5
        )
        if values is not None:
            ahead.append((meta, work.ledger.seen(meta.global_indexes, values, since)))
        yield from work.pause(1.0)
    for meta, numbers in ahead:
        report = [(lease.partition, lease.token) for lease in meta._leases]
        if work.draw.random() < 0.6:
            yield from operations._report_batches(ReportBatches(handed_over=report))
            _note(work, client, task, meta, numbers, epoch)
        else:
            work.hand_overs.counts["returned"] += 1
            yield from operations._report_batches(ReportBatches(returned=report))
        yield from work.pause(0.5)
    for meta, _ in ahead:
        yield from operations.finish(meta, task)


def _note(work: Workload, client: RetryingClient, task: str, meta: BatchMeta, numbers: list[int], epoch: int) -> None:
    """Record what a call returned. The items of the queue may be removed from now on."""
    if task == GET:
        work.ledger.clearing(numbers)
    work.ledger.maybe_acked(task, numbers)
    work.hand_overs.handed_over(client, task, meta.global_indexes, epoch)
