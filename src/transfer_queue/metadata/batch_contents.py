"""BatchContents: the columns of a batch, and what can be read and edited in them.

Everything is stored in columns, so a selection costs time in proportion to the rows that it keeps. This module does not
depend on clients, storage or the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from transfer_queue.errors import InvalidArgumentError, OutOfRangeError, StorageKeyNotFoundError
from transfer_queue.metadata.batch_columns import BatchLease, IntArray, PartitionColumn, TagColumn
from transfer_queue.metadata.field_columns import FieldColumn

B = TypeVar("B", bound="BatchContents")


class BatchContents:
    """The samples of a batch and the schema of their fields, without the values. `BatchMeta` adds selections."""

    def _assign(
        self: B,
        rows: IntArray,
        partitions: PartitionColumn,
        fields: dict[str, FieldColumn],
        status: npt.NDArray[np.int8],
        tags: TagColumn,
        extra_info: dict[str, Any],
    ) -> B:
        """Set the columns of a new batch, and return it."""
        self._indexes = rows  # int64 [size]; never changed in place, so that copies share it
        self._partitions = partitions
        self._fields = fields  # by name, in order of name
        self._status = status  # int8 [size]; writable, and not shared with other batches
        self._tags = tags
        self._extra_info = extra_info
        self._holder: str | None = None
        """The client that has a reference to these rows until it finishes them; None if no client has."""
        self._epoch: int | None = None
        """The epoch of the system in which this metadata was made; None if it fits every epoch."""
        self._leases: tuple[BatchLease, ...] = ()
        """The leases under which the rows were fetched. Some may have ended."""
        # columns as Python lists, made at their first use and not pickled
        self._index_list: list[int] | None = None
        self._size_lists: dict[str, list[torch.Size | None]] = {}
        return self

    # ------------------------------------------------------------ reading

    @property
    def size(self) -> int:
        """The number of samples.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").size
            2
        """
        return int(self._indexes.size)

    def __len__(self) -> int:
        return int(self._indexes.size)

    @property
    def global_indexes(self) -> list[int]:
        """The global index of each sample, as a new list.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").global_indexes
            [4, 5]
        """
        if self._index_list is None:
            self._index_list = self._indexes.tolist()
        return self._index_list.copy()

    @property
    def partition_ids(self) -> list[str]:
        """The partition of each sample, as a new list.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").partition_ids
            ['train_0', 'train_0']
        """
        return self._partitions.to_list(self.size)

    @property
    def field_names(self) -> list[str]:
        """The names of the fields, sorted.

        Example:
            >>> tq.BatchMeta([4], "train_0", {"reward": {}, "prompt": {}}).field_names
            ['prompt', 'reward']
        """
        return list(self._fields)

    @property
    def field_schema(self) -> dict[str, dict[str, Any]]:
        """What is known of each field, as new dicts.

        The entries of a field are:

        - "dtype": The torch dtype; None for objects. The result of `torch.promote_types` if rows differ (`get_dtypes`).
        - "shape": The torch.Size of one row. None if rows differ in shape, for objects, and if it is not known.
        - "is_nested": False while all rows of the field have the same shape, True once they differ, also for a
        selection.
        - "per_sample_shapes": One torch.Size for each row; only if "is_nested" is True.
        - "is_non_tensor": True if the values are Python objects.

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0").add_fields({"prompt": torch.zeros(2, 3)})
            >>> meta.field_schema["prompt"]["dtype"], meta.field_schema["prompt"]["shape"]
            (torch.float32, torch.Size([3]))
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
        """1 for each sample that is produced, int8 [size]. It can be written to.

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0")
            >>> meta.production_status[:] = 1
            >>> meta.is_ready
            True
        """
        return self._status

    @production_status.setter
    def production_status(self, status: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> None:
        self._status = checked_status(status, self.size)

    @property
    def is_ready(self) -> bool:
        """True if there is at least one sample and every sample is produced.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0", production_status=[1, 1]).is_ready
            True
        """
        return len(self._status) > 0 and bool((self._status == 1).all())

    def get_dtypes(self, field_name: str) -> list[torch.dtype | None]:
        """Return the dtype of a field in each row.

        Args:
            field_name: The field.

        Returns:
            One dtype for each row; None for objects.

        Raises:
            StorageKeyNotFoundError: The batch does not have this field (a KeyError).

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0").add_fields({"prompt": torch.zeros(2, 3)})
            >>> meta.get_dtypes("prompt")
            [torch.float32, torch.float32]
        """
        return self._field(field_name).to_dtypes(self.size)

    def get_shapes(self, field_name: str) -> list[torch.Size | None]:
        """Return the shape of a field in each row.

        Args:
            field_name: The field.

        Returns:
            One shape for each row; None for objects and if it is not known.

        Raises:
            StorageKeyNotFoundError: The batch does not have this field (a KeyError).

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0").add_fields({"prompt": torch.zeros(2, 3)})
            >>> meta.get_shapes("prompt")
            [torch.Size([3]), torch.Size([3])]
        """
        sizes = self._size_lists.get(field_name)
        if sizes is None:
            sizes = self._size_lists[field_name] = self._field(field_name).to_sizes(self.size)
        return sizes.copy()

    def _field(self, name: str) -> FieldColumn:
        if name not in self._fields:
            raise StorageKeyNotFoundError(f"no field {name!r} in this batch; it has {self.field_names}")
        return self._fields[name]

    def _position(self, item: int) -> int:
        position = index(item)
        if not -self.size <= position < self.size:
            raise OutOfRangeError(f"position {position} is out of range: the batch has {self.size} samples")
        return position % self.size

    # ------------------------------------------------------------ extra_info

    @property
    def extra_info(self) -> dict[str, Any]:
        """Your own data about the batch as a whole. Changes in place have an effect.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0", extra_info={"step": 1})
            >>> meta.extra_info["step"] = 2
            >>> meta.extra_info
            {'step': 2}
        """
        return self._extra_info

    @extra_info.setter
    def extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self._extra_info = dict(info_dict)

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """Return one entry of `extra_info`.

        Args:
            key: The name of the entry.
            default: What to return if there is no such entry. Default: None.

        Returns:
            The value, or `default`.

        Example:
            >>> tq.BatchMeta([4], "train_0", extra_info={"step": 1}).get_extra_info("step")
            1
        """
        return self._extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set one entry of `extra_info`.

        Args:
            key: The name of the entry.
            value: Its value.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0")
            >>> meta.set_extra_info("step", 1)
            >>> meta.extra_info
            {'step': 1}
        """
        self._extra_info[key] = value

    def has_extra_info(self, key: str) -> bool:
        """Return whether `extra_info` has an entry.

        Args:
            key: The name of the entry.

        Returns:
            True if it exists.

        Example:
            >>> tq.BatchMeta([4], "train_0", extra_info={"step": 1}).has_extra_info("step")
            True
        """
        return key in self._extra_info

    def remove_extra_info(self, key: str) -> Any:
        """Remove an entry of `extra_info` and return its value.

        Args:
            key: The name of the entry.

        Returns:
            The value; None if there was no such entry.

        Example:
            >>> tq.BatchMeta([4], "train_0", extra_info={"step": 1}).remove_extra_info("step")
            1
        """
        return self._extra_info.pop(key, None)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Set several entries of `extra_info`.

        Args:
            info_dict: The entries.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0")
            >>> meta.update_extra_info({"step": 1, "epoch": 0})
            >>> meta.extra_info
            {'step': 1, 'epoch': 0}
        """
        self._extra_info.update(info_dict)

    def clear_extra_info(self) -> None:
        """Remove all entries of `extra_info`.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0", extra_info={"step": 1})
            >>> meta.clear_extra_info()
            >>> meta.extra_info
            {}
        """
        self._extra_info.clear()

    def get_all_extra_info(self) -> dict[str, Any]:
        """Return all entries of `extra_info` as a new dict.

        Returns:
            The entries.

        Example:
            >>> tq.BatchMeta([4], "train_0", extra_info={"step": 1}).get_all_extra_info()
            {'step': 1}
        """
        return self._extra_info.copy()

    # ------------------------------------------------------------ custom_meta

    @property
    def custom_meta(self) -> list[dict[str, Any]]:
        """The tag of each sample. Changes in place have an effect, and are sent with the next put.

        Example:
            >>> meta = tq.BatchMeta([4, 5], "train_0")
            >>> meta.custom_meta[0]["status"] = "done"
            >>> meta.custom_meta
            [{'status': 'done'}, {}]
        """
        return self._tags.editable_tags()

    @custom_meta.setter
    def custom_meta(self, custom_meta: Sequence[Mapping[str, Any]]) -> None:
        self._tags.replace(custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]]) -> None:
        """Merge one dict into the tag of each sample.

        Args:
            custom_meta: One dict for each sample.

        Raises:
            InvalidArgumentError: The number of dicts does not match the size. Nothing has changed.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0", custom_meta=[{"step": 1}])
            >>> meta.update_custom_meta([{"status": "done"}])
            >>> meta.custom_meta
            [{'step': 1, 'status': 'done'}]
        """
        self._tags.update(custom_meta)

    def clear_custom_meta(self) -> None:
        """Empty the tag of each sample in this object. A put does not remove the entries that the system stores.

        Example:
            >>> meta = tq.BatchMeta([4], "train_0", custom_meta=[{"step": 1}])
            >>> meta.clear_custom_meta()
            >>> meta.custom_meta
            [{}]
        """
        self._tags.clear()

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """Return a copy of the tag of each sample.

        Returns:
            One dict for each sample.

        Example:
            >>> tq.BatchMeta([4], "train_0", custom_meta=[{"step": 1}]).get_all_custom_meta()
            [{'step': 1}]
        """
        return self._tags.to_list()

    # ------------------------------------------------------------ leases

    @property
    def deliveries(self) -> list[int]:
        """The number of this delivery of each sample: 1 for the first, more if leases ended without an ack.

        Samples that were not fetched under a lease have 1. A sample of a rank-consistent batch that was cleared before
        this delivery has 0: its values are gone, and `get_data` of the others still works.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").deliveries
            [1, 1]
        """
        counts = np.full(self.size, -1, "i8")
        for lease in self._leases:
            counts = np.maximum(counts, lease.deliveries_of(self._indexes))
        counts[counts < 0] = 1
        return counts.tolist()

    def _leased(self) -> Iterator[tuple[BatchLease, IntArray]]:
        """Yield each lease with the global indexes of its samples in this batch, ascending."""
        for lease in self._leases:
            rows = np.intersect1d(lease.rows, self._indexes)
            if len(rows):
                yield lease, rows

    # ------------------------------------------------------------ for the client

    def _rows(self) -> IntArray:
        """Return the column of global indexes itself, which must not be changed."""
        return self._indexes

    def _partition(self) -> str | None:
        """Return the partition of all samples; None if there are several partitions, or no samples."""
        if not self.size or self._partitions.codes is not None:
            return None
        return self._partitions.names[0]

    def _split_by_partition(self) -> list[tuple[str, IntArray]]:
        """Return each partition with the positions of its samples, in the order in which partitions first appear."""
        return self._partitions.split(len(self._indexes))

    def _changed_tags(self) -> list[dict[str, Any] | None] | None:
        """Return for each sample the tag entries that are new or changed (None if none is); None if no sample has any.

        The tags are compared with those with which the batch was made, or those at the last `_tags_saved`. Removed
        entries are not reported, because a put merges tags. The values are not copied.
        """
        return self._tags.changed_entries()

    def _tags_saved(self) -> None:
        """Make the present tags those with which `_changed_tags` compares."""
        self._tags.mark_saved()


def checked_status(status: Sequence[int] | npt.NDArray[Any] | torch.Tensor, size: int) -> npt.NDArray[np.int8]:
    """Return a production status as a new array.

    Raises:
        InvalidArgumentError: There is not one number that fits int8 for each sample.
    """
    if isinstance(status, torch.Tensor):
        status = status.detach().cpu().numpy()
    try:
        array = np.array(status, dtype=np.int8)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"production_status must be 0 or 1 for each sample, but {error}") from None
    if array.shape != (size,):
        raise InvalidArgumentError(
            f"production_status must have one entry for each of the {size} samples, got the shape {list(array.shape)}"
        )
    return array
