"""The open batch of a loader, as its state names it, and how exactly these rows are read again without a claim.

A state names the rows of the open batch, those that were not yielded yet, and the leases that it must acknowledge. A
batch that is dealt under the same number later has nothing to do with it, unless the sampler keeps batches by number.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.client.claims import KnownRows
from transfer_queue.dataloader.batch_fetcher import Batch, Claimed, Consumer, claiming, number_in_rank
from transfer_queue.dataloader.client_operations import ask
from transfer_queue.dataloader.lease_delivery import BACK_SECONDS, adopt_lease
from transfer_queue.display import listed
from transfer_queue.errors import (
    BatchGoneError,
    InvalidArgumentError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownPartitionError,
)
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import Operation
from transfer_queue.utils.logging_utils import get_logger

STATE_VERSION = 2

Rows = list[int]


def check_state(state: Mapping[str, Any], here: Mapping[str, Any], cut: list[Any]) -> None:
    """Raise InvalidArgumentError unless a state can be loaded by a dataset.

    Args:
        state: The state.
        here: The entries in which both must be equal.
        cut: How the dataset cuts batches, which must be equal if the state is in the middle of one.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"the state must be what state_dict() returned, got a {type(state).__name__}")
    if state.get("version") not in (1, STATE_VERSION):
        here = {"version": STATE_VERSION, **here}
    if state.get("items_given"):
        here = {**here, "cut": cut}
    for name, value in here.items():
        if name not in state or state[name] != value:
            raise InvalidArgumentError(
                f"the state was saved with {name} {state.get(name)!r}, but here it is {value!r}; "
                f"load it where both are equal"
            )


@dataclass(frozen=True)
class SavedBatch:
    """What a state knows of a batch, in plain values."""

    number: int
    """The batch_index."""
    rows: Rows = field(default_factory=list)
    """The global indexes of its samples, in order."""
    partitions: list[str] = field(default_factory=list)
    """The partition of each sample, or one name for all."""
    leases: list[tuple[str, int, float]] = field(default_factory=list)
    """(partition, token, seconds) of the leases that must be acknowledged."""
    holder: str | None = None
    """The client that refers to the samples until they are finished (`create_partition(free_when=...)`)."""
    epoch: int | None = None
    """The epoch in which the leases were granted. Tokens of another epoch are those of other leases."""
    digest: int | None = None
    """The checksum of the rows in a state of an earlier release, which has no rows; otherwise None."""

    @classmethod
    def of(cls, number: int, meta: BatchMeta) -> SavedBatch:
        """Return what a state must know of this batch."""
        name = meta._partition()
        leases = [(lease.partition, lease.token, lease.seconds) for lease in meta._leases]
        partitions = meta.partition_ids if name is None else [name]
        return cls(number, meta.global_indexes, partitions, leases, meta._holder, meta._epoch)

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | list[Any]) -> SavedBatch:
        """Return the batch that an entry of a state describes. It is a list in a state of version 1."""
        if not isinstance(state, Mapping):
            return cls(state[1], partitions=[state[0]], digest=state[2])
        leases = [(str(name), int(token), float(seconds)) for name, token, seconds in state["leases"]]
        rows, names = list(map(int, state["rows"])), list(state["partitions"])
        return cls(state["number"], rows, names, leases, state["holder"], state["epoch"])

    def to_state(self) -> Any:
        """Return the entry of a state."""
        if self.digest is not None:
            return [self.partitions[0], self.number, self.digest]
        return {
            "number": self.number, "rows": self.rows, "partitions": self.partitions,
            "leases": [list(lease) for lease in self.leases], "holder": self.holder, "epoch": self.epoch,
        }  # fmt: skip

    @property
    def _partition_ids(self) -> list[str]:
        """The partition of each sample."""
        return self.partitions * len(self.rows) if len(self.partitions) == 1 else self.partitions

    def rows_by_partition(self, rows: Iterable[int] | None = None) -> dict[str, np.ndarray]:
        """Return the rows of each partition, in order; of these rows only, if they are given."""
        selected = set(self.rows if rows is None else rows)
        rows_of: dict[str, Rows] = {}
        for row, name in zip(self.rows, self._partition_ids, strict=True):
            if row in selected:
                rows_of.setdefault(name, []).append(row)
        return {name: np.array(partition_rows, "<i8") for name, partition_rows in rows_of.items()}

    def has_rows_of(self, meta: BatchMeta) -> bool:
        """Return whether a batch has exactly these rows, in this order."""
        if self.digest is not None:
            return zlib.crc32(meta._rows().tobytes()) == self.digest
        return meta.global_indexes == self.rows

    def bare_meta(self) -> BatchMeta:
        """Return metadata of the rows without fields, to finish or acknowledge them."""
        meta = BatchMeta(self.rows, self._partition_ids)
        meta._holder = self.holder
        return meta


