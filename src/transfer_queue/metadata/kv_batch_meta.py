"""KVBatchMeta: the keys of a batch with their tags. This module does not depend on clients or storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.display import HtmlPage, count_text, listed, listed_names, short_name, short_repr, table_of
from transfer_queue.errors import DuplicateError, InvalidArgumentError, UnknownKeyError
from transfer_queue.metadata.batch_columns import Positions, chunk_bounds, validated_order
from transfer_queue.metadata.tag_values import UnreadTags, copy_tag, deep_copy, merge_extra_info, same_value


class KVBatchMeta:
    """The metadata of a batch of keys. Two batches are equal if all their contents are.

    Args:
        keys: The keys of the samples, in the order of the batch, without repetitions.
        tags: The tag of each key; deeply copied.
        partition_id: The partition of the keys.
        fields: The fields that every key has. Default: None, which means that they are not known.
        extra_info: Data about the batch as a whole; deeply copied.

    Raises:
        InvalidArgumentError: The numbers of keys and tags differ.
        DuplicateError: A key or a field is repeated.

    Example:
        >>> meta = tq.KVBatchMeta(["a", "b"], [{"step": 1}, {"step": 2}], "train_0")
        >>> meta.select_keys("b").tags
        [{'step': 2}]
    """

    __hash__ = None  # type: ignore[assignment]  # it compares by value, and can change

    def __init__(
        self,
        keys: Iterable[str] = (),
        tags: Iterable[Mapping[str, Any]] | None = (),
        partition_id: str | None = None,
        fields: Iterable[str] | None = None,
        extra_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.keys: list[str] = _names(keys)
        """The keys of the samples, in the order of the batch."""
        if len(set(self.keys)) != len(self.keys):
            raise DuplicateError(f"Got duplicated keys: {_repeated(self.keys)}; a batch holds each key once")
        self.partition_id = partition_id
        """The partition of the keys."""
        self._positions: dict[str, int] | None = None
        self._tags: list[dict[str, Any]] | UnreadTags
        self.tags = () if tags is None else tags
        self.fields = fields
        self.extra_info = {} if extra_info is None else extra_info

    @classmethod
    def _make(
        cls,
        keys: list[str],
        tags: list[dict[str, Any]] | UnreadTags,
        partition_id: str | None,
        fields: list[str] | None,
        extra_info: dict[str, Any] | None = None,
    ) -> KVBatchMeta:
        """Return a batch that uses these lists and dicts themselves. Nothing is checked or copied."""
        batch = cls.__new__(cls)
        batch.keys = keys
        batch.partition_id = partition_id
        batch._positions = None
        batch._tags = tags  # UnreadTags until somebody reads them
        batch._fields = fields
        batch._extra_info = {} if extra_info is None else extra_info
        return batch

    @property
    def tags(self) -> list[dict[str, Any]]:
        """The tag of each key. Changes in place have an effect. An assigned value is copied.

        Example:
            >>> meta = tq.KVBatchMeta(["a"], [{"step": 1}], "train_0")
            >>> meta.tags[0]["step"] = 2
            >>> meta.tags
            [{'step': 2}]
        """
        if not isinstance(self._tags, list):
            self._tags = self._tags.to_list()
        return self._tags

    @tags.setter
    def tags(self, tags: Iterable[Mapping[str, Any]]) -> None:
        new = [copy_tag(tag, "tags") for tag in tags]
        if len(new) != len(self.keys):
            raise InvalidArgumentError(
                f"keys and tags must have same length, but there are {len(self.keys)} keys and {len(new)} tags"
            )
        self._tags = new

    @property
    def fields(self) -> list[str] | None:
        """The fields that every key has; None if they are not known.

        Example:
            >>> tq.KVBatchMeta(["a"], [{}], "train_0", fields=["prompt"]).fields
            ['prompt']
        """
        return self._fields

    @fields.setter
    def fields(self, fields: Iterable[str] | None) -> None:
        new = None if fields is None else _names(fields)
        if new is not None and len(set(new)) != len(new):
            raise DuplicateError(f"Got duplicated fields: {_repeated(new)}; name each field once")
        self._fields = new

    @property
    def extra_info(self) -> dict[str, Any]:
        """Your own data about the batch as a whole. Changes in place have an effect. An assigned value is copied.

        Example:
            >>> tq.KVBatchMeta(["a"], [{}], "train_0", extra_info={"step": 1}).extra_info
            {'step': 1}
        """
        return self._extra_info

    @extra_info.setter
    def extra_info(self, extra_info: Mapping[str, Any]) -> None:
        self._extra_info = {key: deep_copy(value) for key, value in extra_info.items()}

    @property
    def size(self) -> int:
        """The number of keys.

        Example:
            >>> tq.KVBatchMeta(["a", "b"], [{}, {}], "train_0").size
            2
        """
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVBatchMeta):
            return NotImplemented
        return (
            self.keys == other.keys
            and self.partition_id == other.partition_id
            and self.fields == other.fields
            and same_value(self.tags, other.tags)
            and same_value(self._extra_info, other._extra_info)
        )

    def __repr__(self) -> str:
        fields = None if self._fields is None else listed(self._fields)
        more = f", extra_info={short_repr(self._extra_info)}" if self._extra_info else ""
        return (
            f"KVBatchMeta(size={self.size}, keys={listed(self.keys)}, partition_id={short_repr(self.partition_id)}, "
            f"fields={fields}{more})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first keys with their tags, and the fields."""
        summary = count_text(self.size, "key")
        if self.partition_id is not None:
            summary += f" of {short_name(self.partition_id)}"
        page = HtmlPage("KVBatchMeta", summary)
        fields = "not known" if self._fields is None else listed_names(self._fields)
        page.notes.append(f"fields: {fields}")
        if self._extra_info:
            page.notes.append(f"extra_info: {short_repr(self._extra_info, 200)}")
        rows = (
            (position, short_name(key), short_repr(tag))
            for position, (key, tag) in enumerate(zip(self.keys, self.tags))
        )
        page.tables.append(table_of(["", "key", "tag"], rows, self.size, "key"))
        return page.html()

    def select_keys(self, keys_to_select: Sequence[str] | str) -> KVBatchMeta:
        """Return these keys with their tags.

        Args:
            keys_to_select: The keys, in the order of the result (one str for one key).

        Returns:
            The selected keys.

        Raises:
            UnknownKeyError: A key is not in this batch.
            DuplicateError: A key is repeated.

        Example:
            >>> tq.KVBatchMeta(["a", "b", "c"], [{}, {}, {}], "train_0").select_keys(["c", "a"]).keys
            ['c', 'a']
        """
        wanted = _names(keys_to_select)
        if len(set(wanted)) != len(wanted):
            raise DuplicateError(f"Contain duplicate keys: {_repeated(wanted)}; select each key once")
        return self._take(self._find(wanted))

    def _find(self, wanted: list[str]) -> list[int]:
        positions = self._positions
        # the user may edit the list of keys, so the positions are used only if they are still right
        if positions is None or not self._holds(positions, wanted):
            positions = self._positions = {key: position for position, key in enumerate(self.keys)}
        unknown = [key for key in wanted if key not in positions]
        if unknown:
            raise UnknownKeyError(f"keys {unknown} not found in current batch of {self.size} keys")
        return [positions[key] for key in wanted]

    def _holds(self, positions: dict[str, int], wanted: list[str]) -> bool:
        return len(positions) == len(self.keys) and all(
            key in positions and self.keys[positions[key]] == key for key in wanted
        )

    def _take(self, positions: Iterable[int]) -> KVBatchMeta:
        rows, tags = list(positions), self._tags
        return type(self)._make(
            [self.keys[row] for row in rows],
            [deep_copy(tags[row]) for row in rows] if isinstance(tags, list) else tags.take(np.array(rows, "i8")),
            self.partition_id,
            None if self._fields is None else self._fields.copy(),
            deep_copy(self._extra_info),
        )

    def reorder(self, indexes: Iterable[int] | Positions) -> None:
        """Reorder the keys in place. Position i then has the key that position `indexes[i]` had.

        Nothing changes if an error is raised.

        Args:
            indexes: Each position of the batch once.

        Raises:
            InvalidArgumentError: The number of indexes does not match the size.
            DuplicateError: An index is repeated.
            OutOfRangeError: An index is negative or outside the batch (a ValueError and an IndexError).

        Example:
            >>> meta = tq.KVBatchMeta(["a", "b"], [{}, {}], "train_0")
            >>> meta.reorder([1, 0])
            >>> meta.keys
            ['b', 'a']
        """
        order = validated_order(indexes, self.size).tolist()
        self.keys = [self.keys[row] for row in order]
        tags = self._tags
        self._tags = [tags[row] for row in order] if isinstance(tags, list) else tags.take(np.array(order, "i8"))
        self._positions = None

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Divide the batch into consecutive parts. Sizes differ by at most one, and the larger parts come first.

        Args:
            chunks: The number of parts. If it exceeds the size, the last parts are empty.

        Returns:
            The parts, in order.

        Raises:
            InvalidArgumentError: `chunks` is less than 1.

        Example:
            >>> [part.keys for part in tq.KVBatchMeta(["a", "b", "c"], [{}, {}, {}], "train_0").chunk(2)]
            [['a', 'b'], ['c']]
        """
        return [self._take(range(bounds.start, bounds.stop)) for bounds in chunk_bounds(self.size, chunks)]

    @classmethod
    def concat(cls, data: Iterable[KVBatchMeta]) -> KVBatchMeta:
        """Return the keys of several batches, one batch after the other. Batches without keys are ignored.

        Args:
            data: The batches, with the same fields and partition.

        Returns:
            The joined batch.

        Raises:
            InvalidArgumentError: Fields or partitions differ, or `extra_info` has conflicting values.
            DuplicateError: A key is in two batches.

        Example:
            >>> parts = tq.KVBatchMeta(["a", "b"], [{}, {}], "train_0").chunk(2)
            >>> tq.KVBatchMeta.concat(parts).keys
            ['a', 'b']
        """
        batches = list(data)
        parts = [batch for batch in batches if batch.size] or batches[:1]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            if _field_set(part) != _field_set(first):
                raise InvalidArgumentError(f"Field names do not match: {first.fields} and {part.fields}")
            if part.partition_id != first.partition_id:
                raise InvalidArgumentError(f"Partition do not match: {first.partition_id!r} and {part.partition_id!r}")
        return cls(
            [key for part in parts for key in part.keys],
            [tag for part in parts for tag in part.tags],
            first.partition_id,
            first.fields,
            merge_extra_info(part.extra_info for part in parts),
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return self.keys, self._tags, self.partition_id, self._fields, self._extra_info

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.keys, self._tags, self.partition_id, self._fields, self._extra_info = state
        self._positions = None


def _names(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _field_set(batch: KVBatchMeta) -> set[str] | None:
    return None if batch.fields is None else set(batch.fields)


def _repeated(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
