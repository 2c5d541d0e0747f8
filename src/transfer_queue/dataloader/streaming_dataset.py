"""StreamingDataset: an iterable over a rank's batches that yields a micro-batch the moment its batch exists.

It waits at the controller, not by sleeping: a fetch that cannot be met is parked there, and the publish that
completes it answers it. TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL only bounds one such wait, so that a
dropped connection, or a custom fetch function that refuses what is ready, is looked after.

The dataset owns the place: which item comes next. Every iteration goes on from there, in the process that iterates;
the workers of a StreamingDataLoader fetch ahead and know of no place but the batch that they were told to begin at.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue.attachment import client_of
from transfer_queue.client._generated_methods import Surface
from transfer_queue.client.conversion import arguments
from transfer_queue.config.environment import empty_batch_sleep_interval
from transfer_queue.dataloader.batch_fetcher import (
    Batch,
    FetchBatch,
    Fetcher,
    ask_blocking,
    default_fetch_batch_fn,
    sampling_of,
)
from transfer_queue.dataloader.dp_size import Census, census, checked_dp_size
from transfer_queue.dataloader.lease_delivery import acknowledge_again, digest, hand_back, lease_of, take_over
from transfer_queue.dataloader.micro_batches import chunk_batch_fn, chunk_by_tokens, chunks, pack, token_field
from transfer_queue.dataloader.worker_channel import Channel, Seat, is_orphan
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata import BatchMeta

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]

ProcessBatch = Callable[..., Iterable[Any]]
Finish = Callable[[Any], Any]

STATE_VERSION = 1
LEAST_WAIT = 0.05  # seconds; with an interval of 0 a loader would send requests without a pause

TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL = empty_batch_sleep_interval()
"""The longest time in seconds that a dataset waits before it asks again. Code may set it here. If it does not, the
current value of the environment variable of this name is used."""

_AT_IMPORT = TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL


class Delivery(NamedTuple):
    """What a source has for a batch. batch: None where nothing came yet, or its data is not kept.

    items: the items of the batch, finished; None where they are still to be cut. ended: no batch will come.
    held: its metadata, where its samples stay until the task has finished them (`create_partition(free_when=...)`), or
    are to be acknowledged.
    """

    batch: Batch | None = None
    items: Sequence[Any] | None = None
    ended: bool = False
    held: BatchMeta | None = None


class Source(Protocol):
    """Where batches come from: this process, or workers."""

    def deliver(self, dataset: StreamingDataset) -> Delivery:
        """The batch at the dataset's place, after a wait."""


