"""The worker processes of a StreamingDataLoader: their main loop, and the loader's side, which pins batches."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch.utils.data import get_worker_info

from transfer_queue.dataloader.batch_fetcher import Batch, Claimed, Delivery, Fetcher
from transfer_queue.dataloader.client_operations import run, run_here
from transfer_queue.dataloader.lease_delivery import PrefetchedBatch, take_unseen
from transfer_queue.dataloader.streaming_dataset import Finish, StreamingDataset
from transfer_queue.dataloader.worker_channel import (
    GRACE_SECONDS,
    GRACE_SECONDS_OF_FETCHES,
    Channel,
    FetchTurn,
    Interrupted,
    StartFetching,
    WorkerChannelEnd,
)
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.net.calls import Operation, Pause
from transfer_queue.net.drivers.asyncio_driver import call_in_thread
from transfer_queue.wire.blocks.gather import stack_of, tensor_rows


@dataclass(frozen=True)
class Fetched:
    """A whole batch on its way from a worker to the loader.

    It is not a tuple: torch 2.6 pins the parts of a tuple itself, and does not call `pin_memory` of the whole.
    """

    version: int  # of the order
    number: int  # the batch_index
    data: TensorDictBase | None = None  # None if the loader's process does not need it
    meta: BatchMeta | None = None  # None if there will be no batch with this or a later number
    items: list[Any] | None = None  # None if they were not made in the worker

    def pin_memory(self) -> Fetched:
        """Return the batch with its tensors pinned; torch calls this if the loader has pin_memory=True."""
        return replace(self, data=pin(self.data), items=pin(self.items))


NOTHING = Fetched(0, 0)
"""An item that belongs to no order. The loader skips it."""


def begin_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Set up a worker, as torch's worker_init_fn: open its end of the channel, then call the user's worker_init_fn."""
    info = get_worker_info()
    assert info is not None
    dataset = info.dataset
    assert isinstance(dataset, StreamingDataset)
    assert dataset.channel is not None
    seat = dataset.seat = WorkerChannelEnd(dataset.channel, worker, dataset.interval())
    dataset.iterate_in_worker = partial(fetch_in_worker, seat=seat)
    grace = GRACE_SECONDS if dataset.fetch_batch_fn is None else GRACE_SECONDS_OF_FETCHES
    seat.end_with_the_loader(grace, partial(_close_client, dataset))
    if init is not None:
        init(worker)


def _close_client(dataset: StreamingDataset) -> None:
    """Close the client with which a worker fetches, if it was created."""
    close = getattr(dataset._tq_client, "close", None)
    if close is not None:
        close()


def fetch_in_worker(dataset: StreamingDataset, seat: WorkerChannelEnd) -> Iterator[Fetched]:
    """Yield whole batches as the loader orders, until it ends the workers.

    After the last batch the items say that there is none: torch takes items of all workers in turn, also while only
    another worker has batches.
    """
    version = 0
    ahead = PrefetchedBatch(dataset.client())
    try:
        while (order := seat.order(version)) is not None:
            ahead.end(order.given)
            version, dataset.partition_id = order.version, order.partition_id
            try:
                for fetched in _batches(dataset, seat, order, ahead):
                    seat.item += seat.workers
                    yield fetched
            except Interrupted:
                continue
    finally:
        ahead.end(seat.last_delivered())


def _batches(
    dataset: StreamingDataset, seat: WorkerChannelEnd, order: StartFetching, ahead: PrefetchedBatch
) -> Iterator[Fetched]:
    def exchange(request: Operation[AnyReply]) -> AnyReply:
        return seat.wait(order.version, client._run_async(request))

    client, fetcher = dataset.client(), dataset.fetcher()
    while seat.item < order.item:
        yield NOTHING
        seat.check(order.version)
    for number in itertools.count(order.start + seat.item - order.item, seat.workers):
        claimed = None
        if number == order.start or seat.take_turn(order.version, number):
            claimed = run_here(_claim_batch(fetcher, seat, order, number), exchange)
        seat.pass_turn(FetchTurn(order.version, number + 1, claimed is None))
        while claimed is None:
            yield Fetched(order.version, number)
            seat.check(order.version)
        ahead.add(number, claimed[1])
        data, meta = run(client, fetcher.complete(*claimed))
        unseen = take_unseen(meta)
        items = dataset.items_in_worker(data, meta)
        meta._leases = (*unseen, *meta._leases)
        kept = items is None or dataset.keep_batches != 0
        yield Fetched(order.version, number, data if kept else None, meta, items)