class OpenBatch:
    """Returns the items of a batch after the first `given`. It reads one item ahead to know which item is the last.

    Args:
        meta: The metadata of the batch.
        items: Its items.
        worker: See `ResumedBatch.worker`.
        given: The number of items that were yielded before. Default: 0.
        finish: A function that is applied to each item. Default: none.
        rows: The rows of each item; fewer if they are not known. Default: those of the items that are pairs of values
            and metadata.
    """

    def __init__(
        self,
        meta: BatchMeta,
        items: Iterable[Any],
        worker: list[int] | None,
        given: int = 0,
        *,
        finish: Callable[[Any], Any] | None = None,
        rows: list[np.ndarray] | None = None,
    ) -> None:
        self.given = given
        """The number of items that were yielded."""
        self.over = False
        """Whether there is no further item."""
        self.meta = meta
        """The metadata of the batch."""
        self._worker = worker
        self._rows: list[np.ndarray | None] = [] if rows is None else [*rows]
        watched = items if rows is not None else self._watch(items)
        # not `map`, which ends without an error if the function raises StopIteration
        finished = watched if finish is None else (finish(item) for item in watched)
        self._items = itertools.islice(finished, given, None)
        self._following: Any = None
        self._error: Exception | None = None
        self._look()

    def take(self) -> Any:
        """Return the next item. An error in making it is raised here, not when the previous item is returned."""
        if self._error is not None:
            raise self._error
        item = self._following
        self.given += 1
        self._look()
        return item

    def _look(self) -> None:
        try:
            self._following = next(self._items)
        except StopIteration:
            self._following, self.over = None, True
        except Exception as error:
            self._following, self._error = None, error

    def _watch(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and note their rows."""
        for item in items:
            meta = item[1] if isinstance(item, tuple) and len(item) == 2 else None
            self._rows.append(meta._rows() if isinstance(meta, BatchMeta) else None)
            yield item

    def interrupted(self, number: int) -> ResumedBatch:
        """Return what is left of the batch, which has this number."""
        saved = SavedBatch.of(number, self.meta)
        return ResumedBatch(saved, self.given, self._left(saved.rows), worker=self._worker)

    def _left(self, rows: Rows) -> Rows | None:
        """Return those of the rows of the batch that were not yielded; None if this is not known."""
        yielded: set[int] = set()
        for item in self._rows[: self.given]:
            if item is None:
                return None
            yielded.update(item.tolist())
        if self.given > len(self._rows) or not yielded <= set(rows):
            return None
        return [row for row in rows if row not in yielded]


class Reread(NamedTuple):
    """A batch that was read again."""

    batch: Batch | None
    """Its values and metadata; None if no sample is left to be yielded."""
    skip: int = 0
    """The number of its items that were yielded before."""
    held: BatchMeta | None = None
    """The metadata of the samples that must be finished or acknowledged after it."""
    is_whole: bool = True
    """Whether it has all samples of the batch, so that it may be replayed."""


@dataclass(frozen=True)
class ResumedBatch:
    """A batch in the middle of which the iteration continues."""

    saved: SavedBatch
    """The batch; without rows if the state is of an earlier release."""
    given: int
    """The number of items that were yielded."""
    left: Rows | None = None
    """The rows that were not yielded; None if this is not known."""
    held: BatchMeta | None = None
    """The metadata of the batch that this process must finish or acknowledge, if it has it already."""
    worker: list[int] | None = None
    """[number, count] of the worker of a plain DataLoader whose position this is."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ResumedBatch | None:
        """Return the batch in the middle of which a state was saved; None if it was saved between batches."""
        number, given = state["batch_index"], state.get("items_given") or 0
        if "rows" in state:
            saved = SavedBatch.from_state({"number": number, **state})
            return cls(saved, given, state.get("rows_left"), worker=state["worker"])
        return cls(SavedBatch(number), given, worker=state["worker"]) if given else None

    def to_state(self) -> dict[str, Any]:
        """Return the entries of a state."""
        if not self.saved.rows:
            return {}
        left = {} if self.left is None else {"rows_left": self.left}
        return {**self.saved.to_state(), **left}

    def read(self, dataset: Consumer) -> Operation[Reread]:
        """Read the batch again.

        Raises:
            BatchGoneError: The state is of an earlier release, which saved no rows, and the sampler does not keep the
                batch.
            UnknownPartitionError: The partition does not exist.
        """
        if not self.saved.rows:
            return (yield from self._claim_again(dataset))
        while True:
            existing = yield from self._existing(dataset)
            try:
                return (yield from self._read_existing(dataset, existing))
            except StorageKeyNotFoundError:
                now = yield from self._existing(dataset)
                if now.global_indexes == existing.global_indexes:
                    raise  # values are missing although their samples exist

    def _claim_again(self, dataset: Consumer) -> Operation[Reread]:
        try:
            claimed = yield from _claim_again(dataset, dataset.partition_id, self.saved.number)
        except BatchGoneError as error:
            raise BatchGoneError(
                f"the state was saved in the middle of batch {self.saved.number} by a release whose states have no "
                f"rows, and this batch cannot be returned again: {error}"
            ) from None
        if claimed is None:
            raise BatchGoneError(f"batch {self.saved.number}, in the middle of which the state was saved, is gone")
        batch = yield from dataset.fetcher().complete(*claimed)
        return Reread(batch, self.given, batch[1] if batch[1]._leases or batch[1]._holder else None)

    def _existing(self, dataset: Consumer) -> Operation[BatchMeta]:
        """Return the metadata of the rows that exist and that the task does not skip, in order."""
        metas = []
        for name, rows in self.saved.rows_by_partition().items():
            try:
                operations = dataset.client()._operations
                metas.append((yield from operations._meta_of_rows(name, dataset.data_fields, dataset.task_name, rows)))
            except UnknownPartitionError as error:
                raise UnknownPartitionError(
                    f"the position is in the middle of batch {self.saved.number}, and its samples are lost with their "
                    f"partition: {error}. To continue with another partition, call step"
                ) from None
        metas = [meta for meta in metas if len(meta)]
        if len(metas) <= 1:
            return metas[0] if metas else BatchMeta()
        joined = BatchMeta.concat(metas, validate=False)
        place = {row: at for at, row in enumerate(joined.global_indexes)}
        return joined.select_samples([place[row] for row in self.saved.rows if row in place])

    def _read_existing(self, dataset: Consumer, existing: BatchMeta) -> Operation[Reread]:
        missing = sorted(set(self.saved.rows) - set(existing.global_indexes))
        if missing:
            self._warn_of_missing(missing)
        if not len(existing):
            return Reread(None)
        held = self.held
        if held is None:
            existing._leases = yield from regain_leases(dataset, self.saved, existing._epoch)
            existing._holder = self.saved.holder
            held = existing if existing._leases or existing._holder else None
            adopt_lease(dataset.client(), existing)
        if not missing or self.left is None:
            return Reread((yield from self._values(dataset, existing)), self.given, held, not missing)
        left = set(self.left)
        rest = existing.select_samples([at for at, row in enumerate(existing.global_indexes) if row in left])
        if not len(rest):
            return Reread(None, 0, held)
        return Reread((yield from self._values(dataset, rest)), 0, held, is_whole=False)

    def _warn_of_missing(self, missing: Rows) -> None:
        if self.left is None:
            effect = (
                f"; the others are cut into items again, and the first {self.given} items are skipped, which may not "
                f"be those that were yielded before"
            )
        else:
            effect = f"; {len(set(missing) & set(self.left))} of them had not been yielded yet"
        get_logger(__name__).warning(
            "the position is in the middle of batch %d of %s, whose samples %s were cleared or are skipped%s",
            self.saved.number, listed(sorted(set(self.saved.partitions))), missing, effect,
        )  # fmt: skip

    def _values(self, dataset: Consumer, meta: BatchMeta) -> Operation[Batch]:
        """Read the values of these rows, with the user's fetch function if there is one."""
        fetcher = dataset.fetcher()
        if dataset.fetch_batch_fn is None:
            return (yield from fetcher.complete(None, meta))
        known = KnownRows(self.saved.rows_by_partition(meta.global_indexes))
        view = claiming(dataset.client(), known=known)
        data, fetched = yield from fetcher.call(view, dataset.partition_id, number_in_rank(self.saved.number))
        if data is not None and fetched.global_indexes == meta.global_indexes:
            fetched._leases, fetched._holder = meta._leases, meta._holder
            return data, fetched
        get_logger(__name__).warning(
            "fetch_batch_fn returned the samples %s instead of %s when batch %d was read again, so their values are "
            "read with get_data; fetch with the client that the function is given", fetched.global_indexes,
            meta.global_indexes, self.saved.number,
        )  # fmt: skip
        return (yield from fetcher.complete(None, meta))


def regain_leases(dataset: Consumer, saved: SavedBatch, epoch: int | None) -> Operation[tuple[BatchLease, ...]]:
    """Return the leases with which the rows of a saved batch can be acknowledged; none if they will be delivered again.

    A batch that the sampler keeps is claimed again under its number, and used only if it has exactly these rows, and
    perhaps others that do not exist any more. Otherwise the saved leases are renewed.

    Args:
        dataset: The dataset that continues.
        saved: The batch.
        epoch: The present epoch; None if it is not known.
    """
    if not saved.leases and saved.digest is None:
        return ()
    try:
        claimed = yield from _claim_again(dataset, saved.partitions[0], saved.number)
    except (BatchGoneError, UnknownPartitionError):
        claimed = None  # the sampler keeps no batches, or not this one
    meta = None if claimed is None else claimed[1]
    if meta is not None and (yield from _is_saved(dataset, saved, meta)):
        return meta._leases
    if meta is not None:
        get_logger(__name__).warning(
            "batch %d of %s has other samples than the loaded state says, so it is not acknowledged",
            saved.number, listed(saved.partitions),
        )  # fmt: skip
        if meta._leases:
            with contextlib.suppress(TransferQueueError):
                yield from ask(dataset.client(), "nack", meta, delivered=False, timeout=BACK_SECONDS)
        return ()
    if not saved.leases or epoch != saved.epoch:
        return ()
    rows = saved.rows_by_partition()
    leases = [BatchLease(name, token, seconds, rows[name], None) for name, token, seconds in saved.leases]
    return tuple((yield from dataset.client()._operations._renewed(leases)))


def _is_saved(dataset: Consumer, saved: SavedBatch, meta: BatchMeta) -> Operation[bool]:
    """Return whether a claimed batch is the saved one, which does not have rows that were cleared before."""
    if saved.has_rows_of(meta):
        return True
    further = set(meta.global_indexes).difference(saved.rows)
    if saved.digest is not None or further.union(saved.rows) != set(meta.global_indexes):
        return False
    name, rows = saved.partitions[0], np.array(sorted(further), "<i8")
    return not len((yield from dataset.client()._operations._meta_of_rows(name, [], dataset.task_name, rows)))


def _claim_again(dataset: Consumer, partition_id: str, number: int) -> Operation[Claimed | None]:
    """Claim a batch again under its number; None if it does not come."""
    claimed = yield from dataset.fetcher().claim(partition_id, number_in_rank(number), again=True)
    return claimed if claimed is not None and len(claimed[1]) else None


def settle(dataset: Consumer, saved: SavedBatch) -> Operation[None]:
    """Acknowledge or finish a batch that a process had finished when its state was saved."""
    client, meta = dataset.client(), saved.bare_meta()
    if saved.leases or saved.digest is not None:
        name, rows = saved.partitions[0], np.array(saved.rows, "<i8")
        try:
            epoch = (yield from client._operations._meta_of_rows(name, [], dataset.task_name, rows))._epoch
        except UnknownPartitionError:
            return
        meta._leases = yield from regain_leases(dataset, saved, epoch)
    if meta._leases:
        for lease in meta._leases:
            acked = BatchMeta(lease.rows, lease.partition)
            acked._leases = (lease,)
            yield from ask(client, "ack", acked)
    elif saved.holder is not None:
        yield from ask(client, "finish", meta, dataset.task_name)
