"""The tags of the rows of a chunk: a column for each name of an entry. A filter finds the rows that have asked tags.

Each column has a kind and a payload of 8 bytes for each row, as `messages.tag_table` describes. The values of its pool
are text, or the bytes of a value in a message; each is kept once. Names beyond the first MAX_COLUMNS of a chunk have no
column: the entries of such names are in a dict for each row.

The tags of single rows are kept as they came until many tags are read, or MAX_PENDING rows have such tags. To put them
into the columns together takes a fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.messages.tag_table import (
    ABSENT,
    BOOL,
    DELETED,
    FLOAT,
    INT,
    MISSING,
    NONE,
    POOLED,
    EntryColumn,
    StoredTags,
    TagEntries,
    TagTable,
    entry_column,
    rows_of,
    values_of,
)
from transfer_queue.sampler.numeric_tags import number

MAX_COLUMNS = 64
SPARE = 16  # values of a pool without rows that are kept at least

FEW = 8
"""Rows up to which tags are read and put row by row, which is faster."""
MAX_PENDING = 64
"""Rows whose tags are not in the columns yet, at most."""

_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder().decode
Places = Any  # slice | i8 array: places in a chunk


class EntryValues:
    """The values of one entry of the tags of a chunk."""

    __slots__ = ("codes", "floats", "kinds", "payload", "pool")

    def __init__(self, capacity: int) -> None:
        self.kinds = np.zeros(capacity, "u1")
        """The kind of each row; MISSING if it does not have the entry."""
        self.payload = np.zeros(capacity, "i8")
        """See `messages.tag_table`."""
        self.floats = self.payload.view("f8")
        """The same memory, as floats."""
        self.pool: list[str | bytes] = []
        """Text, or a value in its form in messages, encoded with msgpack."""
        self.codes: dict[str | bytes, int] = {}
        """The place of each value in `pool`."""

    def grow(self, capacity: int) -> None:
        """Increase the capacity."""
        more = capacity - len(self.kinds)
        self.kinds = np.concatenate([self.kinds, np.zeros(more, "u1")])
        self.payload = np.concatenate([self.payload, np.zeros(more, "i8")])
        self.floats = self.payload.view("f8")

    def put(self, at: int, value: Any) -> None:
        """Set the value of a row."""
        kind = type(value)
        if kind is int and -(1 << 63) <= value < 1 << 63:
            self.kinds[at] = INT
            self.payload[at] = value
        elif kind is float:
            self.kinds[at] = FLOAT
            self.floats[at] = value
        elif kind is bool:
            self.kinds[at] = BOOL
            self.payload[at] = value
        elif value is None:
            self.kinds[at] = NONE
        else:
            pooled = value if kind is str else _encode(value)
            code = self.codes.get(pooled)
            if code is None:
                self._make_space(1)
                code = self._code_of(pooled)
            self.payload[at] = code
            self.kinds[at] = POOLED

    def put_values(self, at: np.ndarray, values: list[Any], kinds: set[type]) -> None:
        """Set the values of rows. kinds: the types of the values."""
        if kinds == {str}:
            self._make_space(len(values))
            for value in dict.fromkeys(values):
                self._code_of(value)
            self.payload[at] = list(map(self.codes.__getitem__, values))
            self.kinds[at] = POOLED
        elif kinds == {float}:
            self.floats[at] = values
            self.kinds[at] = FLOAT
        elif kinds == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 63:
            self.payload[at] = values
            self.kinds[at] = INT
        else:
            for place, value in zip(at.tolist(), values, strict=True):
                self.put(place, value)

    def put_column(self, at: Places, kinds: np.ndarray | int, payload: np.ndarray, pool: list[Any]) -> None:
        """Set the values of rows to those of a column of a table.

        kinds: the kind of each of these rows, or that of all.
        payload: i8 or u1, for each of these rows.
        """
        if isinstance(kinds, int):
            if kinds == POOLED:
                payload = self._codes_of(pool, payload)[payload]
        elif pool:
            pooled = kinds == POOLED
            payload = payload.astype("i8")
            payload[pooled] = self._codes_of(pool, payload[pooled])[payload[pooled]]
        self.kinds[at] = kinds
        self.payload[at] = payload

    def _codes_of(self, pool: list[Any], places: np.ndarray) -> np.ndarray:
        """Return the place in this pool of each value of another pool, i8; of those that have one of these places."""
        self._make_space(len(pool))
        codes = np.zeros(len(pool), "i8")
        used = range(len(pool)) if len(pool) <= SPARE else np.flatnonzero(np.bincount(places)).tolist()
        for place in used:
            value = pool[place]
            key = value if type(value) is str else _encode(value)
            codes[place] = self._code_of(key)
        return codes

    def _code_of(self, value: str | bytes) -> int:
        """Return the place of a value in the pool, for which `_make_space` has made space."""
        code = self.codes.setdefault(value, len(self.pool))
        if code == len(self.pool):
            self.pool.append(value)
        return code

    def _make_space(self, count: int) -> None:
        """Remove the values that no row has from the pool, if it would become too long by this number of values."""
        if len(self.pool) + count <= SPARE + 2 * len(self.kinds):
            return
        pooled = np.flatnonzero(self.kinds == POOLED)
        used, places = np.unique(self.payload[pooled], return_inverse=True)
        self.payload[pooled] = places.reshape(-1)
        self.pool = [self.pool[code] for code in used.tolist()]
        self.codes = {value: code for code, value in enumerate(self.pool)}

    def value(self, at: int) -> Any:
        """Return the value of a row, as messages contain it; ABSENT if it has none."""
        kind = self.kinds.item(at)
        if kind == INT:
            return self.payload.item(at)
        if kind == POOLED:
            value = self.pool[self.payload.item(at)]
            return value if type(value) is str else _decode(value)
        if kind == FLOAT:
            return self.floats.item(at)
        if kind == BOOL:
            return self.payload.item(at) != 0
        return ABSENT if kind == MISSING else None

    def values(self, at: Places) -> list[Any]:
        """Return the values of rows, as messages contain them; ABSENT for a row without one."""
        return values_of(self.kinds[at], self.payload[at], self.pool, _decode)

    def numbers(self, at: Places) -> tuple[np.ndarray, np.ndarray]:
        """Return the values as floats (see `numeric_tags.number`), NaN for other values, and which are not numbers."""
        kinds, payload = self.kinds[at], self.payload[at]
        out = np.where(kinds == INT, payload, math.nan)
        floats = kinds == FLOAT
        out[floats] = payload.view("f8")[floats]
        wrong = (kinds == BOOL) | (floats & np.isnan(out)) | (kinds == POOLED)
        for place in np.flatnonzero(kinds == POOLED).tolist():
            value = self.pool[int(payload[place])]
            converted = None if type(value) is str else number(_decode(value))
            if converted is not None:
                out[place], wrong[place] = converted, False
        return out, wrong


class ChunkTags:
    """The tags of the rows of a chunk. Places are those of rows in the chunk."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._columns: dict[str, EntryValues] = {}
        self._rest: dict[int, dict[str, Any]] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        """Place -> what is to be merged into its tag."""

    @property
    def columns(self) -> dict[str, EntryValues]:
        """Name -> its values."""
        if self._pending:
            self._merge_pending()
        return self._columns

    @property
    def rest(self) -> dict[int, dict[str, Any]]:
        """Place -> the entries that have no column, as messages contain them."""
        if self._pending:
            self._merge_pending()
        return self._rest

    @classmethod
    def from_saved(cls, tags: StoredTags, capacity: int) -> ChunkTags:
        """Return the tags that `pack` has returned."""
        made = cls(capacity)
        if isinstance(tags, TagTable):
            made.put_table(slice(0, len(tags)), tags, slice(None))
        else:
            made.put(range(len(tags)), tags)
        return made

    def grow(self, capacity: int) -> None:
        """Increase the capacity."""
        self.capacity = capacity
        for column in self._columns.values():
            column.grow(capacity)

    def clear(self, at: Places) -> None:
        """Remove the tags of these rows."""
        for column in self.columns.values():
            column.kinds[at] = MISSING
        if self.rest:
            for place in self._places(at):
                self.rest.pop(place, None)

    def put(self, places: Iterable[int], tags: Iterable[dict[str, Any] | None], replace: bool = False) -> None:
        """Merge a tag into that of each of these rows, or replace it. An entry to remove may be missing."""
        for at, tag in zip(places, tags, strict=True):
            if tag is None or not (tag or replace):
                continue
            if replace:
                for column in self.columns.values():
                    column.kinds[at] = MISSING
                self.rest.pop(at, None)
            pending = self._pending
            before = pending.get(at)
            pending[at] = tag if before is None else {**before, **tag}
            if len(pending) >= MAX_PENDING:
                self._merge_pending()

    def _merge_pending(self) -> None:
        """Merge what is pending into the tags of its rows."""
        pending, self._pending = self._pending, {}
        tags = list(pending.values())
        names = tags[0].keys()
        if len(tags) <= FEW or not all(map(names.__eq__, map(dict.keys, tags))):
            for place, tag in pending.items():
                self._merge_row(place, tag)
            return
        at = np.fromiter(pending, "i8", len(pending))
        for name in names:
            values = list(map(itemgetter(name), tags))
            kinds = set(map(type, values))
            column = None if Ext in kinds else self._columns.get(name) or self._new_column(name)
            if column is not None:
                column.put_values(at, values, kinds)
                continue
            for place, value in zip(pending, values, strict=True):
                self._merge_row(place, {name: value})

    def _merge_row(self, at: int, tag: dict[str, Any]) -> None:
        for name, value in tag.items():
            if type(value) is Ext and value.code == DELETE_CODE:
                self._remove(name, at)
                continue
            column = self._columns.get(name) or self._new_column(name)
            if column is not None:
                column.put(at, value)
            else:
                self._rest.setdefault(at, {})[name] = value

    def put_table(self, at: Places, table: TagTable, where: Any, replace: bool = False) -> None:
        """Merge rows of a table into the tags of these rows, or replace them. where: the rows of the table."""
        if replace:
            self.clear(at)
        columns = self.columns
        for sent in table.columns:
            column = columns.get(sent.name) or self._new_column(sent.name)
            payload = sent.payload_of(table.rows)[where]
            if column is not None and len(sent.kinds) == 1 and MISSING != sent.kinds[0] != DELETED:
                column.put_column(at, sent.kinds[0], payload, sent.pool)
                continue
            kinds = sent.kinds_of(table.rows)[where]
            if column is None:
                self._put_rest(at, sent, kinds, payload)
                continue
            places = np.arange(self.capacity)[at]
            column.kinds[places[kinds == DELETED]] = MISSING
            some = (kinds != DELETED) & (kinds != MISSING)
            column.put_column(places[some], kinds[some], payload[some], sent.pool)

    def _put_rest(self, at: Places, sent: EntryColumn, kinds: np.ndarray, payload: np.ndarray) -> None:
        for place, kind, value in zip(
            self._places(at), kinds.tolist(), values_of(kinds, payload, sent.pool), strict=True
        ):
            if kind == DELETED:
                self._remove(sent.name, place)
            elif kind != MISSING:
                self.rest.setdefault(place, {})[sent.name] = value

    def _remove(self, name: str, at: int) -> None:
        if name in self._columns:
            self._columns[name].kinds[at] = MISSING
            return
        entries = self._rest.get(at, {})
        entries.pop(name, None)
        if not entries:
            self._rest.pop(at, None)

    def _new_column(self, name: str) -> EntryValues | None:
        """Return a new column for a name; None if there are too many."""
        if len(self._columns) >= MAX_COLUMNS:
            return None
        made = self._columns[name] = EntryValues(self.capacity)
        return made

    def _places(self, at: Places) -> Sequence[int]:
        return range(*at.indices(self.capacity)) if isinstance(at, slice) else np.asarray(at).tolist()

    def row(self, at: int) -> dict[str, Any]:
        """Return a new dict with the tag of a row, as messages contain it. What is pending stays pending."""
        tag = {}
        for name, column in self._columns.items():
            value = column.value(at)
            if value is not ABSENT:
                tag[name] = value
        if at in self._rest:
            tag |= self._rest[at]
        for name, value in self._pending.get(at, {}).items():
            if type(value) is Ext and value.code == DELETE_CODE:
                tag.pop(name, None)
            else:
                tag[name] = value
        return tag

    def rows(self, at: Places) -> list[dict[str, Any]]:
        """Return a new dict with the tag of each row, as messages contain it."""
        if not isinstance(at, slice) and len(at) <= FEW:
            return [self.row(place) for place in at.tolist()]
        places = self._places(at)
        columns = []
        for name, column in self.columns.items():
            kinds = column.kinds[at]
            if kinds.any():
                columns.append(TagEntries(name, kinds, column.payload[at], column.pool))
        tags = rows_of(columns, len(places), _decode)
        if self.rest:
            for place, tag in zip(places, tags, strict=True):
                tag.update(self.rest.get(place, {}))
        return tags

    def values(self, name: str, at: Places) -> list[Any]:
        """Return an entry of each row, as messages contain it; ABSENT for a row without it."""
        column = self.columns.get(name)
        if column is not None:
            return column.values(at)
        return [self.rest.get(place, {}).get(name, ABSENT) if self.rest else ABSENT for place in self._places(at)]

    def numbers(self, name: str, at: Places) -> tuple[np.ndarray, np.ndarray]:
        """Return an entry of each row as a float, NaN if it is missing or not a number, and which are not numbers."""
        column = self.columns.get(name)
        if column is not None:
            return column.numbers(at)
        values = [number(None if value is ABSENT else value) for value in self.values(name, at)]
        wrong = np.array([value is None for value in values], bool)
        return np.array([math.nan if value is None else value for value in values], "f8"), wrong

    def has_others(self, names: Collection[str], at: Places) -> bool:
        """Return whether one of these rows may have an entry that is not among these."""
        for name, column in self.columns.items():
            if name not in names and column.kinds[at].any():
                return True
        return bool(self.rest)

    def tagged(self, at: Places) -> np.ndarray:
        """Return which of these rows have entries, bool."""
        places = np.arange(self.capacity)[at]
        out = np.zeros(len(places), bool)
        for column in self.columns.values():
            out |= column.kinds[places] != MISSING
        if self.rest:
            out |= np.array([place in self.rest for place in places.tolist()], bool)
        return out

    def pack(self, size: int) -> StoredTags:
        """Return the tags of the first rows to be saved."""
        every = slice(0, size)
        if self.rest:
            return self.rows(every)
        return pack_tags([(self, every, every)], size)


