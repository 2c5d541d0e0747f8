"""Fetches the batches of a rank: by default with a claim that waits in the controller, or with a user's function."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, Union

import torch
from tensordict import TensorDictBase
from torch.utils.data import get_worker_info

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.claims import KnownRows
from transfer_queue.client.conversion.arguments import validated_seconds
from transfer_queue.client.operations.long_waits import LongWait, report
from transfer_queue.dataloader.client_operations import ask, call_function, operations_of
from transfer_queue.dataloader.lease_delivery import give_back, hand_over
from transfer_queue.dataloader.worker_channel import WorkerChannelEnd
from transfer_queue.errors import InvalidArgumentError, TransferQueueError, WaitTimeoutError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease, merge_leases
from transfer_queue.net.calls import Operation

Batch = tuple[TensorDictBase, BatchMeta]
Claimed = tuple[Union[TensorDictBase, None], BatchMeta]
"""A claimed batch: its values, None if they must still be read; and its metadata, which is empty if none was ready."""
FetchBatch = Callable[..., tuple[TensorDictBase | None, BatchMeta]]

EXPLAIN_SECONDS = 5.0  # in which the controller must say why a batch does not come
AHEAD_WAIT = 0.2  # seconds after which a worker checks whether the loader now needs the batch that it fetches ahead

_FETCH_ARGUMENTS = (
    "tq_client", "data_fields", "batch_size", "partition_id", "task_name", "sampling_config", "batch_index",
)  # fmt: skip


def default_fetch_batch_fn(
    tq_client: GeneratedMethods,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDictBase | None, BatchMeta]:
    """Fetch one batch of a rank, as a custom `fetch_batch_fn` may do.

    Args:
        tq_client: The client.
        data_fields: The fields to fetch.
        batch_size: The number of samples in the batch.
        partition_id: The partition.
        task_name: The task that consumes the samples.
        sampling_config: {"dp_rank", "task_name"}, and "dp_size" if the dataset was made with one. It is not changed;
            `batch_index` and `partition_id` are added to a copy.
        batch_index: The number of the batch.

    Returns:
        (values, metadata); (None, empty metadata) if nothing is ready and `polling_mode` is set.

    Raises:
        WaitTimeoutError: See `TransferQueueClient.get_meta`.

    Example:
        >>> from transfer_queue.dataloader.streaming_dataset import default_fetch_batch_fn
        >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> config = {"dp_rank": 0, "task_name": "update"}
        >>> data, meta = default_fetch_batch_fn(client, ["reward"], 2, "train_0", "update", config, 0)
        >>> data["reward"].tolist()
        [0.0, 1.0]
    """
    sampling = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(
        data_fields=list(data_fields), batch_size=batch_size, partition_id=partition_id, task_name=task_name,
        sampling_config=sampling,
    )  # fmt: skip
    if not len(meta):
        return None, meta
    return tq_client.get_data(meta), meta


def number_in_rank(number: int) -> int:
    """Return the number of a batch of this process in its rank: the workers of a plain DataLoader take turns."""
    worker = get_worker_info()
    return number if worker is None else number * worker.num_workers + worker.id


class Consumer(Protocol):
    """For what batches are fetched: a dataset."""

    data_fields: list[str]
    batch_size: int
    partition_id: str
    task_name: str
    should_check_consumption_status: bool
    fetch_batch_fn: FetchBatch | None
    shared: bool
    copy: bool
    device: torch.device | None
    seat: WorkerChannelEnd | None
    _lease: float | None

    @property
    def sampling_config(self) -> dict[str, Any]:
        """The entries of the sampling_config that are sent with every fetch."""

    def client(self) -> GeneratedMethods:
        """Return the client."""

    def interval(self) -> float:
        """Return the longest time in seconds that a request waits before the worker checks for new orders."""

    def fetcher(self, *, combined: bool = False) -> Fetcher:
        """Return the object that fetches its batches."""


class Fetcher:
    """Fetches the batches of a dataset through its present client.

    Args:
        dataset: The dataset.
        combined: True if one request claims a batch and reads it. False to read it later, with `complete`.
    """

    def __init__(self, dataset: Consumer, *, combined: bool) -> None:
        client = dataset.client()
        self.client = client if operations_of(client) is None else claiming(client)  # a stand-in has no leases
        self._operations = operations_of(self.client)
        form = {"shared": (dataset.shared, False), "copy": (dataset.copy, True), "device": (dataset.device, None)}
        self._form: dict[str, Any] = {name: value for name, (value, default) in form.items() if value != default}
        # a fetch ahead does not mark the previous batch as finished
        self._how: dict[str, Any] = {"hold": dataset.seat is not None or dataset.device is not None}
        if dataset._lease is not None:
            self._how["lease"] = dataset._lease
        self._combined = combined
        self._fields = list(dataset.data_fields)
        self._batch_size = dataset.batch_size
        self._task_name = dataset.task_name
        self._sampling = dataset.sampling_config
        self._finite = dataset.should_check_consumption_status
        self._function = dataset.fetch_batch_fn
        self._interval = dataset.interval
        self._long = LongWait(self.clock)
        self._refused: dict[str, int] = {}  # partition -> its version at which a custom fetch returned nothing

    def clock(self) -> float:
        """Return the time in seconds on the client's clock."""
        return time.monotonic() if self._operations is None else self._operations.attachment.session.clock()

    @property
    def _report_wait(self) -> float | None:
        """The seconds after which a long wait is reported; None for never."""
        return None if self._operations is None else self._operations.attachment.report_wait

    def claim(
        self, partition_id: str, number: int, *, ahead: int = 0, again: bool = False, within: float | None = None
    ) -> Operation[Claimed | None]:
        """Claim a batch of the rank. Logs the reason of a long wait.

        Args:
            partition_id: The partition.
            number: The batch index.
            ahead: The number of batches by which this one is ahead of the batch that the loader needs.
            again: True if the batch was dealt before, so that no other batch may take its place.
            within: The longest time in seconds that a request waits. Default: the interval.

        Returns:
            The data (None if it must still be read, with `complete`) and the metadata, which is empty if no batch was
            ready within the interval. None if neither this batch nor a later one will exist.
        """
        if again:
            return (yield from self._claim(claiming(self.client, again=True), partition_id, number, ahead, within))
        self._long.begin((partition_id, number, ahead > 0))
        claimed = yield from self._claim(self.client, partition_id, number, ahead, within)
        if claimed is not None and not len(claimed[1]) and not ahead:
            waited = self._long.seconds_to_log(self._report_wait)
            if waited is not None:
                report(__name__, waited, (yield from self.explain(partition_id, number)))
        return claimed

    def explain(self, partition_id: str, number: int) -> Operation[str]:
        """Return why a batch of the rank does not come; the last line is the verdict."""
        if self._operations is None:
            return ""
        try:
            text: str = yield from ask(
                self.client, "explain", partition_id, task=self._task_name, fields=self._fields,
                batch_size=self._batch_size, sampling_config={**self._sampling, "batch_index": number}, verdict=True,
                timeout=EXPLAIN_SECONDS,
            )  # fmt: skip
            return text
        except TransferQueueError as error:
            return f"The controller did not say why: {error}"

    def check_again(self, partition_id: str, number: int) -> Operation[None]:
        """Raise BatchGoneError if a batch cannot be returned again. Claims nothing."""
        again, request = claiming(self.client, again=True), self._request(partition_id, number)
        yield from ask(again, "await_ready", *request, timeout=0)

    def _request(self, partition_id: str, number: int) -> tuple[Any, ...]:
        """Return the arguments that describe a batch, from the fields to the sampling_config."""
        sampling = {**self._sampling, "batch_index": number, "partition_id": partition_id}
        return self._fields, self._batch_size, partition_id, self._task_name, sampling

    def _claim(
        self, client: GeneratedMethods, partition_id: str, number: int, ahead: int, within: float | None
    ) -> Operation[Claimed | None]:
        # a request waits at most for the time after which the client reports it, because `claim` reports
        seconds = min(limit for limit in (self._interval(), self._report_wait, within) if limit is not None)
        request = (*self._request(partition_id, number), self._finite)
        if self._function is None:
            data = None
            if self._combined:
                data, meta, ended = yield from ask(
                    client, "await_data", *request, **self._how, **self._form, timeout=seconds
                )
            else:
                wait = min(seconds, AHEAD_WAIT) if ahead else seconds
                meta, ended = yield from ask(client, "await_batch", *request, **self._how, ahead=ahead, timeout=wait)
            self._take_held()  # it is in the metadata
            return None if ended and not len(meta) else (data, meta)
        data, meta = yield from self.call(client, partition_id, number)
        held = self._take_held()
        if data is not None and len(meta):
            self._refused.clear()
            meta._leases = merge_leases((meta._leases, held))
            return data, meta
        hand_over(self.client, held)  # the function has seen what it claimed, and has decided to return nothing
        # ready rows may not suffice for this function, or for a user's sampler: the function is called again once at
        # once, because rows may have become ready meanwhile, and after that only if something has changed
        since = self._refused.get(partition_id)
        readiness = yield from ask(self.client, "await_ready", *request, since, timeout=seconds)
        self._refused = {partition_id: readiness.version}
        return None if readiness.ended else (None, BatchMeta())

    def complete(self, data: TensorDictBase | None, meta: BatchMeta) -> Operation[Batch]:
        """Return the batch with its data, which is read if necessary."""
        if data is None:
            data = yield from ask(self.client, "get_data", meta, **self._form)
        return data, meta

    def call(self, client: GeneratedMethods, partition_id: str, number: int) -> Operation[Claimed]:
        """Call the user's function with this client. Without a batch, the metadata of the result is empty."""
        function = self._function
        assert function is not None
        values = (
            client, list(self._fields), self._batch_size, partition_id, self._task_name,
            dict(self._sampling), number,
        )  # fmt: skip
        named = _takes_names(function)
        call = partial(function, **dict(zip(_FETCH_ARGUMENTS, values))) if named else partial(function, *values)
        try:
            return (yield from call_function(call))
        except WaitTimeoutError:  # the wait of a fetch that does not poll ended without a batch
            give_back(self.client, self._take_held())
            return None, BatchMeta()
        except BaseException:
            give_back(self.client, self._take_held())
            raise

    def _take_held(self) -> tuple[BatchLease, ...]:
        """Return the leases of what a function has claimed and not handed over."""
        if self._operations is None or self._operations.claims.held is None:
            return ()
        held, self._operations.claims.held[:] = tuple(self._operations.claims.held), []
        return held


