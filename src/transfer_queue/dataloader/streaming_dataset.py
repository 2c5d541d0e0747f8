"""StreamingDataset: an iterable over a rank's batches that yields a micro-batch the moment its batch exists.

It waits at the controller, never by sleeping: a fetch that cannot be met is parked there, and the publish that
completes it answers it. TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL only bounds one such wait, so that a
dropped connection or a custom fetch function is looked after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from transfer_queue.client import TransferQueueClient
from transfer_queue.config import empty_batch_sleep_interval
from transfer_queue.current import client_of
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.metadata import BatchMeta

Batch = tuple[TensorDictBase, BatchMeta]
FetchBatch = Callable[..., tuple[TensorDictBase | None, BatchMeta]]
ProcessBatch = Callable[..., Iterable[Any]]

_FETCH_ARGUMENTS = (
    "tq_client", "data_fields", "batch_size", "partition_id", "task_name", "sampling_config", "batch_index",
)  # fmt: skip


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
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
            f"micro_batch_size ({micro_batch_size}) is more than the batch has rows ({rows}); make it at most batch_size"
        )
    for start in range(0, rows, micro_batch_size):
        stop = min(start + micro_batch_size, rows)
        yield td[start:stop], batch_meta[start:stop]


class StreamingDataset(IterableDataset):  # type: ignore[type-arg]
    """Yields a rank's `(TensorDict, BatchMeta)` micro-batches as they become ready.

    config: what `init` returned (or a controller's get_config); None means the attached system. batch_size: rows of a
    batch of this rank; micro_batch_size: rows of what is yielded. All datasets of the same task_name, partition_id
    and dp_rank (replicas) get the same batches, where the system's sampler is rank-consistent.
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

    def __iter__(self) -> Iterator[Any]:
        process = self.process_batch_fn or chunk_batch_fn
        while True:
            while self.batch_index < len(self.buffer):
                data, meta = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from process(data, meta, micro_batch_size=self.micro_batch_size)
            batch = self._next_batch()
            if batch is None:
                return
            self.buffer.append(batch)

    def reset(self) -> None:
        """The next iteration replays what was fetched, then goes on fetching."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Moves on to another partition; what was fetched is forgotten."""
        self.partition_id = partition_id
        self.buffer = []
        self.batch_index = 0

    def _next_batch(self) -> Batch | None:
        """The batch with this rank's next index, waited for; None at the end."""
        client = client_of(self.config)
        while True:
            interval = max(empty_batch_sleep_interval(), LEAST_WAIT)
            if self.fetch_batch_fn is None:
                meta, ended = self._await(client, interval, take=True)
                if len(meta):
                    return client.get_data(meta), meta
            else:
                data, meta = self._fetch(client)
                if data is not None and len(meta):
                    return data, meta
                _, ended = self._await(client, interval, take=False)
            if ended:
                return None

    def _fetch(self, client: TransferQueueClient) -> tuple[TensorDictBase | None, BatchMeta]:
        values = (
            client, list(self.data_fields), self.batch_size, self.partition_id, self.task_name,
            {"dp_rank": self.dp_rank, "task_name": self.task_name}, self.batch_index,
        )  # fmt: skip
        assert self.fetch_batch_fn is not None
        try:
            if _takes_names(self.fetch_batch_fn):
                return self.fetch_batch_fn(**dict(zip(_FETCH_ARGUMENTS, values)))
            return self.fetch_batch_fn(*values)
        except WaitTimeoutError:  # a fetch that does not poll ended its wait; nothing came
            return None, BatchMeta()

    def _await(self, client: TransferQueueClient, seconds: float, take: bool) -> tuple[BatchMeta, bool]:
        sampling = {
            "dp_rank": self.dp_rank, "task_name": self.task_name, "batch_index": self.batch_index,
            "partition_id": self.partition_id,
        }  # fmt: skip
        return client.await_batch(
            self.data_fields, self.batch_size, self.partition_id, self.task_name, sampling,
            finite=self.should_check_consumption_status, take=take, timeout=seconds,
        )  # fmt: skip


LEAST_WAIT = 0.05  # seconds: an interval of 0 must not make a loader ask without a pause


def _takes_names(function: FetchBatch) -> bool:
    """Whether a fetch function takes its arguments under their own names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return any(p.kind is p.VAR_KEYWORD for p in parameters) or named >= set(_FETCH_ARGUMENTS)
