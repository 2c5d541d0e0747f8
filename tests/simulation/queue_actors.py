"""The clients of a queue in a run with faults: a partition with `max_rows` and a counter of done rows."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from tests.simulation.ledger import LedgerError
from tests.simulation.retrying_client import PutCancelled, RetryingClient, sleep
from transfer_queue.client.attachment import UNCERTAIN
from transfer_queue.core.events.records import LeaseEnded
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import Call

if TYPE_CHECKING:
    from tests.simulation.final_check import Settling
    from tests.simulation.workload import Workload

QUEUE = "queue"
TASK = "get"
LIMIT = 3
CANCELS = (None, None, None, None, None, 0.0, 0.001, 0.003, 0.01, 0.5)
"""Seconds after which the request of a put is cancelled; None: it is not."""
NEVER = 0  # deliveries after which an item is skipped


def create(client: RetryingClient) -> None:
    """Create the partition."""
    client.create_partition(QUEUE, max_rows=LIMIT, order="fifo", free_when=[TASK], max_deliveries=NEVER)


def begin(work: Workload) -> None:
    """Start the clients of the queue."""
    for _ in range(2):
        work.role("feeder", lambda client: _feed(work, client))
    work.role("taker", lambda client: _take(work, client))
    work.role("joiner", lambda client: _join(work, client))


def check_limit(work: Workload) -> None:
    """Raise LedgerError if the queue has more rows than it may have: those that were returned may come on top."""
    partition = work.cluster.controller.state.partitions.get(QUEUE)
    if partition is None or partition.open_rows <= LIMIT:
        return
    records = work.cluster.records
    ends = [record for record in records if isinstance(record, LeaseEnded) and record.partition == QUEUE]
    limit = LIMIT + sum(len(end.returned) // 8 for end in ends)
    if partition.open_rows > limit and not work.ledger.epoch:  # a load returns what was not handed over
        raise LedgerError(f"the queue has {partition.open_rows} rows, and max_rows and what was returned are {limit}")


def _feed(work: Workload, client: RetryingClient) -> Generator[Call, AnyReply, None]:
    """Put items, and wait for space for some seconds."""
    while not work.closing:
        numbers = work.ledger.new(QUEUE, work.draw.randint(1, 2))
        epoch = work.ledger.trying(numbers, ("x",), 1, client.name)
        if work.features.loses:  # nobody puts lost items again
            work.ledger.clearing(numbers)
        client.cancels = work.draw.choice(CANCELS)
        withdrawing = None if client.cancels is None else work.ledger.clearing(numbers)
        try:
            meta = yield from client.operations.put(
                work.data(numbers, ("x",), 1), partition_id=QUEUE, timeout=work.draw.choice([None, 3])
            )
        except UNCERTAIN:
            pass
        except PutCancelled:
            assert withdrawing is not None
            work.ledger.cleared(numbers, withdrawing)
        except TransferQueueError:
            work.ledger.refused(numbers)
        else:
            work.ledger.put(numbers, meta.global_indexes, ("x",), 1, client.name, epoch)
        client.cancels = None
        check_limit(work)
        yield from work.pause(1.0)


def _take(work: Workload, client: RetryingClient) -> Generator[Call, AnyReply, None]:
    """Take items under leases, and acknowledge or return them."""
    while not work.closing:
        with contextlib.suppress(TransferQueueError):
            yield from take_one(work, client, work.draw.uniform(0.2, 2.0), 1.0)
        check_limit(work)


def take_one(work: Workload, client: RetryingClient, lease: float, wait: float) -> Generator[Call, AnyReply, bool]:
    """Take one item and report it as done; return whether there was one."""
    ledger, operations = work.ledger, client.operations
    epoch, since = ledger.epoch, ledger.before([])
    values, meta, _ = yield from operations.await_data(["x"], 1, QUEUE, TASK, lease=lease, layout="dense", timeout=wait)
    if values is None:
        return False
    numbers = ledger.seen(meta.global_indexes, values, since)
    yield from work.pause(0.5)
    if not work.closing and work.draw.random() < 0.2:
        yield from operations.nack(meta)
        return True
    ledger.clearing(numbers)
    if (yield from operations.ack(meta)):
        ledger.cleared(numbers, epoch)
        epoch = ledger.reporting()
        yield from operations.report_done(QUEUE)
        ledger.reported(epoch)
    return True


def _join(work: Workload, client: RetryingClient) -> Generator[Call, AnyReply, None]:
    """Wait until all items are done, again and again."""
    while not work.closing:
        with contextlib.suppress(TransferQueueError):
            yield from client.operations.await_done(QUEUE, timeout=work.draw.uniform(0.1, 2.0))
        yield from sleep(0.01)


def _is_taken(settling: Settling, work: Workload, client: RetryingClient) -> bool:
    """Take an item, if one is left."""
    task = client.start(take_one(work, client, 60.0, 0.0))
    settling.cluster.wait(lambda: task.done)
    return bool(task.result())


def drain(settling: Settling, work: Workload) -> None:
    """Take all items that are left, after the faults, and check the number of items that are done."""
    cluster, ledger = settling.cluster, settling.ledger
    check_limit(work)
    client = cluster.client("queue-drainer")
    while _is_taken(settling, work, client):
        pass
    partition = cluster.controller.state.partitions[QUEUE]
    fewest, most = ledger.done
    if not fewest <= partition.done <= most:
        raise LedgerError(f"{partition.done} items are done, but {fewest} to {most} reports were sent")
    everything = client.await_done(QUEUE, timeout=0)
    if everything != (partition.undone == 0):
        raise LedgerError(f"a join says {everything}, and {partition.undone} items are not done")
    if not partition.losses.counts and partition.open_rows:
        raise LedgerError(f"{partition.open_rows} items of the queue are not dealt")
    client.close()