def _takes_names(function: FetchBatch) -> bool:
    """Return whether a fetch function takes all arguments by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return any(p.kind is p.VAR_KEYWORD for p in parameters) or named >= set(_FETCH_ARGUMENTS)


class Delivery(NamedTuple):
    """What a source returns for a batch."""

    batch: Batch | None = None
    """The batch; None if nothing is ready yet, or if its data is not kept."""
    items: Sequence[Any] | None = None
    """The finished items of the batch; None if they are still to be cut."""
    ended: bool = False
    """True if there will be no further batch."""
    held: BatchMeta | None = None
    """The metadata of a batch whose samples must still be finished (`create_partition(free_when=...)`) or acknowledged.
    """
    unseen: tuple[BatchLease, ...] = ()
    """The leases of the batch that end when it is handed over."""
    meta: BatchMeta | None = None
    """The metadata of the batch, if there are finished items."""

    @property
    def is_empty(self) -> bool:
        """Whether no batch has come yet."""
        return self.batch is None and self.meta is None and not self.ended


def checked_timeout(timeout: float | None) -> float | None:
    """Return the timeout of a dataset. Raises InvalidArgumentError if it is not a positive number of seconds."""
    seconds = validated_seconds(timeout)
    if seconds is not None and seconds <= 0:
        raise InvalidArgumentError(
            f"timeout must be a positive number of seconds, or None for no limit, got {timeout!r}"
        )
    return seconds


def claiming(client: GeneratedMethods, *, again: bool = False, known: KnownRows | None = None) -> GeneratedMethods:
    """Return a view of a client whose claims hand nothing over: whoever uses it does, or returns the batches.

    The leases of what it claims are in the metadata and in `_operations.claims.held`. It has everything else of the
    client, also what a subclass has changed.

    Args:
        client: The client.
        again: True if the claims return only batches that were dealt before. Default: False.
        known: Rows that they return instead, without a claim. Default: none.
    """
    operations = client._operations._claiming(again=again, known=known)  # connects, before the client is copied
    view: Any = copy.copy(client)
    view.__class__ = _view_of(type(client))
    view._claims = operations
    return view  # type: ignore[no-any-return]


@lru_cache
def _view_of(kind: type) -> type:
    """Return the class of views of clients of this class."""
    if "_claims" in vars(kind):
        return kind  # it is the class of a view
    return type(kind.__name__, (kind,), {"_claims": None, "_operations": property(lambda self: self._claims)})
