"""The tags of many rows as columns: one for each name of an entry. Few rows have a dict each, which is shorter.

A column has a kind and a payload of 8 bytes for each row. The payload of a number is the number; the payload of any
other value is its place in the pool of the column. So every value comes back with its exact type, and a number or a
text that many rows have costs no object for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import DELETE_CODE, Small

MISSING, NONE, BOOL, INT, FLOAT, POOLED, DELETED = range(7)
"""The kinds of a value. MISSING: the row does not have the entry. DELETED: the entry is removed (only in a put)."""
COLUMNS_FROM = 8
"""Rows from which on tags travel as columns."""
ABSENT: Any = object()
"""What `values_of` returns for a row that does not have the entry."""
_DELETE = Ext(DELETE_CODE, b"")

Selection: TypeAlias = Any  # slice | np.ndarray


class EntryColumn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The values of one entry of the tags of all rows of a table."""

    name: str
    kinds: bytes
    """The kind of each row (u1), or one for all rows."""
    payload: bytes = b""
    """The payload of each row: i8, or u1, or nothing if each is 0."""
    pool: list[Any] = []
    """The values of kind POOLED, as messages contain them."""

    def kinds_of(self, rows: int) -> np.ndarray:
        """Return the kind of each row, u1 [rows]; not writable."""
        return np.frombuffer(self.kinds if len(self.kinds) == rows else self.kinds * rows, "u1")

    def payload_of(self, rows: int) -> np.ndarray:
        """Return the payload of each row, i8 or u1 [rows]; not to be written to."""
        if not self.payload:
            return np.zeros(rows, "i8")
        return np.frombuffer(self.payload, "<i8" if len(self.payload) == 8 * rows else "u1")


class TagTable(msgspec.Struct, frozen=True, gc=False):
    """The tags of rows, as columns. Messages have it in the place of a list with a dict for each row."""

    rows: Small
    columns: list[EntryColumn]

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_rows())

    def check(self) -> None:
        """Raise InvalidArgumentError unless each column has a valid value for each row."""
        names = {column.name for column in self.columns}
        if len(names) != len(self.columns):
            raise InvalidArgumentError("a table of tags has two columns of one name; send each name once")
        for column in self.columns:
            if len(column.kinds) not in (1, self.rows) or len(column.payload) not in (0, self.rows, 8 * self.rows):
                raise InvalidArgumentError(
                    f"the column of tag {column.name!r} must have {self.rows} rows, got {len(column.kinds)} kinds and "
                    f"{len(column.payload)} bytes of values"
                )
            if column.kinds and max(column.kinds) > DELETED:
                raise InvalidArgumentError(
                    f"the column of tag {column.name!r} has the unknown kind {max(column.kinds)}"
                )
            if POOLED not in column.kinds:
                continue
            kinds, payload = self.arrays_of(column)
            places = payload if len(column.kinds) == 1 else payload[kinds == POOLED]
            if len(places) and not (int(places.min()) >= 0 and int(places.max()) < len(column.pool)):
                raise InvalidArgumentError(
                    f"the column of tag {column.name!r} names values that are not in its pool of {len(column.pool)}"
                )

    def arrays_of(self, column: EntryColumn) -> tuple[np.ndarray, np.ndarray]:
        """Return the kind (u1) and the payload (i8 or u1) of each row of a column; not to be written to."""
        return column.kinds_of(self.rows), column.payload_of(self.rows)

    def take(self, select: Selection) -> TagTable:
        """Return the table of the selected rows."""
        rows, columns = self._select(select)
        return TagTable(rows, [entry_column(*column) for column in columns])

    def to_rows(self, select: Selection = None, pooled: Callable[[Any], Any] | None = None) -> list[dict[str, Any]]:
        """Return a dict for each selected row, in which an entry to remove has an Ext. pooled: See `values_of`."""
        rows, columns = self._select(select)
        return rows_of(columns, rows, pooled)

    def _select(self, select: Selection) -> tuple[int, list[TagEntries]]:
        """Return the number of the selected rows, and their columns."""
        select, columns = slice(None) if select is None else select, []
        for column in self.columns:
            kinds, payload = self.arrays_of(column)
            columns.append(TagEntries(column.name, kinds[select], payload[select], column.pool))
        return len(np.broadcast_to(np.zeros(1, "u1"), self.rows)[select]), columns

    def without_deletes(self) -> TagTable:
        """Return the table without entries to remove, for rows that have none."""
        if all(DELETED not in column.kinds for column in self.columns):
            return self
        columns = []
        for column in self.columns:
            kinds, payload = self.arrays_of(column)
            columns.append(entry_column(column.name, np.where(kinds == DELETED, MISSING, kinds), payload, column.pool))
        return TagTable(self.rows, [column for column in columns if column.kinds.strip(b"\0")])


