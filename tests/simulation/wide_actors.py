"""A client that puts samples with very many fields.

The ledger does not have its samples: the client checks them by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from tests.simulation.ledger import LedgerError
from tests.simulation.retrying_client import RetryingClient, Script
from tests.simulation.run_features import MOVED
from transfer_queue.errors import (
    InvalidArgumentError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownPartitionError,
)
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import Call, Operation

if TYPE_CHECKING:
    from tests.simulation.workload import Workload

PUTS, WIDE = 4, 128


def putter(work: Workload) -> Script:
    """Return a script that puts samples with `WIDE` fields, and checks that what was acknowledged exists."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        partition = f"{MOVED}-wide-{client.name}"
        for number in range(PUTS):
            if work.closing:
                return
            with contextlib.suppress(TransferQueueError):
                yield from _put(work, client, partition, number)
            yield from work.pause(0.5)

    return script


def _put(work: Workload, client: RetryingClient, partition: str, number: int) -> Operation[None]:
    operations, epoch, key = client.operations, work.ledger.epoch, f"w{number}"
    values = {f"f{field}": torch.tensor(number * WIDE + field) for field in range(WIDE)}
    yield from operations.kv_put(key, partition, values, timeout=20)
    work.wide += 1
    yield from work.pause(1.0)
    asked = ["f0", f"f{WIDE - 1}"]
    try:
        read = yield from operations.kv_batch_get(key, partition, asked)
    except (StorageKeyNotFoundError, UnknownPartitionError, InvalidArgumentError) as error:
        if work.ledger.epoch != epoch or "lost with storage unit" in str(error):
            return
        raise LedgerError(f"{key} of {partition} was put, and does not exist: {error}") from error
    found = [int(read[name].reshape(-1)[0]) for name in asked]
    if work.ledger.epoch == epoch and found != [number * WIDE, number * WIDE + WIDE - 1]:
        raise LedgerError(f"{key} of {partition} reads as {found}")