def _claim_batch(
    fetcher: Fetcher, seat: WorkerChannelEnd, order: StartFetching, number: int
) -> Operation[Claimed | None]:
    while True:
        ahead = seat.batches_ahead(order.version, number)
        claimed = yield from fetcher.claim(order.partition_id, number, ahead=ahead, again=number < order.received)
        if claimed is None or len(claimed[1]):
            return claimed
        seat.check(order.version)


class ItemReception:
    """Receives the items of torch's loader, in the thread that needs one, or in a thread for an event loop.

    If the waiting task was cancelled, the thread keeps its item for the next caller. It ends with the
    workers.
    """

    def __init__(self) -> None:
        self.items: Iterator[Fetched] | None = None
        """The iterator of torch's loader; None before it is made, and after the end."""
        self._arrival: Future[Any] | None = None  # the item that a thread waits for

    def arrive(self, seconds: float | None) -> Operation[bool]:
        """Wait until an item has arrived, for at most this time. Return whether one has, so that `take` gets it.

        A thread without an event loop can wait in `take` itself, if there is no limit.
        """
        if seconds is None and asyncio._get_running_loop() is None:
            return True
        if self._arrival is None:
            # the thread must not refer to the workers, which end when nothing refers to them
            self._arrival = call_in_thread(partial(next, iter(()) if self.items is None else self.items, None))
        arrival = self._arrival
        yield Pause(seconds, until=arrival)
        return arrival.done()

    def take(self) -> Fetched | None:
        """Wait for the next item and return it; None if the workers have ended."""
        arrival = self._arrival
        if arrival is None:
            return None if self.items is None else next(self.items, None)
        wait((arrival,))
        self._arrival = None
        item: Fetched | None = arrival.result()
        return item

    def close(self) -> Iterator[Fetched] | None:
        """Wait for the thread, after the workers received the request to end. Return torch's iterator."""
        items, self.items = self.items, None
        if self._arrival is not None:
            wait((self._arrival,), 2 * GRACE_SECONDS)
        return items


class Workers:
    """A set of worker processes. They fetch ahead from the position of the dataset, and get an order when it changes.

    Args:
        count: The number of workers.
        collate: The `collate_fn` of the loader; None if it has none.
        make: Returns torch's loader over a copy of the dataset; its processes start then.
    """

    def __init__(self, count: int, collate: Finish | None, make: Callable[[StreamingDataset], Any]) -> None:
        self._pid = os.getpid()
        self._collate = collate
        self._make: Callable[[StreamingDataset], Any] | None = make  # None when the processes were started
        self._channel = Channel(count)
        self._version = 0
        self._heard = True  # whether a batch has arrived since the last order
        self._waiting = False  # whether a thread asks for a batch; set before it reads the position of the dataset
        self._ordering = threading.Lock()  # held while an order changes attributes: another thread may move the dataset
        self._ended = False
        self._place: Any = None  # the position of the dataset at the last order or batch
        self._given = 0  # the dataset has received the batches of the last order below this number
        self._count = count
        self._taken = 0  # items that torch's loader has returned
        self._on_order = 0  # items that torch requests from the workers in advance
        self._early: dict[int, Fetched] = {}  # batches that arrived before they were needed
        self._reception = ItemReception()

    def start(self, dataset: StreamingDataset) -> None:
        """Start the processes at the position of the dataset, unless they were started."""
        if self._make is None:
            return
        self.direct(dataset)
        loader = self._make(dataset.for_workers(self._channel, self._collate))
        self._on_order = self._count * loader.prefetch_factor
        self._reception.items = iter(loader)
        self._make = None  # it refers to the loader, which must be collected as soon as nothing else does

    def direct(self, dataset: StreamingDataset, *, later: bool = False) -> None:
        """Order the workers to the dataset's position, if it has changed.

        Args:
            dataset: The dataset.
            later: True to wait for the next `deliver` if no batch has arrived since the last order and no thread waits
                for one, so that orders cannot fill a pipe that is not read.
        """
        with self._ordering:
            start = dataset._next_fetch
            place = (dataset.moves, dataset.partition_id, start)
            if (place == self._place and not self._ended) or (later and not self._heard and not self._waiting):
                return
            self._version += 1
            self._heard = self._ended = False
            self._early.clear()
            # Items that torch has requested may have been made already. While this thread waits in torch's loader, one
            # more may have been made, so one item of each worker is skipped.
            item = self._taken + self._on_order + self._count if self._version > 1 else 0
            self._channel.send_order(
                StartFetching(self._version, dataset.partition_id, start, self._given, item, dataset._received)
            )
            self._place, self._given = place, start

    def deliver(self, dataset: StreamingDataset, seconds: float | None) -> Operation[Delivery]:
        """Wait for the batch at the dataset's position, for at most this time, and return it."""
        # Set first: a thread that moves the dataset after this orders the new position at once. If a thread moved it
        # before, this call orders the new position.
        self._waiting = True
        try:
            return (yield from self._deliver(dataset, seconds))
        finally:
            self._waiting = False

    def _deliver(self, dataset: StreamingDataset, seconds: float | None) -> Operation[Delivery]:
        self.start(dataset)
        self.direct(dataset)
        version, number = self._version, dataset.batch_index
        self._channel.send_wanted(version, number)
        begun = time.monotonic()
        while version == self._version and number not in self._early:
            left = None if seconds is None else seconds - (time.monotonic() - begun)
            if not (yield from self._reception.arrive(left)):
                return Delivery()
            fetched = self._reception.take()
            if fetched is None:
                return Delivery(ended=True)  # closed
            self._taken += 1
            if fetched.version == self._version:
                self._heard = True
                self._early[fetched.number] = fetched
        with self._ordering:
            if version != self._version:
                return Delivery()  # another thread moved the dataset meanwhile; batches of its order are kept
            fetched = self._early.pop(number)
            if fetched.meta is None:
                self._ended = True
                return Delivery(ended=True)
            self._place, self._given = (*self._place[:2], number + 1), number + 1
        meta = fetched.meta
        batch: Batch | None = None if fetched.data is None else (fetched.data, meta)
        unseen = take_unseen(meta)
        held = meta if meta._holder or meta._leases else None
        return Delivery(batch, fetched.items, held=held, unseen=unseen, meta=meta)

    def close(self) -> None:
        """End the processes, also those that wait for rows. Further calls do nothing."""
        if sys.is_finalizing():
            return  # the interpreter has ended its daemons already, and modules that a call needs may be gone
        if os.getpid() == self._pid:  # a forked child has a copy of this
            self._channel.close(self._given)
            # torch waits for the workers when its iterator is deleted; a traceback may keep the iterator for long
            iterator = self._reception.close()
            getattr(iterator, "_shutdown_workers", lambda: None)()
            for process in getattr(iterator, "_workers", ()):  # torch does not wait for processes that it terminates
                process.join(GRACE_SECONDS)

    def __del__(self) -> None:
        if hasattr(self, "_reception"):
            self.close()


