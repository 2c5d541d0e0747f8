"""StreamingDataset: an iterable over a rank's batches that yields a micro-batch the moment its batch exists.

It waits at the controller, not by sleeping: a fetch that cannot be met is parked there, and the publish that
completes it answers it. TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL only bounds one such wait, so that a
dropped connection, a custom fetch function that refuses what is ready, or an order from the loader's process is
looked after.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue.client.surface import Surface
from transfer_queue.config import empty_batch_sleep_interval
from transfer_queue.current import client_of
from transfer_queue.dataloader.orders import Order, Orders
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire.tensors import is_plain_jagged, rows_of_jagged

Batch = tuple[TensorDictBase, BatchMeta]
FetchBatch = Callable[..., tuple[TensorDictBase | None, BatchMeta]]
ProcessBatch = Callable[..., Iterable[Any]]

LEAST_WAIT = 0.05  # seconds: an interval of 0 must not make a loader ask without a pause

_FETCH_ARGUMENTS = (
    "tq_client", "data_fields", "batch_size", "partition_id", "task_name", "sampling_config", "batch_index",
)  # fmt: skip


def default_fetch_batch_fn(
    tq_client: Surface,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDictBase | None, BatchMeta]:
    """One batch of a rank, (data, metadata); (None, an empty BatchMeta) where nothing is ready in polling mode.

    sampling_config: {"dp_rank", "task_name"}; batch_index and partition_id are added to a copy of it.
    """
    sampling = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(
        data_fields=list(data_fields), batch_size=batch_size, partition_id=partition_id, task_name=task_name,
        sampling_config=sampling,
    )  # fmt: skip
    if not len(meta):
        return None, meta
    return tq_client.get_data(meta), meta


def chunk_batch_fn(td: TensorDictBase, batch_meta: BatchMeta, micro_batch_size: int = 1) -> Iterator[Batch]:
    """Cuts a batch into micro-batches of micro_batch_size rows, the last one maybe smaller; data and metadata alike.

    Raises:
        InvalidArgumentError: micro_batch_size is less than 1, or more than the batch has rows.
    """
    rows = len(batch_meta)
    if micro_batch_size < 1:
        raise InvalidArgumentError(f"micro_batch_size must be 1 or more, and is {micro_batch_size}")
    if micro_batch_size > rows:
        raise InvalidArgumentError(
            f"micro_batch_size ({micro_batch_size}) is more than the batch has rows ({rows}); "
            f"make it at most batch_size"
        )
    for start in range(0, rows, micro_batch_size):
        stop = min(start + micro_batch_size, rows)
        yield _rows(td, start, stop), batch_meta[start:stop]


def _rows(td: TensorDictBase, start: int, stop: int) -> TensorDictBase:
    """td[start:stop]. Jagged columns are cut at their offsets: torch's slicing costs more and writes to the log."""
    if stop - start == td.batch_size[0]:
        return td.copy()  # a table of its own over the same columns, as a slice is
    cut = {name: rows_of_jagged(td.get(name), start, stop) for name in td.keys() if is_plain_jagged(td.get(name))}  # noqa: SIM118
    if not cut:
        return td[start:stop]
    rest = td.exclude(*cut)[start:stop]
    out = TensorDict({}, batch_size=[stop - start])
    for name in td.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
        out.set(name, cut[name] if name in cut else rest.get(name))
    return out