def pack_tags(parts: Sequence[tuple[ChunkTags, Places, Places]], rows: int) -> TagTable:
    """Return the tags of rows of several chunks, of which no row has entries without a column, as columns.

    parts: the tags of a chunk, the places of rows in it, and where these rows are in the result.
    """
    columns = []
    for name in dict.fromkeys(name for tags, _, _ in parts for name in tags.columns):
        kinds, payload = np.zeros(rows, "u1"), np.zeros(rows, "i8")
        pool: list[Any] = []
        codes: dict[str | bytes, int] = {}
        for tags, at, where in parts:
            column = tags.columns.get(name)
            if column is None:
                continue
            kinds[where], entries = column.kinds[at], column.payload[at]
            if column.pool:
                pooled = column.kinds[at] == POOLED
                new = np.zeros(len(column.pool), "i8")
                for code in np.flatnonzero(np.bincount(entries[pooled], minlength=1)).tolist():
                    value = column.pool[code]
                    new[code] = codes.setdefault(value, len(pool))
                    if len(codes) > len(pool):
                        pool.append(value if type(value) is str else _decode(value))
                entries = np.where(pooled, new[np.where(pooled, entries, 0)], entries)
            payload[where] = entries
        if kinds.any():
            columns.append(entry_column(name, kinds, payload, pool))
    return TagTable(rows, columns)