# ---------------------------------------------------------------- page-locked memory
# Torch pins the types that it supports. Jagged and nested columns inside a TensorDict are pinned here, part by part,
# and metadata is not changed.


def pin(item: Any) -> Any:
    """Return the item with its tensors pinned, also inside tuples, lists and mappings. Pinned tensors are not copied.

    TensorDicts, tuples, lists and mappings are new objects.
    """
    if isinstance(item, torch.Tensor):
        return _pinned_tensor(item)
    if isinstance(item, BatchMeta | KVBatchMeta | str | bytes):
        return item
    if is_non_tensor(item):
        return _pinned_stack(item)
    if isinstance(item, TensorDictBase):
        columns = {name: pin(item.get(name)) for name in item.keys()}  # noqa: SIM118
        return TensorDict(columns, batch_size=item.batch_size)
    if isinstance(item, tuple):
        parts = [pin(part) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, list):
        return [pin(part) for part in item]
    if isinstance(item, Mapping):
        return {name: pin(part) for name, part in item.items()}
    return item.pin_memory() if hasattr(item, "pin_memory") else item


def _pinned_stack(column: Any) -> Any:
    """Return a column of one value for each row, with its tensors pinned. Rows that are one tensor remain one."""
    rows = tensor_rows(column)
    if rows is None:
        return column
    pinned = {id(row): row for row in rows}
    pinned = {key: _pinned_tensor(row) for key, row in pinned.items()}
    return stack_of([pinned[id(row)] for row in rows], len(rows))


def _pinned_tensor(tensor: Any) -> torch.Tensor:
    if not tensor.is_nested:
        return tensor.pin_memory()  # type: ignore[no-any-return]
    if tensor.layout == torch.jagged:
        lengths = tensor.lengths()
        return torch.nested.nested_tensor_from_jagged(
            tensor.values().pin_memory(), tensor.offsets().pin_memory(),
            None if lengths is None else lengths.pin_memory(), jagged_dim=tensor._ragged_idx,
            min_seqlen=tensor._maybe_min_seqlen, max_seqlen=tensor._maybe_max_seqlen,
        )  # fmt: skip
    return torch._nested_view_from_buffer(
        tensor.values().pin_memory(), tensor._nested_tensor_size(), tensor._nested_tensor_strides(),
        tensor._nested_tensor_storage_offsets(),
    )  # fmt: skip