class StreamingDataset(IterableDataset):  # type: ignore[type-arg]
    """Yields a rank's `(TensorDict, BatchMeta)` micro-batches as they become ready.

    config: what `init` returned (or a controller's get_config); None means the attached system; a client is used as
    it is. batch_size: rows of a batch of this rank; micro_batch_size: rows of what is yielded, at most batch_size; the
    remainder of a sealed partition may be smaller. All datasets of the same task_name, partition_id and dp_rank
    (replicas) get the same batches, where the system's sampler is rank-consistent. In a loader with workers, worker w
    of n fetches the batches w, w + n, w + 2n, ... of the rank.
    should_check_consumption_status: end once the partition is consumed, instead of streaming until it is sealed.
    fetch_batch_fn: see `default_fetch_batch_fn`. process_batch_fn(data, meta, micro_batch_size=...): gives the items
    that are yielded instead of micro-batches.

    buffer: whole batches fetched, (TensorDict, BatchMeta), which `reset` replays. batch_index: the next one to
    replay or fetch.

    Raises:
        InvalidArgumentError: micro_batch_size < 1, no data_fields, dp_rank < 0.
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
    ) -> None:
        super().__init__()
        if micro_batch_size < 1:
            raise InvalidArgumentError(f"micro_batch_size must be 1 or more, and is {micro_batch_size}")
        if batch_size < 1:
            raise InvalidArgumentError(f"batch_size must be 1 or more, and is {batch_size}")
        if not data_fields or isinstance(data_fields, str):
            raise InvalidArgumentError(f"data_fields must be a list of at least one field name, not {data_fields!r}")
        if dp_rank < 0:
            raise InvalidArgumentError(f"dp_rank must be greater than or equal to 0, and is {dp_rank}")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = list(data_fields)
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn
        self.process_batch_fn = process_batch_fn
        self.buffer: list[Batch] = []
        self.batch_index = 0
        self._orders: Orders | None = None
        self._obeyed = Order()
        self._refused: int | None = None  # version of the partition of which a custom fetch took nothing

    def __iter__(self) -> Iterator[Any]:
        if self.process_batch_fn is None and self.fetch_batch_fn is None and self.micro_batch_size > self.batch_size:
            raise InvalidArgumentError(
                f"micro_batch_size ({self.micro_batch_size}) is more than batch_size ({self.batch_size})"
            )
        client = self.config if isinstance(self.config, Surface) else client_of(self.config)
        while True:
            self._obey()
            if self.batch_index < len(self.buffer):
                data, meta = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self._cut(data, meta)
                continue
            batch, ended = self._next_batch(client)
            if batch is not None:
                self.buffer.append(batch)
            elif ended or _is_orphan():
                return

    def reset(self) -> None:
        """The next iteration replays what was fetched, then goes on fetching."""
        if self._orders is not None:
            self._obeyed = self._orders.reset()
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Moves on to another partition; what was fetched is forgotten."""
        if self._orders is not None:
            self._obeyed = self._orders.step(partition_id)
        self._move_to(partition_id)

    def share(self) -> None:
        """Makes `reset` and `step` reach the copies of this dataset in processes that torch starts from now on."""
        if self._orders is None:
            self._orders = Orders()

    def _move_to(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self.buffer = []
        self.batch_index = 0

    def _obey(self) -> None:
        """Does in a worker what was ordered in the loader's process."""
        order = self._orders.read() if self._orders is not None else None
        if order is None or order == self._obeyed:
            return
        if order.steps != self._obeyed.steps:
            self._move_to(order.partition_id)
        else:
            self.batch_index = 0
        self._obeyed = order

    def _cut(self, data: TensorDictBase, meta: BatchMeta) -> Iterable[Any]:
        if self.process_batch_fn is not None:
            return self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
        size = self.micro_batch_size
        if size <= self.batch_size:
            size = min(size, len(meta))  # the remainder after a seal
        return chunk_batch_fn(data, meta, micro_batch_size=size)

    def _number(self) -> int:
        """The batch_index of this rank's batch that is fetched next."""
        worker = get_worker_info()
        return self.batch_index if worker is None else self.batch_index * worker.num_workers + worker.id

    def _next_batch(self, client: Surface) -> tuple[Batch | None, bool]:
        """(this rank's next batch, False), or (None, whether none will come) after a wait of the interval at most."""
        interval = max(empty_batch_sleep_interval(), LEAST_WAIT)
        if self.fetch_batch_fn is None:
            meta, ended = client.await_batch(*self._wanted(), self.should_check_consumption_status, timeout=interval)
            return (None, ended) if not len(meta) else ((client.get_data(meta), meta), False)
        data, meta = self._fetch(client)
        if data is not None and len(meta):
            self._refused = None
            return (data, meta), False
        # what is ready may be no batch for this function, or for a user's sampler: it is asked again once more at
        # once, for rows may have come meanwhile, and from then on when something has changed
        found = client.await_ready(
            *self._wanted(), self.should_check_consumption_status, self._refused, timeout=interval
        )
        self._refused = found.version
        return None, found.ended

    def _fetch(self, client: Surface) -> tuple[TensorDictBase | None, BatchMeta]:
        values = (
            client, list(self.data_fields), self.batch_size, self.partition_id, self.task_name,
            {"dp_rank": self.dp_rank, "task_name": self.task_name}, self._number(),
        )  # fmt: skip
        assert self.fetch_batch_fn is not None
        try:
            if _takes_names(self.fetch_batch_fn):
                return self.fetch_batch_fn(**dict(zip(_FETCH_ARGUMENTS, values)))
            return self.fetch_batch_fn(*values)
        except WaitTimeoutError:  # a fetch that does not poll ended its wait; nothing came
            return None, BatchMeta()

    def _wanted(self) -> tuple[list[str], int, str, str, dict[str, Any]]:
        sampling = {
            "dp_rank": self.dp_rank, "task_name": self.task_name, "batch_index": self._number(),
            "partition_id": self.partition_id,
        }  # fmt: skip
        return self.data_fields, self.batch_size, self.partition_id, self.task_name, sampling


def _is_orphan() -> bool:
    """Whether this is a worker whose loader's process was killed."""
    parent = multiprocessing.parent_process()
    return get_worker_info() is not None and parent is not None and not parent.is_alive()


def _takes_names(function: FetchBatch) -> bool:
    """Whether a fetch function takes its arguments under their own names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return any(p.kind is p.VAR_KEYWORD for p in parameters) or named >= set(_FETCH_ARGUMENTS)