def equal_values(one: Any, other: Any) -> bool:
    """Return whether two values of tags, as messages contain them, are equal.

    Numbers compare by value (1 equals 1.0) and NaN equals NaN, but True does not equal 1. Values that a server cannot
    decode are equal if their bytes are.
    """
    kind, kind_of_other = type(one), type(other)
    if kind is kind_of_other:
        if kind is list:
            return len(one) == len(other) and all(map(equal_values, one, other))
        if kind is dict:
            return one.keys() == other.keys() and all(equal_values(value, other[name]) for name, value in one.items())
    elif {kind, kind_of_other} != {int, float}:
        return False
    return bool(one == other or (one != one and other != other))


def matching_rows(tags: ChunkTags | None, where: Mapping[str, Any], at: np.ndarray) -> np.ndarray:
    """Return which rows have all these entries, with equal values (see `equal_values`).

    Args:
        tags: The tags of a chunk; None if no row has any.
        where: The entries, as messages contain them.
        at: Places in the chunk, i8 [n].

    Returns:
        bool [n].
    """
    if len(at) <= FEW and tags is not None:
        return np.array([_has_entries(tags, where, place) for place in at.tolist()], bool)
    matches = np.ones(len(at), bool)
    for name, value in where.items():
        column = None if tags is None else tags.columns.get(name)
        if column is not None:
            matches &= _equal_rows(column, value, at)
        elif tags is not None and tags.rest:
            matches &= np.array([equal_values(each, value) for each in tags.values(name, at)], bool)
        else:
            matches[:] = False
    return matches


