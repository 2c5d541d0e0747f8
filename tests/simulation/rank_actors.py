"""The ranks with replicas of a run with faults, with or without leases, and the client that declares a rank gone."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from tests.simulation.retrying_client import RetryingClient, Script, sleep
from tests.simulation.run_features import MAIN
from transfer_queue.errors import BatchGoneError, TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Call, Operation

if TYPE_CHECKING:
    from tests.simulation.workload import Workload

TASK = "train"


def fetch(work: Workload, client: RetryingClient, rank: int, number: int, wait: float) -> Operation[BatchMeta]:
    """Fetch a batch of a rank, and enter it into the ledger."""
    epoch, leased = work.ledger.epoch, work.features.leased
    meta = yield from client.operations.get_meta(
        ["x"], work.group, MAIN, task_name=TASK, sampling_config={"dp_rank": rank, "batch_index": number},
        lease=work.draw.uniform(0.2, 2.0) if leased else None, replicas=work.features.acks if leased else None,
        timeout=wait,
    )  # fmt: skip
    work.ledger.dealt((MAIN, TASK, rank, number), meta.global_indexes, epoch)
    return meta


def replica(work: Workload, rank: int) -> Script:
    """Return the script of a replica of a rank: batch by batch, again from the first one if a checkpoint was loaded."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        number, epoch = 0, work.ledger.epoch
        while not work.closing:
            if epoch != work.ledger.epoch:
                number, epoch = 0, work.ledger.epoch
            try:
                meta = yield from fetch(work, client, rank, number, 1.0)
                numbers = yield from work.look(client, meta, work.ledger.epoch)
                yield from work.pause(1.0)
                if work.features.leased and numbers is not None:
                    if work.draw.random() < 0.1:
                        yield from client.operations.nack(meta)
                        continue
                    yield from work.acknowledge(client, meta, TASK, numbers)
            except BatchGoneError:
                pass
            except TransferQueueError:
                yield from sleep(work.draw.uniform(0.01, 1.0))
                continue
            number += 1

    return script


def declare(work: Workload, rank: int) -> Script:
    """Return a script that declares a rank gone until it gets a reply, and then starts other replicas."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        work.ledger.rank_gone(MAIN, TASK, rank)
        while True:
            try:
                yield from client.operations.declare_rank_gone(MAIN, TASK, rank)
            except TransferQueueError:
                yield from sleep(work.draw.uniform(0.01, 1.0))
            else:
                break
        work.ledger.rank_gone(MAIN, TASK, rank)
        if not work.closing:
            work.begin_rank(rank)

    return script
