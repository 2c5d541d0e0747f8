"""The next batch of a dataset with `device=`, which a thread fetches while the process that iterates uses this one.

It is fetched only if it is ready at once. A fetch ahead that fails, or gets no batch, counts as not made: the batch is
fetched again when it is needed, so errors and the end of the stream come then.

The process that iterates takes the batch, or does not want it any more. A batch that is not taken goes back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import torch
from tensordict import TensorDictBase

from transfer_queue.client.data.device_copies import DeviceDriver
from transfer_queue.dataloader.batch_fetcher import Batch, Consumer
from transfer_queue.dataloader.client_operations import operations_of
from transfer_queue.dataloader.lease_delivery import BACK_SECONDS, give_back, return_batches, take_unseen
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Operation, Pause
from transfer_queue.wire.blocks.gather import tensor_rows

Place = tuple[str, int, int]
"""The partition, the number of a batch in its rank, and how often the dataset has moved."""
Fetched = tuple[Batch, Any]
"""A batch, and the event at the end of its copies."""


class BatchAhead:
    """One batch that is fetched before it is needed.

    Args:
        dataset: The dataset.
        device: Its device.
        driver: The driver of this device.
        place: The place of the batch.
    """

    def __init__(self, dataset: Consumer, device: torch.device, driver: DeviceDriver, place: Place) -> None:
        self._device = device
        self._driver = driver
        self._place = place
        self._pid = os.getpid()
        self._wanted = True
        """Whether the batch may still be taken. Set by the process that iterates, see `_fetch`."""
        self._fetcher = dataset.fetcher()
        self._end: Future[Fetched | None] = self._fetcher.client._run_aside(self._fetch(driver.aside(device)))

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
    def _fetched(self) -> Fetched | None:
        """The batch of a fetch that has ended, as long as it may be taken. A forked child has none."""
        return self._end.result() if self._wanted and self._pid == os.getpid() else None

    @property
    def is_needed(self) -> bool:
        """Whether the fetch is under way, or there is a batch to take."""
        return self.is_under_way or self._fetched is not None

    def arrive(self, seconds: float | None) -> Operation[bool]:
        """Wait for the end of the fetch, for at most this time. Return whether it has ended."""
        if self.is_under_way:
            yield Pause(seconds, until=self._end)
        return not self.is_under_way

    def take(self, place: Place) -> Batch | None:
        """Return the batch, for use on the current stream; None if there is none for this place. Call it once."""
        if place != self._place or (fetched := self._fetched) is None:
            self.discard()
            return None
        batch, event = fetched
        self._driver.adopt(event, (part for part in _tensors_of(batch[0]) if part.device.type == self._device.type))
        return batch

    def discard(self) -> None:
        """Give the batch back. Further calls do nothing. If the fetch takes long, its thread gives the batch back."""
        if self._pid != os.getpid() or not self._wanted:
            return
        self._wanted = False  # set first, see `_fetch`
        if wait((self._end,), BACK_SECONDS).done and (fetched := self._end.result()) is not None:
            self._give_back(fetched[0][1])

    def _fetch(self, aside: Any) -> Operation[Fetched | None]:
        """Claim and read the batch, on a stream of its own. Raises no `Exception`."""
        partition, number, _ = self._place
        meta = BatchMeta()
        try:
            claimed = yield from self._fetcher.claim(partition, number, ahead=1, within=0)
            if claimed is not None and len(claimed[1]):
                meta = claimed[1]
                with aside:
                    fetched = (yield from self._fetcher.complete(*claimed)), self._driver.mark(self._device)
                if self._wanted:
                    return fetched
        except Exception:
            pass  # the batch is fetched again when it is needed, and that fetch raises
        self._give_back(meta)
        return None

    def _give_back(self, meta: BatchMeta) -> None:
        """Return a claimed batch, so that its samples are ready again."""
        give_back(self._fetcher.client, take_unseen(meta))
        return_batches(self._fetcher.client, [meta])


def _tensors_of(column: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of a column, or of all columns of a table."""
    if isinstance(column, TensorDictBase):
        rows = tensor_rows(column)
        for part in [column.get(name) for name in column.keys()] if rows is None else rows:  # noqa: SIM118
            yield from _tensors_of(part)
    elif isinstance(column, torch.Tensor) and column.layout == torch.jagged:
        yield from (column.values(), column.offsets())  # type: ignore[attr-defined]
    elif isinstance(column, torch.Tensor):
        yield column.values() if column.is_nested else column
