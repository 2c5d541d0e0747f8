"""StreamingDataset: an iterable over a rank's batches that yields each micro-batch as soon as its batch is ready.

The dataset waits at the controller and does not poll: a fetch that cannot be answered is parked there, and is answered
after the put that completes it. TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL only limits the length of one such
wait, so that the dataset detects a lost connection, and calls a custom fetch function again if it did not accept the
ready samples.

The dataset owns the position, which says which item is next. Every iteration continues from there, in the process that
iterates. The workers of a StreamingDataLoader fetch ahead, and know only the batch at which they were ordered to begin.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue.attachment import client_of, is_current
from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.conversion import arguments
from transfer_queue.config.environment import empty_batch_sleep_interval
from transfer_queue.dataloader.async_iteration import AsyncItems
from transfer_queue.dataloader.batch_ahead import BatchAhead
from transfer_queue.dataloader.batch_fetcher import (
    Batch,
    Claimed,
    Delivery,
    FetchBatch,
    Fetcher,
    checked_timeout,
    default_fetch_batch_fn,
    number_in_rank,
)
from transfer_queue.dataloader.client_operations import ask, run, run_async
from transfer_queue.dataloader.dp_size import Census, census, checked_dp_size
from transfer_queue.dataloader.lease_delivery import (
    adopt_lease,
    give_back,
    hand_over,
    lease_of,
    return_batches,
    take_unseen,
)
from transfer_queue.dataloader.micro_batches import (
    chunk_batch_fn,
    chunk_by_tokens,
    chunks,
    pack,
    token_field,
)
from transfer_queue.dataloader.resumed_batch import (
    STATE_VERSION,
    OpenBatch,
    Reread,
    ResumedBatch,
    SavedBatch,
    check_state,
    settle,
)
from transfer_queue.dataloader.worker_channel import Channel, WorkerChannelEnd, is_orphan
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, WaitTimeoutError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import Operation, Work
from transfer_queue.sampler.freshness_sampler import POLICY_TAG

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]

ProcessBatch = Callable[..., Iterable[Any]]
Finish = Callable[[Any], Any]

MIN_WAIT = 0.05  # seconds; with an interval of 0 a loader would send requests without a pause

TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL = empty_batch_sleep_interval()
"""The longest time in seconds that a dataset waits before it asks again. Code may set it here. If it does not, the
current value of the environment variable of this name is used."""

_AT_IMPORT = TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL


class BatchSource(Protocol):
    """Where batches come from: this process, or workers."""

    def deliver(self, dataset: StreamingDataset, seconds: float | None) -> Operation[Delivery]:
        """Wait for the batch at the dataset's position, for at most this time, and return it."""