def _has_entries(tags: ChunkTags, where: Mapping[str, Any], at: int) -> bool:
    """Return whether a row has all these entries, with equal values."""
    for name, value in where.items():
        column = tags.columns.get(name)
        stored = tags.rest.get(at, {}).get(name, ABSENT) if column is None else column.value(at)
        if not equal_values(stored, value):
            return False
    return True


def _equal_rows(column: EntryValues, value: Any, at: Places) -> np.ndarray:
    """Return which rows have a value that is equal to this one."""
    kinds = column.kinds[at]
    if value is None:
        return np.asarray(kinds == NONE)
    payload = column.payload[at]
    if type(value) is bool:
        return np.asarray((kinds == BOOL) & ((payload != 0) == value))
    matches = np.zeros(len(kinds), bool)
    if type(value) in (int, float):
        as_int, as_float = _both_forms(value)
        if as_int is not None:
            matches |= (kinds == INT) & (payload == as_int)
        if as_float is not None:
            floats = column.floats[at]
            matches |= (kinds == FLOAT) & (np.isnan(floats) if as_float != as_float else floats == as_float)
    pooled = kinds == POOLED
    for code in _equal_codes(column, value, payload[pooled]):
        matches |= pooled & (payload == code)
    return matches


def _both_forms(value: float) -> tuple[int | None, float | None]:
    """Return the number as an int of 64 bits and as a float; None for a form that cannot have exactly this value."""
    as_float = float(value)
    as_int = int(value) if isinstance(value, int) or value.is_integer() else None
    if isinstance(value, int) and int(as_float) != value:
        return as_int, None
    if as_int is not None and not -(1 << 63) <= as_int < 1 << 63:
        return None, as_float
    return as_int, as_float


def _equal_codes(column: EntryValues, value: Any, codes: np.ndarray) -> list[int]:
    """Return those of these places in the pool whose values are equal to this one; they may be several.

    Only these values are decoded, because a watch asks for a row or two of a column whose pool may have thousands.
    """
    if type(value) is str:
        code = column.codes.get(value)
        return [] if code is None else [code]
    equal = []
    for code in np.unique(codes).tolist():
        each = column.pool[code]
        if type(each) is bytes and equal_values(_decode(each), value):
            equal.append(code)
    return equal
