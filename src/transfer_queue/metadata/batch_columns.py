"""The columns of a BatchMeta other than its fields: positions, partitions, tags and leases.

A selection of rows costs time in proportion to the selected rows. This module does not depend on fields or BatchMeta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, Union

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from transfer_queue.errors import DuplicateError, InvalidArgumentError, OutOfRangeError
from transfer_queue.metadata.tag_values import UnreadTags, changed_entries, copy_tag, deep_copy

IntArray = npt.NDArray[np.int64]
Positions = Union[Sequence[int], npt.NDArray[Any], torch.Tensor]
Selection = Union[IntArray, slice]
Item = TypeVar("Item")


def validated_integers(values: Iterable[int] | Positions, what: str) -> IntArray:
    """Return the values as a new one-dimensional int64 array.

    Raises:
        InvalidArgumentError: The values are not integers, or do not have one dimension. `what` is the argument's name.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = values if isinstance(values, np.ndarray) else np.asarray(list(values))
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{what} must be a flat list of integers, got {array.ndim} dimensions of {array.dtype}"
        )
    return array.astype(np.int64)


def validated_positions(positions: Iterable[int] | Positions, size: int) -> IntArray:
    """Return positions in a batch of `size` rows, each from 0 to size - 1. Repetitions are allowed.

    Raises:
        OutOfRangeError: A position is negative or outside the batch.
    """
    array = validated_integers(positions, "positions")
    outside = array[(array < 0) | (array >= size)]
    if outside.size:
        raise OutOfRangeError(f"position {outside[0]} is out of range: the batch has {size} rows, counted from 0")
    return array


def validated_order(indexes: Iterable[int] | Positions, size: int) -> IntArray:
    """Return a permutation of the positions 0 to size - 1.

    Raises:
        InvalidArgumentError: The number of indexes is not `size`.
        DuplicateError: A position is repeated.
        OutOfRangeError: A position is negative or outside the batch.
    """
    array = validated_integers(indexes, "indexes")
    if array.size != size:
        raise InvalidArgumentError(
            f"the number of indexes ({array.size}) does not match the size of the batch ({size})"
        )
    if np.unique(array).size != size:
        raise DuplicateError(f"Contain duplicate indexes: {array.tolist()}; a new order names each position once")
    return validated_positions(array, size)


