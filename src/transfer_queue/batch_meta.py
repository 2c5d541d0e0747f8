"""BatchMeta: which samples a batch holds and what is known of their fields, without the values.

Everything is held in columns; a cut costs what the rows kept cost. This module knows nothing of
clients, storage or the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from transfer_queue.batch_columns import (
    IntArray,
    PartitionColumn,
    Positions,
    Selection,
    TagColumn,
    checked_order,
    checked_positions,
    chunk_bounds,
    packed,
    unpacked,
    whole_numbers,
)
from transfer_queue.batch_leases import BatchLease, joined
from transfer_queue.batch_samples import Sample, Samples
from transfer_queue.errors import InvalidArgumentError, OutOfRangeError, StorageKeyNotFoundError
from transfer_queue.field_columns import FieldColumn, columns_of
from transfer_queue.tag_values import copied, united


class BatchMeta:
    """The metadata of a batch of samples.

    Positions count the rows of this batch from 0; `meta[i]` alone takes negative ones too. A cut (`meta[i]`,
    `meta[a:b]`, `select_samples`, `chunk`, ...) is a batch of its own; the values in its extra_info are
    those of the whole.

    Args:
        global_indexes: of the samples, in the order of the batch; repeats are allowed.
        partition_ids: the partition of each sample (one str: of all).
        field_schema: what is known of each field: `{"dtype", "shape", "is_nested", "is_non_tensor"[,
            "per_sample_shapes"]}`, see `field_schema`. Other keys are carried along.
        production_status: 1 for each sample that is produced; by default none is.
        extra_info: anything about the batch as a whole.
        custom_meta: the tag of each sample, copied in.
        _custom_backend_meta: taken for the sake of older callers; nothing here needs it.

    Raises:
        InvalidArgumentError: lengths that do not match the number of global_indexes.
    """

    def __init__(
        self,
        global_indexes: Iterable[int] | Positions = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Sequence[int] | npt.NDArray[Any] | torch.Tensor | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Any = None,
    ) -> None:
        rows = whole_numbers(global_indexes, "global_indexes")
        size = int(rows.size)
        if isinstance(partition_ids, str):
            partition_ids = [partition_ids] * size
        if len(partition_ids) != size:
            raise InvalidArgumentError(
                f"partition_ids must have one entry a sample: wanted {size}, got {len(partition_ids)}"
            )
        status = np.zeros(size, dtype=np.int8)
        if production_status is not None:
            status = _checked_status(production_status, size)
        fields = {
            name: FieldColumn.from_schema(name, entry, size) for name, entry in sorted((field_schema or {}).items())
        }
        tags = TagColumn(size) if custom_meta is None else TagColumn.of(custom_meta, size)
        self._assign(rows, PartitionColumn.of(partition_ids), fields, status, tags, dict(extra_info or {}))

    def _assign(
        self,
        rows: IntArray,
        partitions: PartitionColumn,
        fields: dict[str, FieldColumn],
        status: npt.NDArray[np.int8],
        tags: TagColumn,
        extra_info: dict[str, Any],
    ) -> None:
        self._indexes = rows  # int64 [size]; never written, so that copies share it
        self._partitions = partitions
        self._fields = fields  # by name, in order of name
        self._status = status  # int8 [size]; writable, and of this batch alone
        self._tags = tags
        self._extra_info = extra_info
        self._holder: str | None = None  # the client that holds these rows, until it finishes them
        self._epoch: int | None = None  # of the system's, in which these rows were learnt; None: of any
        self._leases: tuple[BatchLease, ...] = ()  # under which they were given, some of which may be over
        # Python forms of the columns above, made when asked for; they never travel
        self._index_list: list[int] | None = None
        self._size_lists: dict[str, list[torch.Size | None]] = {}

    @classmethod
    def _made(
        cls,
        rows: IntArray,
        partitions: PartitionColumn,
        fields: dict[str, FieldColumn],
        status: npt.NDArray[np.int8],
        tags: TagColumn,
        extra_info: dict[str, Any],
    ) -> BatchMeta:
        batch = cls.__new__(cls)
        batch._assign(rows, partitions, fields, status, tags, extra_info)
        return batch

    @classmethod
    def _from_columns(
        cls,
        rows: IntArray,
        partition_id: str,
        fields: Sequence[FieldColumn],
        produced: npt.NDArray[np.int8] | None = None,
        tags: list[dict[str, Any]] | None = None,
        extra_info: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """A batch out of columns as they came from the system; nothing is checked.

        Takes `rows`, `tags` (None: all empty) and `extra_info` as its own; they must not be changed after.
        produced: None where every row is. The tags are the baseline of `_changed_tags`.
        """
        status = np.ones(rows.size, dtype=np.int8) if produced is None else np.array(produced, dtype=np.int8)
        by_name = {field.name: field for field in sorted(fields, key=lambda field: field.name)}
        tag_column = TagColumn(int(rows.size), tags if tags and any(tags) else None)
        partitions = PartitionColumn([partition_id])
        return cls._made(rows, partitions, by_name, status, tag_column, {} if extra_info is None else extra_info)

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """A batch of no samples."""
        return cls(extra_info=extra_info)

    # ------------------------------------------------------------ reading

    @property
    def size(self) -> int:
        """The number of samples."""
        return int(self._indexes.size)

    def __len__(self) -> int:
        return int(self._indexes.size)

    @property
    def global_indexes(self) -> list[int]:
        """The global index of each sample; a list of the caller's own."""
        if self._index_list is None:
            self._index_list = self._indexes.tolist()
        return self._index_list.copy()

    @property
    def partition_ids(self) -> list[str]:
        """The partition of each sample; a list of the caller's own."""
        return self._partitions.to_list(self.size)

    @property
    def field_names(self) -> list[str]:
        """The names of the fields, sorted."""
        return list(self._fields)

    @property
    def field_schema(self) -> dict[str, dict[str, Any]]:
        """What is known of each field, as dicts of the caller's own.

        "dtype": torch dtype, None for objects; if rows differ in dtype (`get_dtypes`), the result of
        `torch.promote_types`. "shape": torch.Size of one row; None if rows differ in shape, for
        objects, and if it is not known. "is_nested": False while the rows of the field agree, True once they
        differ; then "per_sample_shapes" has one torch.Size a row. A cut of a nested field is nested, whatever
        its own rows are. "is_non_tensor": the values are Python objects.
        """
        schema = {}
        for name, field in self._fields.items():
            entry = field.row_schema(None if field.shape is None else torch.Size(field.shape))
            if field.shapes is not None:
                entry["per_sample_shapes"] = self.get_shapes(name)
            schema[name] = entry
        return schema

    @property
    def production_status(self) -> npt.NDArray[np.int8]:
        """1 for each sample that is produced, int8 [size]; writes to it count."""
        return self._status

    @production_status.setter
    def production_status(self, status: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> None:
        self._status = _checked_status(status, self.size)

    @property
    def is_ready(self) -> bool:
        """Whether there is at least one sample and every sample is produced."""
        return len(self._status) > 0 and bool((self._status == 1).all())

    @property
    def samples(self) -> Sequence[Sample]:
        """A read-only view of each sample."""
        return Samples(self)

    def get_dtypes(self, field_name: str) -> list[torch.dtype | None]:
        """The dtype of a field in each row, None for objects.

        Raises:
            StorageKeyNotFoundError: the batch has no such field (a KeyError).
        """
        return self._field(field_name).to_dtypes(self.size)

    def get_shapes(self, field_name: str) -> list[torch.Size | None]:
        """The shape of a field in each row, None for objects and where not known.

        Raises:
            StorageKeyNotFoundError: the batch has no such field (a KeyError).
        """
        sizes = self._size_lists.get(field_name)
        if sizes is None:
            sizes = self._size_lists[field_name] = self._field(field_name).to_sizes(self.size)
        return sizes.copy()

    def _field(self, name: str) -> FieldColumn:
        if name not in self._fields:
            raise StorageKeyNotFoundError(f"no field {name!r} in this batch; it has {self.field_names}")
        return self._fields[name]

    def __repr__(self) -> str:
        names = self._partitions.names if self.size else []
        return (
            f"BatchMeta(size={self.size}, partitions={names}, fields={self.field_names}, "
            f"produced={int((self._status == 1).sum())})"
        )

    # ------------------------------------------------------------ cutting

    @overload
    def __getitem__(self, item: int) -> BatchMeta: ...
    @overload
    def __getitem__(self, item: slice) -> BatchMeta: ...
    def __getitem__(self, item: int | slice) -> BatchMeta:
        """`meta[i]`: a batch of one sample, from the end for negative i; `meta[a:b]`: those samples.

        Raises:
            OutOfRangeError: no such position (an IndexError).
        """
        if isinstance(item, slice):
            return self._take(item)
        position = self._position(item)
        return self._take(slice(position, position + 1))

    def _position(self, item: int) -> int:
        position = index(item)
        if not -self.size <= position < self.size:
            raise OutOfRangeError(f"position {position} is out of range: the batch has {self.size} samples")
        return position % self.size

    def __iter__(self) -> Iterator[BatchMeta]:
        return (self[position] for position in range(self.size))

    def select_samples(self, sample_indices: Iterable[int] | Positions) -> BatchMeta:
        """The samples at these positions, in this order; repeats are repeated.

        Raises:
            OutOfRangeError: a position outside the batch, or a negative one (a ValueError).
        """
        return self._take(checked_positions(sample_indices, self.size))

    def select_fields(self, field_names: Sequence[str] | str) -> BatchMeta:
        """The same samples with these fields alone; unknown names are left out."""
        wanted = {field_names} if isinstance(field_names, str) else set(field_names)
        return self._take(slice(None), {name: field for name, field in self._fields.items() if name in wanted})

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """`chunks` batches, in order; sizes differ by at most one, the longer first; empty ones where chunks > size.

        Raises:
            InvalidArgumentError: fewer than one chunk.
        """
        return [self._take(bounds) for bounds in chunk_bounds(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One batch a partition, in the order in which partitions first appear; the order of samples is kept."""
        return [self._take(positions) for _, positions in self._split_by_partition()]

    def copy(self) -> BatchMeta:
        """The same content, changed apart; the values in extra_info are copied too."""
        twin = self._take(slice(None), self._fields)
        twin._extra_info = copied(self._extra_info)
        return twin

    __copy__ = copy

    def _take(self, selection: Selection, fields: dict[str, FieldColumn] | None = None) -> BatchMeta:
        """The selected samples; with these fields, which fit them, or else with those of the batch."""
        cut = type(self)._made(
            # copies, for views of slices would keep the whole alive
            self._indexes[selection].copy() if isinstance(selection, slice) else self._indexes[selection],
            self._partitions.take(selection),
            {name: field.take(selection) for name, field in self._fields.items()} if fields is None else dict(fields),
            self._status[selection].copy() if isinstance(selection, slice) else self._status[selection],
            self._tags.take(selection),
            self._extra_info.copy(),
        )
        cut._holder = self._holder
        cut._epoch = self._epoch
        cut._leases = self._leases if cut.size else ()
        return cut

    # ------------------------------------------------------------ joining

    def union(self, other: BatchMeta) -> BatchMeta:
        """The fields, tags and extra_info of both; the other's win. A sample is ready where both sides are.

        With an empty batch: a copy of the other one.

        Raises:
            InvalidArgumentError: the two hold other samples, or in another order.
        """
        if not self.size or not other.size:
            return self.copy() if self.size else other.copy()
        if not np.array_equal(self._indexes, other._indexes):
            raise InvalidArgumentError(
                f"global_indexes do not match: {_shown(self.global_indexes)} and {_shown(other.global_indexes)}; "
                "a union needs the same samples in the same order"
            )
        if self.partition_ids != other.partition_ids:
            raise InvalidArgumentError(
                f"partition_ids do not match: {self._partitions.names} and {other._partitions.names}"
            )
        fields = {**self._fields, **other._fields}
        both = type(self)._made(
            self._indexes,
            self._partitions,
            {name: fields[name] for name in sorted(fields)},
            ((self._status == 1) & (other._status == 1)).astype(np.int8),
            self._tags.merged(other._tags),
            {**self._extra_info, **other._extra_info},
        )
        both._epoch = _oldest([self, other])
        both._leases = joined((self._leases, other._leases))
        return both

    @classmethod
    def concat(cls, data: Iterable[BatchMeta], validate: bool = True) -> BatchMeta:
        """The samples of the batches one after the other; batches without samples are skipped.

        Args:
            data: the batches; with the same fields, of the same dtypes.
            validate: False joins without comparing: the fields are those that all batches have, the first
                one's dtypes count, and the last one's extra_info.

        Raises:
            InvalidArgumentError: fields or dtypes differ, or extra_info has conflicting values.
        """
        batches = list(data)
        parts = [batch for batch in batches if batch.size]
        if len(parts) < 2:
            whole = (parts or batches or [cls.empty()])[0]
            return whole.copy()
        sizes = [part.size for part in parts]
        shared = set(parts[0]._fields).intersection(*(part._fields for part in parts[1:]))
        for part in parts if validate else ():
            if len(part._fields) != len(shared):
                raise InvalidArgumentError(
                    f"Field names do not match: {parts[0].field_names} and "
                    f"{next(other.field_names for other in parts if other.field_names != parts[0].field_names)}"
                )
        whole = cls._made(
            np.concatenate([part._indexes for part in parts]),
            PartitionColumn.joined([part._partitions for part in parts], sizes),
            {
                name: FieldColumn.joined([part._fields[name] for part in parts], sizes, validate)
                for name in sorted(shared)
            },
            np.concatenate([part._status for part in parts]),
            TagColumn.joined([part._tags for part in parts]),
            united((part._extra_info for part in parts), validate),
        )
        whole._epoch = _oldest(parts)
        whole._leases = joined(part._leases for part in parts)
        return whole

    # ------------------------------------------------------------ changing

    def reorder(self, indexes: Iterable[int] | Positions) -> None:
        """Reorders the samples in place: position i then holds what position `indexes[i]` held.

        Raises:
            InvalidArgumentError: the number of indexes does not match the size.
            DuplicateError: an index is there twice.
            OutOfRangeError: an index outside the batch, or a negative one. Nothing has moved in any of these.
        """
        order = checked_order(indexes, self.size)
        self._tags.reorder(order)
        self._indexes = self._indexes[order]
        self._partitions = self._partitions.take(order)
        self._fields = {name: field.take(order) for name, field in self._fields.items()}
        self._status[:] = self._status[order]
        self._index_list = None
        self._size_lists = {}

    def add_fields(self, tensor_dict: TensorDictBase | Mapping[str, Any], set_all_ready: bool = True) -> BatchMeta:
        """Adds or replaces fields in place, as these values show them; the values are not kept.

        Args:
            tensor_dict: a TensorDict of the batch's size, or a dict of columns: dense or nested tensors,
                NonTensorStack, NonTensorData, lists, arrays.
            set_all_ready: whether every sample is produced now.

        Returns:
            This batch.

        Raises:
            InvalidArgumentError: a column with another number of rows; nothing has changed.
        """
        return self._add_columns(columns_of(tensor_dict, self.size), set_all_ready)

    def _add_columns(self, columns: Iterable[FieldColumn], set_all_ready: bool = True) -> BatchMeta:
        fields = {**self._fields, **{column.name: column for column in columns}}
        self._fields = {name: fields[name] for name in sorted(fields)}
        self._size_lists = {}
        if set_all_ready:
            self._status[:] = 1
        return self

    # ------------------------------------------------------------ extra_info

    @property
    def extra_info(self) -> dict[str, Any]:
        """What the user keeps with the batch as a whole; edits in place count."""
        return self._extra_info

    @extra_info.setter
    def extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self._extra_info = dict(info_dict)

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` where there is none."""
        return self._extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Sets one key."""
        self._extra_info[key] = value

    def has_extra_info(self, key: str) -> bool:
        """Whether there is such a key."""
        return key in self._extra_info

    def remove_extra_info(self, key: str) -> Any:
        """Removes a key and gives its value, None where there is none."""
        return self._extra_info.pop(key, None)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Sets several keys."""
        self._extra_info.update(info_dict)

    def clear_extra_info(self) -> None:
        """Removes all keys."""
        self._extra_info.clear()

    def get_all_extra_info(self) -> dict[str, Any]:
        """All keys, as a dict of the caller's own."""
        return self._extra_info.copy()

    # ------------------------------------------------------------ custom_meta

    @property
    def custom_meta(self) -> list[dict[str, Any]]:
        """The tag of each sample; edits in place count, and travel with the next put."""
        return self._tags.live()

    @custom_meta.setter
    def custom_meta(self, custom_meta: Sequence[Mapping[str, Any]]) -> None:
        self._tags.replace(custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]]) -> None:
        """Merges one dict a sample into the tags.

        Raises:
            InvalidArgumentError: not one dict a sample; nothing has changed.
        """
        self._tags.update(custom_meta)

    def clear_custom_meta(self) -> None:
        """Empties the tag of each sample, here; a put does not remove what the system has."""
        self._tags.clear()

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A copy of the tag of each sample."""
        return self._tags.to_list()

    # ------------------------------------------------------------ leases

    @property
    def deliveries(self) -> list[int]:
        """The number of this delivery of each sample: 1 for the first, more if leases have ended without an ack.

        Samples that were not fetched under a lease have 1. A sample of a rank-consistent batch that was cleared before
        this delivery has 0: its values are gone, and `get_data` of the others still works.
        """
        counts = np.full(self.size, -1, "i8")
        for lease in self._leases:
            counts = np.maximum(counts, lease.deliveries_of(self._indexes))
        counts[counts < 0] = 1
        return counts.tolist()

    def _leased(self) -> Iterator[tuple[BatchLease, IntArray]]:
        """Each lease with those of its samples that are here (global indexes, ascending)."""
        for lease in self._leases:
            rows = np.intersect1d(lease.rows, self._indexes)
            if len(rows):
                yield lease, rows

    # ------------------------------------------------------------ for the client

    def _rows(self) -> IntArray:
        """The global indexes as they are held; not to be written."""
        return self._indexes

    def _partition(self) -> str | None:
        """The one partition of all samples; None where there are several, or no samples."""
        if not self.size or self._partitions.codes is not None:
            return None
        return self._partitions.names[0]

    def _split_by_partition(self) -> list[tuple[str, IntArray]]:
        """Each partition with the positions of its samples, in the order in which partitions first appear."""
        return self._partitions.split(self.size)

    def _changed_tags(self) -> list[dict[str, Any] | None] | None:
        """For each sample the tag entries that are new or changed, None where none is; None where no sample has any.

        Measured against the tags with which the batch was made, or those of the last `_tags_saved`. Entries
        removed since are not told: a put merges. The values are those held, not copies.
        """
        return self._tags.changed()

    def _tags_saved(self) -> None:
        """Makes the tags as they are what `_changed_tags` measures against."""
        self._tags.mark_saved()

    # ------------------------------------------------------------ pickling

    def __getstate__(self) -> tuple[Any, ...]:
        partitions = (self._partitions.names, self._partitions.codes)
        fields = list(self._fields.values())
        columns = packed(self._indexes), partitions, fields, self._status, self._tags
        return *columns, self._extra_info, self._holder, self._epoch, self._leases

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        indexes, partitions, fields, status, tags, extra_info, holder, epoch, leases = state
        if not status.flags.writeable:  # out-of-band buffers, as Ray uses them, come read-only
            status = status.copy()
        by_name = {field.name: field for field in fields}
        self._assign(unpacked(*indexes), PartitionColumn(*partitions), by_name, status, tags, extra_info)
        self._holder = holder
        self._epoch = epoch
        self._leases = leases


def _checked_status(status: Sequence[int] | npt.NDArray[Any] | torch.Tensor, size: int) -> npt.NDArray[np.int8]:
    """A production status as an array of the batch's own.

    Raises:
        InvalidArgumentError: not one small number a sample.
    """
    if isinstance(status, torch.Tensor):
        status = status.detach().cpu().numpy()
    try:
        array = np.array(status, dtype=np.int8)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"production_status must be 0 or 1 for each sample, but {error}") from None
    if array.shape != (size,):
        raise InvalidArgumentError(
            f"production_status must have one entry a sample: wanted {size}, got the shape {list(array.shape)}"
        )
    return array


def _oldest(batches: Iterable[BatchMeta]) -> int | None:
    """The oldest epoch in which rows of these batches were learnt: a batch is as stale as any part of it."""
    return min((batch._epoch for batch in batches if batch._epoch is not None), default=None)


def _shown(indexes: list[int]) -> str:
    return str(indexes) if len(indexes) <= 8 else f"{str(indexes[:8])[:-1]}, ...] ({len(indexes)} in all)"