class StreamingDataset(IterableDataset):  # type: ignore[type-arg]
    """Yields a rank's `(TensorDict, BatchMeta)` micro-batches as they become ready.

    config: what `init` returned (or a controller's get_config); None means the attached system; a client is used as
    it is. batch_size: rows of a batch of this rank; micro_batch_size: rows of what is yielded, at most batch_size; the
    remainder of a sealed partition may be smaller. All datasets of the same task_name, partition_id and dp_rank
    (replicas) get the same batches, where the system's sampler is rank-consistent.
    should_check_consumption_status: end once the partition is consumed, instead of streaming until it is sealed.
    fetch_batch_fn: see `default_fetch_batch_fn`. process_batch_fn(data, meta, micro_batch_size=...): gives the items
    that are yielded instead of micro-batches.
    max_tokens: cuts micro-batches of at most so many tokens (and micro_batch_size rows), see `chunk_by_tokens`; how
    many there are then differs from rank to rank. pack: yields each micro-batch as one row of concatenated tokens, see
    `pack`. length_field: whose rows' lengths count for both; None: the tag "total_lengths" counts, and what is packed
    is the first field of data_fields that has token rows, with those of the same lengths.
    keep_batches: how many batches the buffer keeps, the newest ones; None: all; 0: none, for endless streams.
    delivery: "at_most_once": what is fetched is consumed. "at_least_once": it is claimed for lease_seconds at a time,
    and acknowledged when the process that iterates asks for the first item after the batch; before that, whatever
    happens to the process, it is delivered again. A fetch_batch_fn passes lease= to get_meta by itself for that.
    dp_size: the number of dp_ranks, or a process group or one-dimensional DeviceMesh of them. A rank-consistent sampler
    then deals one batch to every rank at a time, so that no rank takes samples that another one needs, however far its
    workers fetch ahead. None: the sampler's own dp_size; if it has none, the number of dp_ranks that the processes of
    torch.distributed have, if it is initialized and each process has a dataset of this task. If the number is not
    known, batches are dealt to the rank that asks (docs/architecture.md, "Ranks").

    buffer: whole batches fetched, (TensorDict, BatchMeta), which `reset` replays. batch_index: the next one to
    replay or fetch.

    Iterating anew goes on where the last iteration was left, in the middle of a batch too. In a plain DataLoader with
    workers each has a place of its own; worker w of n fetches the batches w, w + n, w + 2n, ... of the rank.

    Raises:
        InvalidArgumentError: micro_batch_size < 1, no data_fields, dp_rank < 0, or other arguments that cannot be.
    """

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
    ) -> None:
        super().__init__()
        _at_least(1, micro_batch_size=micro_batch_size, batch_size=batch_size, max_tokens=max_tokens)
        _at_least(0, keep_batches=keep_batches)
        if isinstance(data_fields, str):
            raise InvalidArgumentError(f"data_fields must be a list with at least one field name, got {data_fields!r}")
        if not hasattr(dp_rank, "__index__"):
            raise InvalidArgumentError(f"dp_rank must be an int greater than or equal to 0, got {dp_rank!r}")
        if dp_rank < 0:
            raise InvalidArgumentError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        if process_batch_fn is not None and (pack or max_tokens is not None):
            raise InvalidArgumentError("process_batch_fn makes the items by itself: leave out max_tokens and pack")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = arguments.names(data_fields, "data_fields")
        self.partition_id = partition_id
        """The partition; `step` changes it."""
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn
        self.process_batch_fn = process_batch_fn
        self.max_tokens = max_tokens
        self.pack = pack
        self.length_field = None if length_field is None else arguments.names([length_field], "length_field")[0]
        self.keep_batches = keep_batches
        self.dp_size = checked_dp_size(dp_size, dp_rank)
        self._census: Census | None = None if self.dp_size is not None else census(task_name, dp_rank)
        self._learned_dp_size: int | None = None
        self.delivery = delivery
        self.lease_seconds = lease_seconds
        self._lease = lease_of(delivery, lease_seconds)
        self._tq_client: Surface | None = None
        self._found: Surface | None = None  # the client that `_create_client` of this class has set
        self.buffer: list[Batch] = []
        """The whole batches that were fetched, which `reset` replays."""
        self.batch_index = 0
        self.moves = 0  # how often `step` or `load_state_dict` has changed the place
        self._kept_from = 0  # the number of the first batch of the buffer
        self._open: _Items | None = None  # of the batch before batch_index; None once its last item was given
        self._skip = 0  # items of the next batch that were given already
        self._held: BatchMeta | None = None  # of the batch before batch_index, which a worker has fetched and holds
        self._unacked: dict[int, BatchMeta] = {}  # batches given under leases, by number, until they are acknowledged
        # partition, number and digest of a batch whose ack is missing, as a loaded state says
        self._owed: tuple[str, int, int] | None = None
        # of a copy in a worker of a StreamingDataLoader: how it hears from there, and the loader's collate_fn
        self.channel: Channel | None = None
        self.seat: Seat | None = None
        self._collate: Finish | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.seat is not None:
            from transfer_queue.dataloader.worker_processes import fetch_in_worker  # it needs this module

            return fetch_in_worker(self, self.seat)
        return self.stream(Here())

    def stream(self, source: Source, finish: Finish | None = None) -> Iterator[Any]:
        """The items from the place on, batches coming from this source; finish: what is done with each item."""
        self.check()
        self.learn_dp_size()
        while True:
            if self._open is not None:
                yield self._take(self._open)  # no variable holds it while its batch's successor is awaited
                continue
            # the first item after a batch is asked for here: who iterates is through with the batch before
            self._through()
            if not self._open_next(source, finish):
                return

    def _through(self) -> None:
        """Says that who iterates is through with the batch before."""
        if self._owed is not None:
            partition_id, number, rows = self._owed
            wanted = {
                "data_fields": self.data_fields, "batch_size": self.batch_size, "partition_id": partition_id,
                "task_name": self.task_name, "sampling_config": {
                    **sampling_of(self.dp_rank, self.task_name, self._dp_size), "batch_index": number,
                    "partition_id": partition_id,
                },
            }  # fmt: skip
            acknowledge_again(self.client(), wanted, self.lease_seconds, rows)
            self._owed = None
        if self._held is None:
            return
        if self._held._leases:
            self.client().ack(self._held)
            self._unacked = {n: meta for n, meta in self._unacked.items() if meta is not self._held}
        else:
            self.client().finish(self._held, self.task_name)
        self._held = None

    def reset(self) -> None:
        """Goes back to the first batch of the buffer; what follows is what it keeps, then what is fetched."""
        if self.buffer:
            if self._held is not None and self._held._leases:
                self._held = None  # it is acknowledged when it was replayed
            self.batch_index = self._kept_from
            self._open, self._skip = None, 0

    def step(self, partition_id: str) -> None:
        """Moves on to another partition; what was fetched is forgotten."""
        self._go_to(partition_id, 0, 0)

    def state_dict(self) -> dict[str, Any]:
        """The place: which item comes next. Small, and of plain values.

        It stands for what was yielded by the process that iterates, whatever workers have fetched ahead.
        """
        number, given = self._place()
        worker = get_worker_info()
        owed = {}
        if self._open is None and self._held is not None and self._held._leases:
            owed = {"unacknowledged": [self._held.partition_ids[0], number - 1, digest(self._held)]}
        return {
            **owed,
            "version": STATE_VERSION, "partition_id": self.partition_id, "task_name": self.task_name,
            "dp_rank": self.dp_rank, "batch_index": number, "items_given": given, "cut": self._cut_by(),
            "worker": None if worker is None else [worker.id, worker.num_workers],
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a place that `state_dict` gave: the rest of its batch, which is asked for again, and then the next.

        With a rank-consistent sampler it is the same batch, as long as one of its rows lives; once all are cleared,
        going on in the middle of it is a BatchGoneError. With other samplers the batch was dealt once and for all.

        Raises:
            InvalidArgumentError: the state is of another version, task, dp_rank or worker, or it lies in the middle
                of a batch that was cut otherwise.
        """
        if not isinstance(state_dict, Mapping):
            raise InvalidArgumentError(f"a state is what state_dict() gave, and not a {type(state_dict).__name__}")
        worker = get_worker_info()
        here = {
            "version": STATE_VERSION, "task_name": self.task_name, "dp_rank": self.dp_rank,
            "worker": None if worker is None else [worker.id, worker.num_workers],
        }  # fmt: skip
        given = state_dict.get("items_given")
        if given:
            here["cut"] = self._cut_by()
        for name, value in here.items():
            if name not in state_dict or state_dict[name] != value:
                raise InvalidArgumentError(
                    f"the state was saved with {name} {state_dict.get(name)!r}, and here it is {value!r}; "
                    f"load it where these agree"
                )
        self._go_to(state_dict["partition_id"], state_dict["batch_index"], given or 0)
        owed = state_dict.get("unacknowledged")
        self._owed = None if owed is None or self._lease is None else tuple(owed)

    def cut(self, data: TensorDictBase, meta: BatchMeta) -> Iterable[Any]:
        """The items of a batch."""
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
        """Raises InvalidArgumentError where no batch could be cut as wanted."""
        if self.process_batch_fn is None and self.fetch_batch_fn is None and self.micro_batch_size > self.batch_size:
            raise InvalidArgumentError(
                f"micro_batch_size ({self.micro_batch_size}) is more than batch_size ({self.batch_size})"
            )

        if self._lease is not None and self.seat is None and get_worker_info() is not None:
            raise InvalidArgumentError(
                "with delivery='at_least_once' the process that trains acknowledges, and a plain DataLoader's workers "
                "iterate by themselves; use StreamingDataLoader, or no workers"
            )

    def learn_dp_size(self) -> None:
        """Find the number of dp_ranks, before the first batch is fetched, if `dp_size` was not given."""
        if self.dp_size is None and self._census is not None and self.fetch_batch_fn is None:
            self._learned_dp_size, self._census = self._census.answer(), None

    @property
    def _dp_size(self) -> int | None:
        return self.dp_size if self.dp_size is not None else self._learned_dp_size

    def fetcher(self, ask: Callable[..., Any] = ask_blocking) -> Fetcher:
        """Fetches this dataset's batches, in this process."""
        return Fetcher(
            self.client(), self.data_fields, self.batch_size, self.task_name, self.dp_rank,
            self.should_check_consumption_status, self.fetch_batch_fn, ask, hold=self.seat is not None,
            lease=self._lease, dp_size=self._dp_size, interval=self.interval,
        )  # fmt: skip

    def client(self) -> Surface:
        """Return the client that this dataset fetches with, in this process: `_tq_client`, created at its first use."""
        if self._tq_client is None or (self._tq_client is self._found and self._find_client() is not self._found):
            self._create_client()
        assert self._tq_client is not None
        return self._tq_client

    def interval(self) -> float:
        """Return the longest time in seconds that a request of the dataset waits before it is repeated."""
        replaced = TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL
        return max(replaced if replaced != _AT_IMPORT else empty_batch_sleep_interval(), LEAST_WAIT)

    def _create_client(self) -> None:
        """Set `_tq_client` to the client of the system that `config` names.

        A subclass may set another client. The method is called at the first fetch in each process, and again if the
        process is attached to another system.
        """
        self._tq_client = self._found = self._find_client()

    def _find_client(self) -> Surface:
        return self.config if isinstance(self.config, Surface) else client_of(self.config)

    def for_workers(self, channel: Channel, collate: Finish | None) -> StreamingDataset:
        """A copy that fetches whole batches in workers, as the channel tells, and there makes what items it can."""
        twin = copy.copy(self)
        twin.channel, twin._collate = channel, collate
        return twin

    def items_in_worker(self, data: TensorDictBase, meta: BatchMeta) -> list[Any] | None:
        """The items of a batch, where functions of the user's make them; None where it is only cut.

        Cutting makes views, and one batch crosses to the loader's process in a fifth of the time of its pieces.
        """
        if self.process_batch_fn is None and self._collate is None:
            return None
        items = self.cut(data, meta)
        return list(items if self._collate is None else map(self._collate, items))

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on at the same place; it has an empty buffer, and asks for an open batch again."""
        number, given = self._place()
        return {
            **vars(self),
            "buffer": [],
            "_open": None,
            "_tq_client": None,
            "_found": None,
            "_census": None,
            "_held": None,
            "_unacked": {},
            "_owed": None,
            "batch_index": number,
            "_skip": given,
            "_kept_from": number,
        }

    def _place(self) -> tuple[int, int]:
        """(number of the batch of the next item, how many of its items were given)."""
        return (self.batch_index, self._skip) if self._open is None else (self.batch_index - 1, self._open.given)

    def _cut_by(self) -> list[Any]:
        return [self.batch_size, self.micro_batch_size, self.max_tokens, self.length_field]

    def _go_to(self, partition_id: str, number: int, given: int) -> None:
        if self._unacked:
            through = self._held if self._open is None else None
            left = [meta for meta in self._unacked.values() if meta is not through]
            self._unacked, self._held = {}, through
            hand_back(self.client(), left)
        self.partition_id = partition_id
        self.buffer = []
        self.batch_index = self._kept_from = number
        self._open, self._skip = None, given
        self.moves += 1

    def _open_next(self, source: Source, finish: Finish | None) -> bool:
        """Opens the batch at the place, if there is one after a wait; False where none will come."""
        kept = self.batch_index - self._kept_from
        if 0 <= kept < len(self.buffer):
            self._held = self._unacked.get(self.batch_index)
            self._begin(*self.buffer[kept], finish)
            return True
        place = (self.moves, self.batch_index)
        found = source.deliver(self)
        if place != (self.moves, self.batch_index):
            return True  # another thread went elsewhere meanwhile
        if found.ended:
            return False
        self._held = found.held
        if found.held is not None and found.held._leases:
            self._unacked[self.batch_index] = found.held
            take_over(self.client(), found.held)
        if found.batch is not None:
            self._keep(found.batch)
        if found.items is not None:
            self._begin_with(found.items)
        elif found.batch is not None:
            self._begin(*found.batch, finish)
        return True

    def _take(self, opened: _Items) -> Any:
        """The next item. The place is behind it already: behind the batch, where it is the last."""
        try:
            item = opened.take()
        except Exception:
            self.batch_index, self._skip = self._place()  # it stays at this item
            self._open = None
            raise
        if opened.over:
            self._open = None
        return item

    def _begin(self, data: TensorDictBase, meta: BatchMeta, finish: Finish | None) -> None:
        items = self.cut(data, meta)
        self._begin_with(items if finish is None else map(finish, items))

    def _begin_with(self, items: Iterable[Any]) -> None:
        opened = _Items(items, self._skip)
        self._open, self._skip = None if opened.over else opened, 0
        self.batch_index += 1

    def _keep(self, batch: Batch) -> None:
        """Puts the batch at the place into the buffer; the oldest one goes where it is full."""
        self.buffer.append(batch)
        if self.keep_batches is not None:
            del self.buffer[: max(0, len(self.buffer) - self.keep_batches)]
        self._kept_from = self.batch_index + 1 - len(self.buffer)


class _Items:
    """The items of a batch, looked ahead by one, so that it is known which is the last.

    given: how many were, those that are left out here included.
    """

    def __init__(self, items: Iterable[Any], given: int) -> None:
        self.given = given
        self.over = False
        self._items = itertools.islice(items, given, None)
        self._following: Any = None
        self._fault: Exception | None = None
        self._look()

    def take(self) -> Any:
        """The next item. A fault in making it is raised here, not while the one before is given."""
        if self._fault is not None:
            raise self._fault
        item = self._following
        self.given += 1
        self._look()
        return item

    def _look(self) -> None:
        try:
            self._following = next(self._items)
        except StopIteration:
            self._following, self.over = None, True
        except Exception as fault:
            self._following, self._fault = None, fault


class Here:
    """Fetches in this process."""

    def __init__(self) -> None:
        self._fetcher: Fetcher | None = None

    def deliver(self, dataset: StreamingDataset) -> Delivery:
        """The batch at the dataset's place, or nothing after the interval."""
        if self._fetcher is None:
            self._fetcher = dataset.fetcher()
        worker, number = get_worker_info(), dataset.batch_index
        if worker is not None:
            number = number * worker.num_workers + worker.id
        found = self._fetcher.claim(dataset.partition_id, number)
        if found is not None and len(found[1]):
            batch = self._fetcher.complete(*found)
            return Delivery(batch, held=batch[1] if batch[1]._leases else None)
        return Delivery(ended=found is None or (worker is not None and is_orphan()))


def _at_least(least: int, **arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and (not hasattr(value, "__index__") or np.ndim(value) or value < least):
            wanted = "a positive integer" if least == 1 else f"an integer of {least} or more"
            raise InvalidArgumentError(f"{name} must be {wanted}, got {value!r}")