def chunk_bounds(size: int, chunks: int) -> list[slice]:
    """Divide `size` rows into consecutive parts. Sizes differ by at most one, and the larger parts come first.

    Raises:
        InvalidArgumentError: `chunks` is less than 1.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, (int, np.integer)) or chunks < 1:
        raise InvalidArgumentError(f"chunks must be a positive integer, got {chunks!r}")
    short, longer = divmod(size, int(chunks))
    ends = [short * i + min(i, longer) for i in range(int(chunks) + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def pack_integers(numbers: IntArray) -> tuple[int, npt.NDArray[Any]]:
    """Pack integers for pickling: the least one, and the distances from it in the smallest dtype that fits them."""
    if not numbers.size:
        return 0, numbers
    least = int(numbers.min())
    return least, (numbers - least).astype(np.min_scalar_type(int(numbers.max()) - least))


def unpack_integers(least: int, distances: npt.NDArray[Any]) -> IntArray:
    """Unpack integers: the inverse of `pack_integers`."""
    return distances.astype(np.int64) + least


def take_items(items: list[Item], selection: Selection) -> list[Item]:
    """Return the selected items of a list."""
    if isinstance(selection, slice):
        return items[selection]
    return [items[position] for position in selection.tolist()]


class PartitionColumn(msgspec.Struct, eq=False):
    """The partition of each row: one name if all rows have the same, otherwise names and a code for each row."""

    names: list[str]
    """The names in use, without repetitions."""
    codes: npt.NDArray[np.int32] | None = None
    """The index into `names` of each row, int32 [rows]; None while there is at most one name."""

    @classmethod
    def from_names(cls, partition_ids: Sequence[str]) -> PartitionColumn:
        """Return the column of one name for each row."""
        names = list(dict.fromkeys(partition_ids))
        if len(names) < 2:
            return cls(names)
        code_of = {name: code for code, name in enumerate(names)}
        return cls(names, np.fromiter((code_of[name] for name in partition_ids), np.int32, len(partition_ids)))

    @classmethod
    def join(cls, columns: Sequence[PartitionColumn], sizes: Sequence[int]) -> PartitionColumn:
        """Return the columns, one after the other."""
        names = list(dict.fromkeys(name for column in columns for name in column.names))
        if len(names) < 2:
            return cls(names)
        code_of = {name: code for code, name in enumerate(names)}
        parts = []
        for column, size in zip(columns, sizes, strict=True):
            translated = np.array([code_of[name] for name in column.names], dtype=np.int32)
            parts.append(np.repeat(translated, size) if column.codes is None else translated[column.codes])
        return cls(names, np.concatenate(parts))

    def take(self, selection: Selection) -> PartitionColumn:
        """Return the column of the selected rows."""
        if self.codes is None:
            return self
        kept, codes = np.unique(self.codes[selection], return_inverse=True)
        names = [self.names[code] for code in kept.tolist()]
        return PartitionColumn(names, codes.astype(np.int32) if len(names) > 1 else None)

    def name_of(self, position: int) -> str:
        """Return the partition of one row."""
        return self.names[0] if self.codes is None else self.names[self.codes[position]]

    def to_list(self, rows: int) -> list[str]:
        """Return one name for each row."""
        if self.codes is None:
            return self.names * rows
        return [self.names[code] for code in self.codes.tolist()]

    def split(self, rows: int) -> list[tuple[str, IntArray]]:
        """Return each partition with the positions of its rows, in the order in which the partitions first appear."""
        if self.codes is None:
            return [(self.names[0], np.arange(rows, dtype=np.int64))] if rows else []
        order = np.argsort(self.codes, kind="stable").astype(np.int64)
        counts = np.bincount(self.codes, minlength=len(self.names))
        runs = np.split(order, np.cumsum(counts)[:-1])
        parts = [(name, run) for name, run in zip(self.names, runs, strict=True) if run.size]
        return sorted(parts, key=lambda part: int(part[1][0]))


class TagColumn:
    """The tag of each row, and the tag that it had when the rows were fetched."""

    __slots__ = ("_current", "_rows", "_saved")

    def __init__(
        self,
        rows: int,
        saved: list[dict[str, Any]] | UnreadTags | None = None,
        current: list[dict[str, Any]] | None = None,
    ) -> None:
        self._rows = rows
        self._saved = saved
        """The baseline with which `changed_entries` compares; None if every tag was empty.

        UnreadTags until the tags are read for the first time.
        The list and its dicts never change, so that selections share them.
        """
        self._current = current
        """The dicts that users read and edit. They share no mutable value with `_saved`.

        None until tags are read or changed for the first time. The tags are then those of `_saved`.
        """

    @classmethod
    def from_tags(cls, tags: Iterable[Mapping[str, Any]], rows: int) -> TagColumn:
        """Return the column of a user's tags, which are copied. They are also the baseline.

        Raises:
            InvalidArgumentError: There is not one dict for each row.
        """
        saved = _copied_tags(tags, rows)
        return cls(rows, saved if any(saved) else None)

    @classmethod
    def join(cls, columns: Sequence[TagColumn]) -> TagColumn:
        """Return the columns, one after the other. The result shares no mutable value with them."""
        saved = current = None
        if any(column._saved is not None for column in columns):
            saved = [tag for column in columns for tag in column._saved_list()]
        if any(column._current is not None for column in columns):
            current = [deep_copy(tag) for column in columns for tag in column._checked()]
        return cls(sum(column._rows for column in columns), saved, current)

    def editable_tags(self) -> list[dict[str, Any]]:
        """Return the tags themselves, which the user may edit."""
        if self._current is None:
            self._current = deep_copy(self._saved_list())
        return self._current

    def to_list(self) -> list[dict[str, Any]]:
        """Return a copy of the tags."""
        tags: list[dict[str, Any]] = deep_copy(self._checked())
        return tags

    def first(self, most: int) -> list[dict[str, Any]]:
        """Return the tags of the first rows, which must not be changed. Does not check what the user edited."""
        tags = self._saved if self._current is None else self._current
        if tags is None:
            return []
        return tags[:most] if isinstance(tags, list) else tags.take(slice(0, most)).to_list()

    def take(self, selection: Selection) -> TagColumn:
        """Return the column of the selected rows. Later changes of one column do not affect the other."""
        saved = None if self._saved is None else _taken(self._saved, selection)
        if isinstance(saved, list) and not any(saved):
            saved = None
        current = None if self._current is None else [deep_copy(tag) for tag in take_items(self._checked(), selection)]
        if isinstance(selection, slice):
            rows = len(range(*selection.indices(self._rows)))
        else:
            rows = int(selection.size)
        return TagColumn(rows, saved, current)

    def reorder(self, order: IntArray) -> None:
        """Reorder the tags in place. A dict that a user has stays the tag of its row."""
        if self._saved is not None:
            self._saved = _taken(self._saved, order)
        if self._current is not None:
            self._current[:] = take_items(self._checked(), order)

    def replace(self, tags: Iterable[Mapping[str, Any]]) -> None:
        """Replace the tags by copies of these. The baseline stays.

        Raises:
            InvalidArgumentError: There is not one dict for each row.
        """
        self._put(_copied_tags(tags, self._rows))

    def update(self, tags: Iterable[Mapping[str, Any]]) -> None:
        """Merge tags row by row.

        Raises:
            InvalidArgumentError: There is not one dict for each row. Nothing has changed.
        """
        new = _copied_tags(tags, self._rows)
        self.editable_tags()
        for tag, entries in zip(self._checked(), new, strict=True):
            tag.update(entries)

    def clear(self) -> None:
        """Empty all tags. The baseline stays."""
        self._put([{} for _ in range(self._rows)])

    def merge(self, other: TagColumn) -> TagColumn:
        """Merge the tags of both columns row by row. If both have an entry, that of `other` is used."""
        saved = current = None
        if self._saved is not None or other._saved is not None:
            pairs = zip(self._saved_list(), other._saved_list(), strict=True)
            saved = [{**own, **others} for own, others in pairs]
        if self._current is not None or other._current is not None:
            pairs = zip(self._checked(), other._checked(), strict=True)
            current = [deep_copy({**own, **others}) for own, others in pairs]
        return TagColumn(self._rows, saved, current)

    def changed_entries(self) -> list[dict[str, Any] | None] | None:
        """Return for each row the entries that are new or differ from the baseline.

        The entry of a row is None if it has no changes, and the result is None if no row has any.

        Raises:
            InvalidArgumentError: The user edited the list, and it does not contain one dict for each row any more.
        """
        if self._current is None:
            return None
        pairs = zip(self._checked(), self._saved_list(), strict=True)
        changes = [changed_entries(tag, saved) or None for tag, saved in pairs]
        return changes if any(changes) else None

    def mark_saved(self) -> None:
        """Make the present tags the baseline."""
        if self._current is not None:
            saved = deep_copy(self._checked())
            self._saved = saved if any(saved) else None

    def _put(self, tags: list[dict[str, Any]]) -> None:
        # a list that a user has stays the list of this column
        if self._current is None:
            self._current = tags
        else:
            self._current[:] = tags

    def _read(self) -> list[dict[str, Any]]:
        return self._saved_list() if self._current is None else self._current

    def _saved_list(self) -> list[dict[str, Any]]:
        if self._saved is None:
            return [{}] * self._rows
        if not isinstance(self._saved, list):
            self._saved = self._saved.to_list()
        return self._saved

    def _checked(self) -> list[dict[str, Any]]:
        tags = self._read()
        if len(tags) != self._rows or not all(isinstance(tag, dict) for tag in tags):
            kinds = sorted({type(tag).__name__ for tag in tags})
            raise InvalidArgumentError(
                f"custom_meta must have one dict for each of the {self._rows} rows, got {len(tags)} entries of {kinds}"
            )
        return tags

    def __getstate__(self) -> tuple[int, list[dict[str, Any]] | UnreadTags | None, dict[int, dict[str, Any]]]:
        if self._current is None:
            return self._rows, self._saved, {}
        # tags that were read but not changed are pickled only as the baseline
        edits = {
            row: tag
            for row, (tag, saved) in enumerate(zip(self._checked(), self._saved_list(), strict=True))
            if tag.keys() != saved.keys() or changed_entries(tag, saved)
        }
        return self._rows, self._saved, edits

    def __setstate__(
        self, state: tuple[int, list[dict[str, Any]] | UnreadTags | None, dict[int, dict[str, Any]]]
    ) -> None:
        self._rows, self._saved, edits = state
        self._current = None
        if edits:
            current = self.editable_tags()
            for row, tag in edits.items():
                current[row] = tag


def _taken(tags: list[dict[str, Any]] | UnreadTags, selection: Selection) -> list[dict[str, Any]] | UnreadTags:
    return take_items(tags, selection) if isinstance(tags, list) else tags.take(selection)


def _copied_tags(tags: Iterable[Mapping[str, Any]], rows: int) -> list[dict[str, Any]]:
    new = [copy_tag(tag, "custom_meta") for tag in tags]
    if len(new) != rows:
        raise InvalidArgumentError(f"custom_meta must have one dict for each of the {rows} rows, got {len(new)}")
    return new


Rows = npt.NDArray[np.int64]


class BatchLease:
    """One lease. The client renews it while this object exists: the metadata and every selection of it refer to it."""

    __slots__ = ("__weakref__", "deliveries", "is_unseen", "partition", "rows", "seconds", "token")

    def __init__(
        self,
        partition: str,
        token: int,
        seconds: float,
        rows: Rows,
        deliveries: npt.NDArray[np.int32] | None,
        is_unseen: bool = False,
    ) -> None:
        self.partition = partition
        self.token = token
        """The number by which the controller identifies the lease."""
        self.seconds = seconds
        """How long the lease lasts without a renewal."""
        self.is_unseen = is_unseen
        """Whether the samples are consumed, and the lease only lasts until they are handed over."""
        order = slice(None) if is_unseen else np.argsort(rows, kind="stable")
        self.rows = rows[order]
        """The global indexes of its samples, ascending; in the order of the batch if it is unseen."""
        self.deliveries = None if deliveries is None else deliveries[order]
        """The delivery number of each sample, from 1; 0 for samples that were cleared before; None if all are 1."""

    def deliveries_of(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Return the delivery number of each of these rows; -1 for rows that are not under this lease."""
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        known = self.rows[at] == rows
        counts = np.ones(len(rows), "i8") if self.deliveries is None else self.deliveries[at].astype("i8")
        return np.where(known, counts, -1)

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchLease, (self.partition, self.token, self.seconds, self.rows, self.deliveries, self.is_unseen)


def merge_leases(leases: Iterable[tuple[BatchLease, ...]]) -> tuple[BatchLease, ...]:
    """Return the leases of several batches without repetitions."""
    return tuple({lease.token: lease for some in leases for lease in some}.values())
