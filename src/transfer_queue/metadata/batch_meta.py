"""BatchMeta: the samples of a batch and the schema of their fields, without the values.

It adds selections, unions and changes of the columns to `BatchContents`. `batch_page` shows it in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from transfer_queue.display import (
    MAX_ROWS,
    HtmlPage,
    Row,
    SizeCell,
    count_text,
    listed,
    listed_names,
    short_name,
    short_repr,
    table_of,
)
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata.batch_columns import (
    IntArray,
    PartitionColumn,
    Positions,
    Selection,
    TagColumn,
    chunk_bounds,
    merge_leases,
    pack_integers,
    unpack_integers,
    validated_integers,
    validated_order,
    validated_positions,
)
from transfer_queue.metadata.batch_contents import BatchContents, checked_status
from transfer_queue.metadata.field_columns import FieldColumn, columns_of
from transfer_queue.metadata.sample_views import SampleView, SampleViews
from transfer_queue.metadata.tag_values import UnreadTags, deep_copy, merge_extra_info


def batch_page(batch: BatchContents) -> HtmlPage:
    """Return what a `BatchMeta` shows in a notebook."""
    size = batch.size
    names = batch._partitions.names if size else []
    produced = int((batch._status == 1).sum())
    page = HtmlPage("BatchMeta", f"{count_text(size, 'sample')}{f' of {listed_names(names)}' if names else ''}")
    if size:
        page.notes.append("all produced" if produced == size else f"{produced:,} of {size:,} produced")
    if batch._leases:
        page.notes.append(f"fetched under {count_text(len(batch._leases), 'lease')}")
    if batch._extra_info:
        page.notes.append(f"extra_info: {short_repr(batch._extra_info, 200)}")
    fields = (
        [short_name(field.name), _type(field), _row_shape(field), _nbytes(field, size)]
        for field in batch._fields.values()
    )
    page.tables.append(table_of(["field", "type", "shape of a row", "bytes"], fields, len(batch._fields), "field"))
    columns = ["", "global index", *(["partition"] if len(names) > 1 else []), "produced", "tag"]
    page.tables.append(table_of(columns, _samples(batch, len(names) > 1), size, "sample"))
    return page


def _samples(batch: BatchContents, with_partition: bool) -> Iterator[Row]:
    """Yield a row for each of the first samples."""
    tags = batch._tags.first(MAX_ROWS)
    for position, index in enumerate(batch._indexes[:MAX_ROWS].tolist()):
        partition = [short_name(batch._partitions.name_of(position))] if with_partition else []
        tag = tags[position] if position < len(tags) else {}
        yield [position, index, *partition, "yes" if batch._status[position] == 1 else "no", short_repr(tag)]


def _type(field: FieldColumn) -> str:
    if field.is_non_tensor:
        return "objects"
    mixed = field.dtypes is not None and len(set(field.dtypes)) > 1
    name = "not known" if field.dtype is None else str(field.dtype).removeprefix("torch.")
    return f"{name} (rows differ)" if mixed else name


def _row_shape(field: FieldColumn) -> str:
    """Return the shape of a row: `[3]`, or with the least and greatest length if rows differ: `[2..5]`."""
    if field.is_non_tensor:
        return ""
    if field.shape is not None:
        return f"[{', '.join(map(str, field.shape))}]"
    if isinstance(field.shapes, np.ndarray):
        if not len(field.shapes):
            return "rows differ"
        least, most = field.shapes.min(axis=0).tolist(), field.shapes.max(axis=0).tolist()
        return f"[{', '.join(str(a) if a == b else f'{a}..{b}' for a, b in zip(least, most))}]"
    return "rows differ" if field.is_nested else "not known"


def _nbytes(field: FieldColumn, rows: int) -> SizeCell | None:
    """Return the size of the values of a field; None if it is not known."""
    if field.is_non_tensor or field.dtype is None:
        return None
    if field.shape is not None:
        return SizeCell(rows * math.prod(field.shape) * field.dtype.itemsize)
    if isinstance(field.shapes, np.ndarray):
        return SizeCell(int(field.shapes.prod(axis=1).sum()) * field.dtype.itemsize)
    return None


class BatchMeta(BatchContents):
    """The metadata of a batch of samples.

    A position counts the rows of this batch from 0; only `meta[i]` accepts negative ones. A selection (`meta[i]`,
    `meta[a:b]`, `select_samples`, `chunk`, ...) is a batch of its own; the values in its `extra_info` are shared with
    the whole batch.

    Args:
        global_indexes: The global indexes of the samples, in the order of the batch. Repetitions are allowed.
        partition_ids: The partition of each sample, or one str for all.
        field_schema: What is known of each field, as the property `field_schema` describes it. Other entries are kept.
        production_status: 1 for each sample that is produced, [size]. Default: none is.
        extra_info: Data about the batch as a whole.
        custom_meta: The tag of each sample; copied.
        _custom_backend_meta: Ignored. It exists for callers of older versions.

    Raises:
        InvalidArgumentError: An argument does not have one entry for each sample.

    Example:
        >>> meta = tq.BatchMeta(global_indexes=[4, 5, 6], partition_ids="train_0")
        >>> meta.size, meta.is_ready
        (3, False)
        >>> [part.global_indexes for part in meta.chunk(2)]
        [[4, 5], [6]]
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
        rows = validated_integers(global_indexes, "global_indexes")
        size = int(rows.size)
        if isinstance(partition_ids, str):
            partition_ids = [partition_ids] * size
        if len(partition_ids) != size:
            raise InvalidArgumentError(
                f"partition_ids must have one entry for each of the {size} samples, got {len(partition_ids)}"
            )
        status = np.zeros(size, dtype=np.int8)
        if production_status is not None:
            status = checked_status(production_status, size)
        fields = {
            name: FieldColumn.from_schema(name, entry, size) for name, entry in sorted((field_schema or {}).items())
        }
        tags = TagColumn(size) if custom_meta is None else TagColumn.from_tags(custom_meta, size)
        self._assign(rows, PartitionColumn.from_names(partition_ids), fields, status, tags, dict(extra_info or {}))

    @classmethod
    def _from_columns(
        cls,
        rows: IntArray,
        partition_id: str,
        fields: Sequence[FieldColumn],
        produced: npt.NDArray[np.int8] | None = None,
        tags: list[dict[str, Any]] | UnreadTags | None = None,
    ) -> BatchMeta:
        """Return a batch of columns from a reply, without checks.

        The batch uses `rows` and `tags` (None: all are empty) themselves, so they must not change later.
        If `produced` is None, every row is produced. The tags are the baseline of `_changed_tags`.
        """
        status = np.ones(rows.size, np.int8) if produced is None else np.array(produced, np.int8)
        by_name = {field.name: field for field in sorted(fields, key=attrgetter("name"))}
        if isinstance(tags, list) and not any(tags):
            tags = None
        partitions = PartitionColumn([partition_id])
        return cls.__new__(cls)._assign(rows, partitions, by_name, status, TagColumn(rows.size, tags), {})

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """Return a batch without samples.

        Args:
            extra_info: Data about the batch as a whole. Default: {}.

        Returns:
            The batch.

        Example:
            >>> len(tq.BatchMeta.empty())
            0
        """
        return cls(extra_info=extra_info)

    @property
    def samples(self) -> Sequence[SampleView]:
        """A read-only view of each sample.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").samples[1].global_index
            5
        """
        return SampleViews(self)

    def __repr__(self) -> str:
        names = self._partitions.names if self.size else []
        return (
            f"BatchMeta(size={self.size}, partitions={listed(names)}, fields={listed(self._fields)}, "
            f"produced={int((self._status == 1).sum())})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the fields with their types, and the first samples."""
        return batch_page(self).html()

    # ------------------------------------------------------------ cutting

    @overload
    def __getitem__(self, item: int) -> BatchMeta: ...
    @overload
    def __getitem__(self, item: slice) -> BatchMeta: ...
    def __getitem__(self, item: int | slice) -> BatchMeta:
        """Return a batch of one sample (`meta[i]`, from the end for a negative i), or of a range (`meta[a:b]`).

        Raises:
            OutOfRangeError: The position does not exist (an IndexError).
        """
        if isinstance(item, slice):
            return self._take(item)
        position = self._position(item)
        return self._take(slice(position, position + 1))

    def __iter__(self) -> Iterator[BatchMeta]:
        return (self[position] for position in range(self.size))

    def select_samples(self, sample_indices: Iterable[int] | Positions) -> BatchMeta:
        """Return the samples at these positions.

        Args:
            sample_indices: The positions, in the order of the result. Repetitions are kept.

        Returns:
            The selected samples.

        Raises:
            OutOfRangeError: A position is negative or outside the batch (a ValueError).

        Example:
            >>> tq.BatchMeta([4, 5, 6], "train_0").select_samples([2, 0]).global_indexes
            [6, 4]
        """
        return self._take(validated_positions(sample_indices, self.size))

    def select_fields(self, field_names: Sequence[str] | str) -> BatchMeta:
        """Return the same samples with only these fields.

        Args:
            field_names: The fields (one str for one field). Unknown names are ignored.

        Returns:
            The samples with the selected fields.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0", {"reward": {}, "prompt": {}})
            >>> meta.select_fields(["prompt", "unknown"]).field_names
            ['prompt']
        """
        wanted = {field_names} if isinstance(field_names, str) else set(field_names)
        return self._take(slice(None), {name: field for name, field in self._fields.items() if name in wanted})

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Divide the batch into consecutive parts. Sizes differ by at most one, and the larger parts come first.

        Args:
            chunks: The number of parts. If it exceeds the size, the last parts are empty.

        Returns:
            The parts, in order.

        Raises:
            InvalidArgumentError: `chunks` is less than 1.

        Example:
            >>> [part.size for part in tq.BatchMeta([4, 5, 6], "train_0").chunk(2)]
            [2, 1]
        """
        return [self._take(bounds) for bounds in chunk_bounds(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Divide the batch by partition, in the order in which the partitions first appear.

        Returns:
            One batch for each partition. The order of its samples is kept.

        Example:
            >>> meta = tq.BatchMeta([4, 5, 6], ["train_0", "val_0", "train_0"])
            >>> [part.global_indexes for part in meta.chunk_by_partition()]
            [[4, 6], [5]]
        """
        return [self._take(positions) for _, positions in self._split_by_partition()]

    def copy(self) -> BatchMeta:
        """Return an independent copy. The values in `extra_info` are copied, too.

        Returns:
            The copy.

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0")
            >>> twin = meta.copy()
            >>> twin.reorder([1, 0])
            >>> meta.global_indexes, twin.global_indexes
            ([4, 5], [5, 4])
        """
        twin = self._take(slice(None), self._fields)
        twin._extra_info = deep_copy(self._extra_info)
        return twin

    __copy__ = copy

    def _take(self, selection: Selection, fields: dict[str, FieldColumn] | None = None) -> BatchMeta:
        """Return the selected samples, with the fields of the batch or with `fields`, which must have as many rows."""
        cut = self.__new__(type(self))._assign(
            # copies, because views of slices would keep the whole arrays in memory
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
        """Return the same samples with the fields, tags and `extra_info` of both batches.

        Where both have an entry, that of the other batch is used. A sample is ready if it is ready in both. The union
        with an empty batch is a copy of the other one.

        Args:
            other: The other batch.

        Returns:
            The union.

        Raises:
            InvalidArgumentError: The batches have different samples, or the same in another order.

        Example:
            >>> prompts = tq.BatchMeta([4, 5], "train_0", {"prompt": {}})
            >>> rewards = tq.BatchMeta([4, 5], "train_0", {"reward": {}})
            >>> prompts.union(rewards).field_names
            ['prompt', 'reward']
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
        both = self.__new__(type(self))._assign(
            self._indexes,
            self._partitions,
            {name: fields[name] for name in sorted(fields)},
            ((self._status == 1) & (other._status == 1)).astype(np.int8),
            self._tags.merge(other._tags),
            {**self._extra_info, **other._extra_info},
        )
        both._epoch = _oldest([self, other])
        both._leases = merge_leases((self._leases, other._leases))
        return both

    @classmethod
    def concat(cls, data: Iterable[BatchMeta], validate: bool = True) -> BatchMeta:
        """Return the samples of several batches, one batch after the other. Batches without samples are ignored.

        Args:
            data: The batches, with the same fields of the same dtypes.
            validate: False to join without comparing: the result has the fields that all batches have, the dtypes of
                the first batch, and the last value of each entry of `extra_info`. Default: True.

        Returns:
            The joined batch.

        Raises:
            InvalidArgumentError: Fields or dtypes differ, or `extra_info` has conflicting values.

        Example:
            >>> parts = tq.BatchMeta([4, 5, 6], "train_0").chunk(2)
            >>> tq.BatchMeta.concat(parts).global_indexes
            [4, 5, 6]
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
        whole = cls.__new__(cls)._assign(
            np.concatenate([part._indexes for part in parts]),
            PartitionColumn.join([part._partitions for part in parts], sizes),
            {
                name: FieldColumn.join([part._fields[name] for part in parts], sizes, validate)
                for name in sorted(shared)
            },
            np.concatenate([part._status for part in parts]),
            TagColumn.join([part._tags for part in parts]),
            merge_extra_info((part._extra_info for part in parts), validate),
        )
        whole._epoch = _oldest(parts)
        whole._leases = merge_leases(part._leases for part in parts)
        return whole

    # ------------------------------------------------------------ changing

    def reorder(self, indexes: Iterable[int] | Positions) -> None:
        """Reorder the samples in place. Position i then has the sample that position `indexes[i]` had.

        Nothing changes if an error is raised.

        Args:
            indexes: Each position of the batch once.

        Raises:
            InvalidArgumentError: The number of indexes does not match the size.
            DuplicateError: An index is repeated.
            OutOfRangeError: An index is negative or outside the batch.

        Example:
            >>> meta = tq.BatchMeta([4, 5, 6], "train_0")
            >>> meta.reorder([2, 0, 1])
            >>> meta.global_indexes
            [6, 4, 5]
        """
        order = validated_order(indexes, self.size)
        self._tags.reorder(order)
        self._indexes = self._indexes[order]
        self._partitions = self._partitions.take(order)
        self._fields = {name: field.take(order) for name, field in self._fields.items()}
        self._status[:] = self._status[order]
        self._index_list = None
        self._size_lists = {}

    def add_fields(self, tensor_dict: TensorDictBase | Mapping[str, Any], set_all_ready: bool = True) -> BatchMeta:
        """Add or replace fields in place, as these values describe them. The values themselves are not kept.

        Args:
            tensor_dict: A TensorDict of the batch's size, or a dict of columns: dense or nested tensors,
                NonTensorStack, NonTensorData, lists, arrays.
            set_all_ready: True to mark every sample as produced. Default: True.

        Returns:
            This batch.

        Raises:
            InvalidArgumentError: A column has another number of rows. Nothing has changed.

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0")
            >>> meta.add_fields({"reward": torch.ones(2)}).is_ready
            True
        """
        return self._add_columns(columns_of(tensor_dict, self.size), set_all_ready)

    def _add_columns(self, columns: Iterable[FieldColumn], set_all_ready: bool = True) -> BatchMeta:
        fields = {**self._fields, **{column.name: column for column in columns}}
        self._fields = {name: fields[name] for name in sorted(fields)}
        self._size_lists = {}
        if set_all_ready:
            self._status[:] = 1
        return self

    # ------------------------------------------------------------ pickling

    def __getstate__(self) -> tuple[Any, ...]:
        partitions = (self._partitions.names, self._partitions.codes)
        fields = list(self._fields.values())
        columns = pack_integers(self._indexes), partitions, fields, self._status, self._tags
        return *columns, self._extra_info, self._holder, self._epoch, self._leases

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        indexes, partitions, fields, status, tags, extra_info, holder, epoch, leases = state
        if not status.flags.writeable:  # Ray unpickles out-of-band buffers as read-only arrays
            status = status.copy()
        by_name = {field.name: field for field in fields}
        self._assign(unpack_integers(*indexes), PartitionColumn(*partitions), by_name, status, tags, extra_info)
        self._holder = holder
        self._epoch = epoch
        self._leases = leases


def _oldest(batches: Iterable[BatchMeta]) -> int | None:
    """Return the oldest epoch of these batches, because a batch is as stale as its oldest part."""
    return min((batch._epoch for batch in batches if batch._epoch is not None), default=None)


def _shown(indexes: list[int]) -> str:
    return str(indexes) if len(indexes) <= 8 else f"{str(indexes[:8])[:-1]}, ...] ({len(indexes)} in all)"
