"""The next batch of a dataset with `device=`, which a thread fetches while the process that iterates uses this one.

It is fetched only if it is ready at once. A fetch ahead that fails, or gets no batch, counts as not made: the batch is
fetched again when it is needed, so that errors and the end of the stream come when they come without this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import torch
from tensordict import TensorDictBase

from transfer_queue.client.data.device_copies import DeviceDriver
from transfer_queue.dataloader.batch_fetcher import Batch, Consumer, Fetcher, number_in_rank
from transfer_queue.dataloader.client_operations import ask, operations_of, run
from transfer_queue.dataloader.lease_delivery import BACK_SECONDS, take_unseen
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Operation, Pause
from transfer_queue.wire.blocks.gather import tensor_rows

Place = tuple[str, int, int]
"""The partition, the number of a batch, and how often the dataset has moved."""


class BatchAhead:
    """One batch that is fetched before it is needed.

    Args:
        dataset: The dataset.
        device: Its device.
        driver: The driver of this device.
        place: The place of the batch.
    """

    def __init__(self, dataset: Consumer, device: torch.device, driver: DeviceDriver, place: Place) -> None:
        self._driver = driver
        self._device = device
        self._place = place
        self._pid = os.getpid()
        self._fetched: list[tuple[Batch, Any]] = []
        """The batch with the event at the end of its copies, until it is taken or goes back: one of them removes it."""
        self._unwanted = False
        self._fetcher = Fetcher(dataset, combined=False, hold=True)
        self._end: Future[None] = self._fetcher.client._run_aside(self._fetch(driver.aside(device)))

    @classmethod
    def begin(cls, dataset: Consumer, device: torch.device, place: Place) -> BatchAhead | None:
        """Begin to fetch a batch; None if this cannot be done beside other work of this client and device."""
        operations = operations_of(dataset.client())
        copies = None if operations is None else operations.attachment.devices.copies_to(device)
        return None if copies is None else cls(dataset, device, copies.driver, place)

    @property
    def is_under_way(self) -> bool:
        """Whether the fetch has not ended. A forked child does not have the thread of its parent."""
        return not self._end.done() and self._pid == os.getpid()

    @property
    def has_batch(self) -> bool:
        """Whether there is a batch to take."""
        return bool(self._fetched) and self._pid == os.getpid()

    def arrive(self, seconds: float | None) -> Operation[bool]:
        """Wait for the end of the fetch, for at most this time. Return whether it has ended."""
        if self.is_under_way:
            yield Pause(seconds, until=self._end)
        return not self.is_under_way

    def take(self, place: Place) -> Batch | None:
        """Return the batch, for use on the current stream; None if there is none for this place."""
        if place != self._place or not self.has_batch:
            self.discard()
            return None
        batch, event = self._fetched.pop()
        self._driver.adopt(event, (part for part in _tensors_of(batch[0]) if part.device.type == self._device.type))
        return batch

    def discard(self) -> None:
        """Give the batch back. Further calls do nothing. If the fetch takes long, its thread gives the batch back."""
        self._unwanted = True  # set first, see `_fetch`
        if self.is_under_way:
            wait((self._end,), BACK_SECONDS)
        if self.has_batch:
            with contextlib.suppress(TransferQueueError, IndexError):  # the client is closed; the thread gives it back
                run(self._fetcher.client, self._give_back(self._fetched.pop()[0][1]))

    def _fetch(self, aside: Any) -> Operation[None]:
        """Claim and read the batch, on a stream of its own. Raises no `Exception`."""
        partition, number, _ = self._place
        meta = BatchMeta()
        try:
            claimed = yield from self._fetcher.claim(partition, number_in_rank(number), ahead=1, within=0)
            if claimed is None or not len(claimed[1]):
                return
            meta = claimed[1]
            with aside:
                batch = yield from self._fetcher.complete(*claimed)
                event = self._driver.mark(self._device)
            self._fetched.append((batch, event))
        except Exception:
            yield from self._give_back(meta)
        if self._unwanted and self._fetched:
            yield from self._give_back(self._fetched.pop()[0][1])

    def _give_back(self, meta: BatchMeta) -> Operation[None]:
        """Return a claimed batch, so that its samples are ready again."""
        unseen = [(lease.partition, lease.token) for lease in take_unseen(meta)]
        client = self._fetcher.client
        with contextlib.suppress(TransferQueueError):  # the lease ends by itself
            if unseen:
                yield from client._operations._report_batches(ReportBatches(returned=unseen))
            if meta._leases:
                yield from ask(client, "nack", meta, delivered=False, timeout=BACK_SECONDS)


def _tensors_of(column: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of a column, or of all columns of a table."""
    if isinstance(column, TensorDictBase) and (rows := tensor_rows(column)) is not None:
        yield from rows
    elif isinstance(column, TensorDictBase):
        for name in column.keys():  # noqa: SIM118
            yield from _tensors_of(column.get(name))
    elif isinstance(column, torch.Tensor) and column.is_nested and column.layout == torch.jagged:
        lengths: torch.Tensor | None = column.lengths()  # type: ignore[attr-defined]
        yield from (column.values(), column.offsets())  # type: ignore[attr-defined]
        if lengths is not None:
            yield lengths
    elif isinstance(column, torch.Tensor):
        yield column.values() if column.is_nested else column