class StreamingDataset(IterableDataset):  # type: ignore[type-arg]
    """Yield a rank's `(TensorDict, BatchMeta)` micro-batches as they become ready.

    All datasets with the same task_name, partition_id and dp_rank (rank replicas) get the same batches if the system's
    sampler is rank-consistent.

    `async for` waits for batches without blocking the event loop. If the wait is cancelled, no samples are lost.

    By default the stream ends only when the partition is sealed and all samples are dealt. A new iteration
    continues where the last one stopped, also in the middle of a batch. In a plain DataLoader with workers each worker
    has its own position, and worker w of n fetches the batches w, w + n, w + 2n, ... of the rank.

    Args:
        config: What `init` returned (or `get_config` of the controller); None for the attached system. A client is used
            directly.
        batch_size: The number of samples in a batch of this rank. The remainder after a seal may be smaller.
        micro_batch_size: The number of samples in a micro-batch, at most `batch_size`.
        data_fields: The fields to fetch.
        partition_id: The partition.
        task_name: The task that consumes the samples.
        dp_rank: The data-parallel rank, from 0.
        should_check_consumption_status: True to end as soon as the task has consumed the whole partition. Default:
            False.
        fetch_batch_fn: A function that fetches a batch; see `default_fetch_batch_fn`. Default: a claim that waits at
            the controller.
        process_batch_fn: A function `(data, meta, micro_batch_size=...)` that returns the items to yield instead of
            micro-batches. Default: micro-batches.
        max_tokens: The maximum number of tokens in a micro-batch; see `chunk_by_tokens`. The number of micro-batches
            then differs between ranks. Default: no limit.
        pack: True to yield each micro-batch as one row of concatenated tokens; see `pack`. Default: False.
        length_field: The field whose row lengths count for `max_tokens` and `pack`. Default: the tag "total_lengths"
            counts, and `pack` uses the first of `data_fields` that has token rows, with those of the same lengths.
        keep_batches: The number of batches that the buffer keeps, the newest ones; 0 for endless streams. Default: all.
        delivery: "at_most_once": a batch is acknowledged when the process that iterates gets its first item; before
            that it goes back if the iteration or the process ends. "at_least_once": it is claimed under a lease, and
            acknowledged when that process asks for the first item after it. If the process ends before that, the batch
            is delivered again. A trainer that calls `set_policy_version` calls `ack` for its items first.
            A `fetch_batch_fn` must then pass `lease=` to `get_meta` itself.
            Default: "at_most_once".
        lease_seconds: The length of a lease; the dataset renews it. Default: 30 s.
        dp_size: The number of ranks of this task, or a process group or one-dimensional DeviceMesh of them. It may
            differ from that of the system's sampler, and must be that of the task's own sampler. A rank-consistent
            sampler then deals one batch to every rank at a time, so that no rank takes samples that another rank needs,
            even if its workers fetch far ahead. Default: the `dp_size` of the sampler; if it has none, the number of
            ranks of torch.distributed, if that is initialized and each process has a dataset of this task. If the
            number is not known, batches are dealt to the rank that asks (docs/architecture/dealing.md, "Ranks").
        shared: True: rows of a batch whose value is stored once share memory; see `TransferQueueClient.get_data`. With
            workers, such a value also goes once from the worker to the process that iterates. A `fetch_batch_fn` must
            pass `shared=` to `get_data` itself. Default: False.
        copy: False to read batches as views of the store where possible; see `get_data`. A batch in the buffer holds
            its space, so pass `keep_batches`, too. Workers of a loader copy each batch once, into memory that they
            share with the loader. A `fetch_batch_fn` decides itself. Default: True.
        device: The device of the tensors of the items, for example "cuda"; see `get_data`. Batches are then fetched in
            the process that iterates, without workers, and the buffer keeps none unless `keep_batches` is given. On a
            CUDA device a thread claims and fetches the next batch, if it is ready, from the first item of a batch on,
            so two batches are on the device. It is claimed one batch early: other consumers of the task get its
            samples only if the iteration ends before them, and they count as fetched for `max_staleness`. A batch is
            not fetched ahead while samples have the tag `policy_version`, because they may become too old, and not
            after `load_state_dict` as long as batches are replayed. A `fetch_batch_fn` must pass `device=` to
            `get_data` itself, and fetches nothing ahead: use one if memory is short, or if a FreshnessSampler reads
            another tag. Default: None, the host.
        sampler: The built-in sampler of this task: its name, its class, an instance, or a mapping with the keys
            `sampler` and `sampler_args`. It is registered for the task for as long as the system exists; another
            dataset of the task may leave it out, and is refused if it asks for another one. A sampler of your own is
            named in `controller.task_samplers`. Default: that of the task there, or else that of the system.
        timeout: Seconds without a batch after which the iteration raises WaitTimeoutError, whose message says what the
            system waits for. The next iteration continues at the same batch. Default: no limit.

    Raises:
        InvalidArgumentError: `micro_batch_size` is less than 1, `data_fields` is empty, `dp_rank` is negative, or
            another argument is not valid.

    Example:
        >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> client.seal("train_0")
        >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
        >>> [data["reward"].tolist() for data, meta in dataset]
        [[0.0], [1.0]]
    """

    config: Any
    """The configuration or client that names the system; None for the attached system."""
    batch_size: int
    """The number of samples in a batch of this rank."""
    micro_batch_size: int
    """The number of samples in a micro-batch."""
    data_fields: list[str]
    """The fields to fetch."""
    partition_id: str
    """The partition; `step` changes it."""
    task_name: str
    """The task that consumes the samples."""
    dp_rank: int
    """The data-parallel rank."""
    should_check_consumption_status: bool
    """Whether the iteration ends as soon as the task has consumed the whole partition."""
    fetch_batch_fn: FetchBatch | None
    """The function that fetches a batch; None for the default."""
    process_batch_fn: ProcessBatch | None
    """The function that makes the items of a batch; None for micro-batches."""
    max_tokens: int | None
    """The maximum number of tokens in a micro-batch; None for no limit."""
    pack: bool
    """Whether each micro-batch is one row of concatenated tokens."""
    length_field: str | None
    """The field whose row lengths count; None for the tag "total_lengths"."""
    device: torch.device | None
    """The device of the tensors of the items; None for the host."""
    keep_batches: int | None
    """The number of batches that the buffer keeps; None for all."""
    delivery: str
    """"at_most_once" or "at_least_once"."""
    lease_seconds: float
    """The length of a lease in seconds."""
    dp_size: int | None
    """The number of ranks that was given; None if it was not."""
    sampler: Any
    """The sampler of the task that was given; None if none was."""
    timeout: float | None
    """Seconds without a batch after which the iteration raises WaitTimeoutError; None for no limit."""
    copy: bool
    """Whether batches are copied; False if they are read as views."""
    shared: bool
    """Whether rows whose value is stored once share memory."""
    buffer: list[Batch]
    """The whole batches that were fetched, which `reset` replays."""
    batch_index: int
    """The number of the next batch to replay or fetch."""
    moves: int
    """How often `step` or `load_state_dict` has changed the position."""
    channel: Channel | None
    """In a copy for a worker of a StreamingDataLoader: how the worker receives orders; otherwise None."""
    seat: WorkerChannelEnd | None
    """In a worker of a StreamingDataLoader: the worker's end of the channel; otherwise None."""
    iterate_in_worker: Callable[[StreamingDataset], Iterator[Any]] | None
    """In a worker of a StreamingDataLoader: the function that iterates over this dataset there; otherwise None."""

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: FetchBatch | None = None,
        process_batch_fn: ProcessBatch | None = None,
        *,
        max_tokens: int | None = None,
        pack: bool = False,
        length_field: str | None = None,
        keep_batches: int | None = None,
        delivery: str = "at_most_once",
        lease_seconds: float = 30.0,
        dp_size: Any = None,
        shared: bool = False,
        copy: bool = True,
        device: torch.device | str | None = None,
        sampler: Any = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        _at_least(1, micro_batch_size=micro_batch_size, batch_size=batch_size, max_tokens=max_tokens)
        _at_least(0, keep_batches=keep_batches)
        _check_fields_and_rank(data_fields, dp_rank)
        if process_batch_fn is not None and (pack or max_tokens is not None):
            raise InvalidArgumentError("process_batch_fn makes the items itself; leave out max_tokens and pack")
        if fetch_batch_fn is not None and (shared or device is not None):
            given = "shared=True" if shared else f"device={device!r}"
            raise InvalidArgumentError(
                f"fetch_batch_fn reads the values itself; leave out {given}, and pass {given} to get_data there"
            )
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = arguments.validated_names(data_fields, "data_fields")
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn
        self.process_batch_fn = process_batch_fn
        self.max_tokens = max_tokens
        self.pack = pack
        self.length_field = (
            None if length_field is None else arguments.validated_names([length_field], "length_field")[0]
        )
        self.device = None if device is None else arguments.validated_device(device)
        self.keep_batches = 0 if keep_batches is None and self.device is not None else keep_batches
        self.dp_size = checked_dp_size(dp_size, dp_rank)
        self.copy = arguments.validated_bool(copy, "copy")
        self.delivery = delivery
        self.lease_seconds = lease_seconds
        self.shared = arguments.validated_bool(shared, "shared")
        self._lease = lease_of(delivery, lease_seconds)
        self._census: Census | None = None if self.dp_size is not None else census(task_name, dp_rank)
        self.sampler = sampler
        self.timeout = checked_timeout(timeout)
        self._begin()
        if sampler is not None:
            self.client()  # registers it, so that another one is refused here

    def _begin(self) -> None:
        """Set what changes while the dataset is used."""
        self._learned_dp_size: int | None = None
        self._tq_client: GeneratedMethods | None = None
        self._attached_client: GeneratedMethods | None = None  # the client that `_create_client` of this class has set
        self.buffer = []
        self.batch_index = 0
        self.moves = 0
        self._kept_from = 0  # the number of the first batch of the buffer
        # of the batch before batch_index; None once its last item was yielded
        self._open: OpenBatch | None = None
        # the batch before batch_index, if the iteration continues in its middle and it must be read again
        self._resumed: ResumedBatch | None = None
        self._received = 0  # the batches below this number were received, by this process or before a load
        self._held: BatchMeta | None = None  # of the batch before batch_index, which a worker has fetched and holds
        self._unacked: dict[int, BatchMeta] = {}  # batches yielded under leases, by number, until they are acknowledged
        # a batch that was neither acknowledged nor finished when its state was saved
        self._owed: SavedBatch | None = None
        self._unseen: dict[int, tuple[BatchLease, ...]] = {}  # of batches of which no item was yielded, by number
        self._receiver = 0  # the process that has received them; a forked child has a copy
        self._ahead: BatchAhead | None = None  # the next batch, fetched ahead; it is kept until its fetch has ended
        self.channel = None
        self.seat = None
        self.iterate_in_worker = None
        self._collate: Finish | None = None  # the collate_fn of the loader

    def __iter__(self) -> Iterator[Any]:
        if self.iterate_in_worker is not None:
            return self.iterate_in_worker(self)
        worker, resumed = get_worker_info(), self._interrupted()
        if worker is not None and worker.id and resumed is not None and resumed.worker is None:
            self._open = self._resumed = None  # the first worker continues the process's open batch
        return self.stream(LocalSource())

    def stream(self, source: BatchSource, finish: Finish | None = None) -> Iterator[Any]:
        """Yield the items from the position on, from the batches of a source.

        Args:
            source: Where batches come from.
            finish: A function that is applied to each item. Default: none.

        Yields:
            The items.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> client.seal("train_0")
            >>> dataset = tq.StreamingDataset(None, 2, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> from transfer_queue.dataloader.streaming_dataset import LocalSource
            >>> len(list(dataset.stream(LocalSource())))
            1
        """
        self.check()
        self.learn_dp_size()
        client = cache(self.client)  # one for the iteration, found when it is needed
        try:
            while self._open_kept(finish) or run(client(), self._open_following(source, finish)):
                while self._open is not None:
                    yield self._take(self._open)  # no variable refers to the item while the next batch is awaited
        finally:
            self._end_ahead()

    def __aiter__(self) -> AsyncItems:
        return self.async_stream(LocalSource())

    def async_stream(
        self, source: BatchSource, finish: Finish | None = None, close: Callable[[bool], object] | None = None
    ) -> AsyncItems:
        """Return an asynchronous iterator over the items from the position on, from the batches of a source.

        Args:
            source: Where batches come from.
            finish: A function that is applied to each item. Default: none.
            close: A function that is called at the end; its argument is True if an error has ended the iteration.
                Default: none.

        Returns:
            The iterator.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> client.seal("train_0")
            >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
            >>> from transfer_queue.dataloader.streaming_dataset import LocalSource
            >>> async for data, meta in dataset.async_stream(LocalSource()):
            ...     print(data["reward"].tolist())
            [0.0]
            [1.0]
        """
        self.check()
        client = cache(self.client)

        def take() -> tuple[Any] | None:
            self._open_kept(finish)
            return None if self._open is None else (self._take(self._open),)

        def end_ahead(failed: bool) -> None:
            self._end_ahead()

        # with `device=` there are no workers to close
        ending = close if self.device is None else end_ahead
        return AsyncItems(take, lambda: run_async(client(), self._open_following(source, finish)), ending)

    def _open_kept(self, finish: Finish | None) -> bool:
        """Open the batch at the position if this needs no client. Return whether a batch is open."""
        is_owing = self._owed is not None or self._held is not None or self._resumed is not None
        if self._open is None and not is_owing:
            self._open_buffered(finish)
        return self._open is not None

    def _open_following(self, source: BatchSource, finish: Finish | None) -> Operation[bool]:
        """Wait for the batch at the position, and open it. Return False if the stream has ended before it."""
        if self._census is not None and self.fetch_batch_fn is None:
            yield Work(self.learn_dp_size, is_users=True)  # it waits for other processes
        # the first item after a batch is requested here, so the iterating process has finished the previous batch
        yield from self._finish_previous()
        if self._resumed is not None:
            return (yield from self._open_resumed(self._resumed, finish))
        return (yield from self._open_next(source, finish))

    def _finish_previous(self) -> Operation[None]:
        """Finish or acknowledge the previous batch."""
        if self._owed is not None:
            yield from settle(self, self._owed)
            self._owed = None
        if self._held is None:
            return
        if self._held._leases:
            yield from ask(self.client(), "ack", self._held)
            self._unacked = {n: meta for n, meta in self._unacked.items() if meta is not self._held}
        else:
            yield from ask(self.client(), "finish", self._held, self.task_name)
        self._held = None

    def reset(self) -> None:
        """Go back to the first batch of the buffer. The buffered batches are replayed before new ones are fetched.

        If `load_state_dict` has set the position, the buffer does not have the batches before it. The iteration then
        goes back to the first batch (with `keep_batches=n` to the first of the last n), and all batches are fetched
        again by their numbers. This needs a rank-consistent sampler, and the samples must exist.

        Raises:
            BatchGoneError: The sampler does not keep the batches before a loaded position, or the first one was
                cleared. If a later one was cleared, the iteration raises this error when it gets there.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> client.seal("train_0")
            >>> dataset = tq.StreamingDataset(None, 2, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> first = list(dataset)
            >>> dataset.reset()
            >>> len(list(dataset))
            1
        """
        received = self._received
        start = 0 if self.keep_batches is None else max(0, received - self.keep_batches)
        resumed = self._resumed
        if resumed is not None and resumed.saved.rows and start == resumed.saved.number == self._kept_from - 1:
            self._resumed = replace(resumed, given=0, left=resumed.saved.rows)
        elif start < min(received, self._kept_from):
            self._check_replay(start)
            self._go_to(self.partition_id, start)
            self._received = received
        elif self.buffer:
            if self._held is not None and self._held._leases:
                self._held = None  # it is acknowledged after it was replayed
            self.batch_index = self._kept_from
            self._open = self._resumed = None

    def _check_replay(self, start: int) -> None:
        """Raise BatchGoneError if the batches from this number on cannot be fetched again, as far as is known now."""
        if self.fetch_batch_fn is not None:
            return  # only the function knows for which task and sampler it fetches
        try:
            run(self.client(), self.fetcher().check_again(self.partition_id, number_in_rank(start)))
        except BatchGoneError as error:
            raise BatchGoneError(
                f"the position was loaded, so the buffer does not have the batches from {start} to "
                f"{min(self._received, self._kept_from) - 1}, and they cannot be fetched again: {error}"
            ) from None

    def step(self, partition_id: str) -> None:
        """Continue with another partition, from its first batch. The buffer is emptied.

        Args:
            partition_id: The partition.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> dataset.step("train_1")
            >>> dataset.partition_id, dataset.batch_index
            ('train_1', 0)
        """
        self._go_to(partition_id, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: which item is next.

        It describes what the iterating process has received. Batches that workers have fetched ahead do not count. In
        the middle of a batch it names the samples of the batch, and with `delivery="at_least_once"` its lease.

        Returns:
            The position, a small dict of plain values, which JSON can carry.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> dataset.state_dict()["batch_index"]
            0
        """
        number, given = self._place()
        resumed = self._interrupted()
        received = number if resumed is None and self._open is not None else self._received
        return {
            "version": STATE_VERSION, **self._identity(), "partition_id": self.partition_id, "batch_index": number,
            "items_given": given, "cut": self._cut_by(), "received": received,
            **(self._unacknowledged() if resumed is None else resumed.to_state()),
        }  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        """Return the entries in which a state and the dataset that loads it must be equal."""
        return {"task_name": self.task_name, "dp_rank": self.dp_rank, "worker": self._worker()}

    @staticmethod
    def _worker() -> list[int] | None:
        """Return [number, count] of this process as a worker of a plain DataLoader; None if it is not one."""
        worker = get_worker_info()
        return None if worker is None else [worker.id, worker.num_workers]

    def _unacknowledged(self) -> dict[str, Any]:
        """Return the entry of a state about a batch that is not acknowledged or finished yet, if there is one."""
        owed = self._owed
        if owed is None and self._held is not None and self._open is None:
            owed = SavedBatch.of(self.batch_index - 1, self._held)
        return {} if owed is None else {"unacknowledged": owed.to_state()}

    def _interrupted(self) -> ResumedBatch | None:
        """Return the batch in the middle of which the position is; None if it is between batches."""
        if self._open is None:
            return self._resumed
        if not self._open.given and self.batch_index - 1 in self._unseen:
            return None  # its samples go back if its first item is not yielded
        return self._open.interrupted(self.batch_index - 1)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position: the rest of its batch, and then the next batches.

        The samples of the open batch are read again without a fetch, whatever the sampler is, so exactly those are
        yielded that were not yielded before. A logged warning names those that were cleared. With
        `delivery="at_least_once"` the batch is acknowledged at its end if its lease is still in force, or if the
        sampler is rank-consistent. Otherwise its samples are delivered again, and the rest is yielded nevertheless.

        The batches after it are fetched. A rank-consistent sampler returns those that it has dealt before.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            InvalidArgumentError: The state is of another version, task, dp_rank or worker, or is in the middle of a
                batch that was cut in another way.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> dataset.load_state_dict({**dataset.state_dict(), "batch_index": 3})
            >>> dataset.batch_index
            3
        """
        check_state(state_dict, self._identity(), self._cut_by())
        resumed, owed = ResumedBatch.from_state(state_dict), state_dict.get("unacknowledged")
        batches = [] if resumed is None else [resumed.saved]
        if owed is not None:
            batches.append(SavedBatch.from_state(owed))
        number = state_dict["batch_index"] + (resumed is not None)
        self._go_to(state_dict["partition_id"], number, {lease[1] for batch in batches for lease in batch.leases})
        self._resumed, self._owed = resumed, None if owed is None else batches[-1]
        self._received = max(number, state_dict.get("received", 0))

    def cut(self, data: TensorDictBase, meta: BatchMeta) -> Iterable[Any]:
        """Return the items of a batch.

        Args:
            data: The values of the batch.
            meta: Its metadata.

        Returns:
            The items: micro-batches, or what `process_batch_fn` returns.

        Raises:
            InvalidArgumentError: The batch cannot be cut in this way.

        Example:
            >>> dataset = tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> data = TensorDict({"reward": torch.arange(4)}, batch_size=4)
            >>> [part["reward"].tolist() for part, _ in dataset.cut(data, tq.BatchMeta(range(4), "train_0"))]
            [[0, 1], [2, 3]]
        """
        if self.process_batch_fn is not None:
            return self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
        size = self.micro_batch_size
        if size <= self.batch_size:
            size = min(size, len(meta))  # the remainder after a seal
        pieces = chunks(data, meta, size)
        if self.max_tokens is not None:
            pieces = chunk_by_tokens(data, meta, self.max_tokens, max_rows=size, length_field=self.length_field)
        if not self.pack:
            return pieces
        field = self.length_field or token_field(data, self.data_fields)
        return ((pack(piece, field), rows) for piece, rows in pieces)

    def check(self) -> None:
        """Check that batches can be cut and delivered as requested.

        Raises:
            InvalidArgumentError: They cannot.

        Example:
            >>> tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0).check()
        """
        if self.process_batch_fn is None and self.fetch_batch_fn is None and self.micro_batch_size > self.batch_size:
            raise InvalidArgumentError(
                f"micro_batch_size ({self.micro_batch_size}) is more than batch_size ({self.batch_size})"
            )

        if self.device is not None and get_worker_info() is not None:
            raise InvalidArgumentError(
                f"device={str(self.device)!r} does not work with worker processes, which cannot use the device of the "
                "process that trains; use num_workers=0, or leave out device and pass pin_memory=True to the loader"
            )
        if self._lease is not None and self.seat is None and get_worker_info() is not None:
            raise InvalidArgumentError(
                "delivery='at_least_once' does not work with the workers of a plain DataLoader, because the process "
                "that trains acknowledges the batches; use StreamingDataLoader, or no workers"
            )

    def learn_dp_size(self) -> None:
        """Find the number of ranks before the first batch is fetched, if `dp_size` was not given.

        Example:
            >>> tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0).learn_dp_size()
        """
        if self.dp_size is None and self._census is not None and self.fetch_batch_fn is None:
            self._learned_dp_size, self._census = self._census.answer(), None

    @property
    def sampling_config(self) -> dict[str, Any]:
        """What a `fetch_batch_fn` gets: `dp_rank` and `task_name`, and `dp_size` if the number of ranks is known.

        A new dict at each access; to send other entries, pass a `fetch_batch_fn` that adds them.
        """
        size = self.dp_size if self.dp_size is not None else self._learned_dp_size
        return {"dp_rank": self.dp_rank, "task_name": self.task_name} | ({} if size is None else {"dp_size": size})

    def fetcher(self, *, combined: bool = False) -> Fetcher:
        """Return the object that fetches this dataset's batches in this process.

        Args:
            combined: True if one request claims a batch and reads it. Default: two requests.

        Returns:
            The fetcher.

        Example:
            >>> fetcher = tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0).fetcher()
        """
        return Fetcher(self, combined=combined)

    def client(self) -> GeneratedMethods:
        """Return the client that this dataset fetches with in this process. It is created at its first use.

        Returns:
            The client.

        Example:
            >>> tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0).client() is client
            True
        """
        known = self._attached_client
        if self._tq_client is None or (
            self._tq_client is known and not is_current(known) and self._find_client() is not known
        ):
            self._create_client()
            if self.sampler is not None and self._tq_client is not None:
                self._tq_client.register_task_sampler(self.task_name, self.sampler)
        assert self._tq_client is not None
        return self._tq_client

    def interval(self) -> float:
        """Return the longest time that a request of this dataset waits before it is repeated.

        Returns:
            The time in seconds.

        Example:
            >>> tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0).interval()
            1.0
        """
        replaced = TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL
        return max(replaced if replaced != _AT_IMPORT else empty_batch_sleep_interval(), MIN_WAIT)

    def _create_client(self) -> None:
        """Set `_tq_client` to the client of the system that `config` names.

        A subclass may set another client. The method is called at the first fetch in each process, and again if the
        process is attached to another system.
        """
        self._tq_client = self._attached_client = self._find_client()

    def _find_client(self) -> GeneratedMethods:
        return self.config if isinstance(self.config, GeneratedMethods) else client_of(self.config)

    def for_workers(self, channel: Channel, collate: Finish | None) -> StreamingDataset:
        """Return a copy that fetches whole batches in workers.

        Args:
            channel: How the workers receive orders.
            collate: The `collate_fn` of the loader; None if it has none.

        Returns:
            The copy.

        Example:
            >>> dataset = tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> dataset.for_workers(None, None).batch_size
            4
        """
        twin = copy.copy(self)
        twin.channel, twin._collate = channel, collate
        return twin

    def items_in_worker(self, data: TensorDictBase, meta: BatchMeta) -> list[Any] | None:
        """Return the items of a batch if user functions make them; None if the batch is only cut.

        Cutting makes views, and one batch is sent to the loader's process in a fifth of the time of its pieces.

        Args:
            data: The values of the batch.
            meta: Its metadata.

        Returns:
            The items, or None.

        Example:
            >>> dataset = tq.StreamingDataset(None, 4, 2, ["reward"], "train_0", "update", dp_rank=0)
            >>> data = TensorDict({"reward": torch.arange(4)}, batch_size=4)
            >>> print(dataset.items_in_worker(data, tq.BatchMeta(range(4), "train_0")))
            None
        """
        if self.process_batch_fn is None and self._collate is None:
            return None
        items = self.cut(data, meta)
        collate = self._collate  # not with `map`, which ends without an error if it raises StopIteration
        return list(items) if collate is None else [collate(item) for item in items]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy at the same position: its buffer is empty, and it fetches an open batch again."""
        resumed = self._interrupted()
        unseen = resumed is None and self._open is not None
        return {
            **vars(self),
            "buffer": [],
            "_open": None,
            "_tq_client": None,
            "_attached_client": None,
            "_census": None,
            "_held": None,
            "_unacked": {},
            "_owed": None,
            "_unseen": {},
            "_ahead": None,
            "_resumed": None if resumed is None else replace(resumed, held=None),
            "batch_index": self.batch_index - unseen,
            "_received": self._received - unseen,
            "_kept_from": self.batch_index - unseen,
        }

    def _place(self) -> tuple[int, int]:
        """Return (number of the batch of the next item, how many of its items were yielded)."""
        if self._open is not None:
            return self.batch_index - 1, self._open.given
        return (self.batch_index, 0) if self._resumed is None else (self.batch_index - 1, self._resumed.given)

    def _cut_by(self) -> list[Any]:
        return [self.batch_size, self.micro_batch_size, self.max_tokens, self.length_field]

    def _go_to(self, partition_id: str, number: int, kept: Collection[int] = ()) -> None:
        """Go to a batch. kept: the tokens of leases that are not returned, because the position has them."""
        if self._unacked:
            through = self._held if self._open is None and self._resumed is None else None
            left = [
                meta for meta in self._unacked.values()
                if meta is not through and not any(lease.token in kept for lease in meta._leases)
            ]  # fmt: skip
            self._unacked, self._held = {}, through
            return_batches(self.client(), left)
        self._give_back_unseen()
        self._end_ahead()
        self.partition_id = partition_id
        self.buffer = []
        self.batch_index = self._kept_from = self._received = number
        self._open = self._resumed = None
        self.moves += 1

    def _give_back_unseen(self) -> None:
        """Return the batches of which no item was yielded."""
        unseen, self._unseen = self._unseen, {}
        if unseen and self._receiver == os.getpid():
            give_back(self.client(), itertools.chain.from_iterable(unseen.values()))

    def __del__(self) -> None:
        if getattr(self, "_unseen", None) and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._give_back_unseen()

    def _open_buffered(self, finish: Finish | None) -> bool:
        """Open the batch at the position if the buffer has it, and return whether it has."""
        kept = self.batch_index - self._kept_from
        if not 0 <= kept < len(self.buffer):
            return False
        self._held = self._unacked.get(self.batch_index)
        self._cut_and_open(self.buffer[kept], finish)
        return True

    def _open_next(self, source: BatchSource, finish: Finish | None) -> Operation[bool]:
        if self._open_buffered(finish):
            return True
        self._give_back_unseen()  # a batch that could not be cut, and that the buffer does not keep
        place = (self.moves, self.batch_index)
        delivery = yield from self._deliver_in_time(source)
        if place != (self.moves, self.batch_index):
            give_back(self.client(), delivery.unseen)
            return True  # another thread has changed the position meanwhile
        if delivery.ended:
            return False
        if delivery.unseen:
            self._unseen[self.batch_index] = delivery.unseen
            self._receiver = os.getpid()
        self._held = delivery.held
        if delivery.held is not None and delivery.held._leases:
            self._unacked[self.batch_index] = delivery.held
            adopt_lease(self.client(), delivery.held)
        if delivery.batch is not None:
            self._keep(delivery.batch)
        if delivery.items is not None:
            assert delivery.meta is not None
            rows = self._rows_of_cut_items(delivery.meta)
            self._open_items(OpenBatch(delivery.meta, delivery.items, self._worker(), rows=rows))
        elif delivery.batch is not None:
            self._cut_and_open(delivery.batch, finish)
        return True

    def _deliver_in_time(self, source: BatchSource) -> Operation[Delivery]:
        """Wait until a source delivers something. Return nothing if the position has changed meanwhile.

        Raises:
            WaitTimeoutError: No batch came for `timeout` seconds. The message says why, with the verdict.
        """
        place, timeout = self._position(), self.timeout
        if timeout is not None:
            fetcher = self.fetcher()
            deadline = fetcher.clock() + timeout
        left = timeout
        while True:
            delivery = yield from source.deliver(self, left)
            if not delivery.is_empty or self._position() != place:
                return delivery
            if timeout is not None:
                left = deadline - fetcher.clock()
                if left <= 0:
                    reason = yield from fetcher.explain(*place[:2])
                    raise WaitTimeoutError(f"Timeout: no batch came within {timeout:g} s. {reason}")

    @property
    def _next_fetch(self) -> int:
        """The number of the next batch to fetch: the one at the position, or the first one after the buffer."""
        end = self._kept_from + len(self.buffer)
        return end if self._kept_from <= self.batch_index < end else self.batch_index

    def _position(self) -> tuple[str, int, int]:
        return self.partition_id, number_in_rank(self.batch_index), self.moves

    def _open_resumed(self, resumed: ResumedBatch, finish: Finish | None) -> Operation[bool]:
        """Open the batch before `batch_index` after the items that were yielded. It is read again if necessary."""
        number, moves = self.batch_index - 1, self.moves
        if 0 <= number - self._kept_from < len(self.buffer):
            reread = Reread(self.buffer[number - self._kept_from], resumed.given, resumed.held)
        else:
            reread = yield from resumed.read(self)
            if moves != self.moves:
                return True  # another thread has changed the position meanwhile
        self._resumed, self._held = None, reread.held
        if reread.held is not None and reread.held._leases:
            self._unacked[number] = reread.held
        if reread.batch is not None:
            self.batch_index = number
            if reread.is_whole and not self.buffer:
                self._keep(reread.batch)
            self._cut_and_open(reread.batch, finish, reread.skip)
        return True

    def _take(self, opened: OpenBatch) -> Any:
        """Return the next item. The position is already after it, or after the batch if it is the last."""
        try:
            item = opened.take()
        except Exception:
            resumed = self._interrupted()  # the position stays at this item
            if resumed is not None:
                self._resumed, self._held = replace(resumed, held=self._held), None
            else:
                self.batch_index -= 1
                self._received = min(self._received, self.batch_index)
            self._open = None
            raise
        self._hand_over()
        if opened.over:
            self._open = None
        self._fetch_ahead(opened.meta)
        return item

    def _fetch_ahead(self, meta: BatchMeta) -> None:
        """Begin to fetch the batch after this one, unless it is fetched or under way, or was received before."""
        if self.device is None or (self._ahead is not None and self._ahead.is_needed):
            return
        is_new = self.batch_index == self._next_fetch >= self._received
        if is_new and not any(POLICY_TAG in tag for tag in meta._tags.first(1)):
            with contextlib.suppress(Exception):  # the item must be yielded; the batch is fetched when it is needed
                self._ahead = BatchAhead.begin(self, self.device, self._position())

    def _end_ahead(self) -> None:
        """Give back what was fetched ahead, and free its memory."""
        if self._ahead is not None and not sys.is_finalizing():
            self._ahead.discard()
            if not self._ahead.is_under_way:
                self._ahead = None

    def _hand_over(self) -> None:
        """Report that the open batch is handed over with the item that is yielded now."""
        unseen = self._unseen.pop(self.batch_index - 1, ()) if self._unseen else ()
        if unseen and self._receiver == os.getpid():
            hand_over(self.client(), unseen)

    def _cut_and_open(self, batch: Batch, finish: Finish | None, skip: int = 0) -> None:
        self._open_items(OpenBatch(batch[1], self.cut(*batch), self._worker(), skip, finish=finish))

    def _open_items(self, opened: OpenBatch) -> None:
        if not opened.over:
            self._open = opened
        self.batch_index += 1
        if opened.over:
            self._hand_over()  # there is no item, because a function of the user has left all samples out
        self._received = max(self._received, self.batch_index)

    def _rows_of_cut_items(self, meta: BatchMeta) -> list[np.ndarray]:
        """Return the rows of items that a worker has made, as far as they are known here."""
        if self.process_batch_fn is not None or self.max_tokens is not None:
            return []
        rows, size = meta._rows(), self.micro_batch_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _keep(self, batch: Batch) -> None:
        """Put the batch at the position into the buffer. The oldest one is removed if the buffer is full."""
        self.buffer.append(batch)
        if self.keep_batches is not None:
            del self.buffer[: max(0, len(self.buffer) - self.keep_batches)]
        self._kept_from = self.batch_index + 1 - len(self.buffer)


class LocalSource:
    """Fetches batches in this process."""

    def __init__(self) -> None:
        self._fetcher: Fetcher | None = None

    def deliver(self, dataset: StreamingDataset, seconds: float | None = None) -> Operation[Delivery]:
        """Return the batch at the dataset's position, or nothing after the interval or these seconds."""
        if self._fetcher is None:
            self._fetcher = dataset.fetcher(combined=True)
        claimed: Claimed | None = None
        if dataset._ahead is not None:
            if not (yield from dataset._ahead.arrive(seconds)):
                return Delivery()
            ahead, dataset._ahead = dataset._ahead, None
            claimed = ahead.take(dataset._position())
        if claimed is None:
            number, again = number_in_rank(dataset.batch_index), dataset.batch_index < dataset._received
            claimed = yield from self._fetcher.claim(dataset.partition_id, number, again=again, within=seconds)
        if claimed is None or not len(claimed[1]):
            return Delivery(ended=claimed is None or (get_worker_info() is not None and is_orphan()))
        batch = yield from self._fetcher.complete(*claimed)
        meta, unseen = batch[1], take_unseen(batch[1])
        is_held = meta._leases or (dataset.device is not None and meta._holder)  # it is finished with a request
        return Delivery(batch, held=meta if is_held else None, unseen=unseen)


def _at_least(least: int, **arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and (not hasattr(value, "__index__") or np.ndim(value) or value < least):
            kind = "a positive integer" if least == 1 else f"an integer of {least} or more"
            raise InvalidArgumentError(f"{name} must be {kind}, got {value!r}")


def _check_fields_and_rank(data_fields: Sequence[str], dp_rank: int) -> None:
    if isinstance(data_fields, str):
        raise InvalidArgumentError(f"data_fields must be a list with at least one field name, got {data_fields!r}")
    if not hasattr(dp_rank, "__index__"):
        raise InvalidArgumentError(f"dp_rank must be an int greater than or equal to 0, got {dp_rank!r}")
    if dp_rank < 0:
        raise InvalidArgumentError(f"dp_rank {dp_rank} must be greater than or equal to 0")