SentTags: TypeAlias = list[dict[str, Any] | None] | TagTable
"""The tags of a put: None for a row without changes."""
StoredTags: TypeAlias = list[dict[str, Any]] | TagTable
"""The tags of rows in a reply."""


def entry_column(name: str, kinds: np.ndarray, payload: np.ndarray, pool: list[Any]) -> EntryColumn:
    """Return a column in its shortest form. kinds: u1 [rows]; payload: i8 or u1 [rows]."""
    first = int(kinds[0]) if len(kinds) else MISSING
    same = bool((kinds == first).all())
    if same and first in (MISSING, NONE, DELETED):
        return EntryColumn(name, bytes((first,)))
    if same and (first == BOOL or (first == POOLED and len(pool) <= 256)):
        payload = payload.astype("u1", copy=False)
    else:
        payload = payload.astype("<i8", copy=False)
    return EntryColumn(
        name, bytes((first,)) if same else kinds.astype("u1", copy=False).tobytes(), payload.tobytes(), pool
    )


def values_of(
    kinds: np.ndarray, payload: np.ndarray, pool: Sequence[Any], pooled: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Return the value of each row; ABSENT for a row without one.

    pool: See `EntryColumn`.
    pooled: what replaces a value of the pool that is not text, once for each row that has it.
    """
    if not len(kinds):
        return []
    first = int(kinds[0])
    if len(kinds) == 1 or (kinds == first).all():
        return _values_of_kind(first, payload, pool, pooled)
    out: list[Any] = [ABSENT] * len(kinds)
    for kind in np.flatnonzero(np.bincount(kinds)).tolist():
        if kind == MISSING:
            continue
        at = np.flatnonzero(kinds == kind)
        for place, value in zip(at.tolist(), _values_of_kind(kind, payload[at], pool, pooled), strict=True):
            out[place] = value
    return out


def _values_of_kind(
    kind: int, payload: np.ndarray, pool: Sequence[Any], pooled: Callable[[Any], Any] | None
) -> list[Any]:
    if kind == INT:
        return list(payload.tolist())
    if kind == POOLED:
        if pooled is None or all(type(value) is str for value in pool):
            return list(map(pool.__getitem__, payload.tolist()))
        return [value if type(value) is str else pooled(value) for value in map(pool.__getitem__, payload.tolist())]
    if kind == FLOAT:
        return list(np.ascontiguousarray(payload, "<i8").view("<f8").tolist())
    if kind == BOOL:
        return list((payload != 0).tolist())
    return [{NONE: None, DELETED: _DELETE}.get(kind, ABSENT)] * len(payload)


class TagEntries(NamedTuple):
    """The entries of one tag, for each row: as in an `EntryColumn`, but in arrays."""

    name: str
    kinds: np.ndarray
    payload: np.ndarray
    pool: list[Any]


def rows_of(
    columns: Sequence[TagEntries], rows: int, pooled: Callable[[Any], Any] | None = None
) -> list[dict[str, Any]]:
    """Return a dict for each row from the columns of its tags. pooled: See `values_of`."""
    if not columns or not rows:
        return [{} for _ in range(rows)]
    names = [name for name, _, _, _ in columns]
    values = [values_of(kinds, payload, pool, pooled) for _, kinds, payload, pool in columns]
    if any(int(kinds.min()) == MISSING for _, kinds, _, _ in columns):
        rows_of_values = zip(*values, strict=True)
        return [{name: value for name, value in zip(names, row) if value is not ABSENT} for row in rows_of_values]
    if len(names) == 1:
        return [{names[0]: value} for value in values[0]]
    if len(names) == 2:
        one, two = names
        return [{one: first, two: second} for first, second in zip(*values, strict=True)]
    return [dict(zip(names, row)) for row in zip(*values, strict=True)]


def tag_rows(tags: StoredTags | None, rows: int) -> list[dict[str, Any]]:
    """Return the tag of each row of a reply, as messages contain them."""
    if tags is None:
        return [{} for _ in range(rows)]
    return tags.to_rows() if isinstance(tags, TagTable) else tags


def slice_tags(tags: StoredTags | None, start: int, end: int) -> StoredTags | None:
    """Return the tags of the rows from `start` to before `end`; None if all are empty."""
    if tags is None or isinstance(tags, list):
        part = None if tags is None else tags[start:end]
        return part if part and any(part) else None
    if end - start < COLUMNS_FROM:
        return slice_tags(tags.to_rows(slice(start, end)), 0, end - start)
    return tags.take(slice(start, end))


def has_entry(tags: SentTags, name: str) -> bool:
    """Return whether the tag of a row has an entry of this name."""
    if isinstance(tags, TagTable):
        return any(column.name == name for column in tags.columns)
    return any(tag is not None and name in tag for tag in tags)


def take_tags(tags: SentTags, positions: np.ndarray) -> SentTags:
    """Return the tags of these rows of a put."""
    if not isinstance(tags, list):
        return tags.take(positions)
    return [tags[position] for position in positions.tolist()]
