"""Converts the tags of users to columns of a message, and columns of a message to the tags that users read."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.errors import UncarriableValueError
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.messages.tag_table import (
    BOOL,
    DELETED,
    FLOAT,
    INT,
    NONE,
    POOLED,
    EntryColumn,
    Selection,
    TagTable,
    entry_column,
)
from transfer_queue.wire.objects.object_values import decode_tag_value_copied, encode_tag_value

_BYTE = {kind: bytes((kind,)) for kind in (NONE, BOOL, INT, FLOAT, POOLED)}


def table_of_tags(tags: Sequence[Mapping[str, Any] | None], allow_pickle: bool) -> TagTable | None:
    """Return tags that are dicts with the same names as columns; None for all other tags.

    It also returns None if a value cannot be encoded, so that the caller finds it and raises the error.
    """
    if not tags or not _are_all(tags, dict):
        return None
    dicts = cast("Sequence[dict[str, Any]]", tags)
    names = list(dicts[0])
    # if each dict has all names, this number of entries means that none has others
    if sum(map(len, dicts)) != len(dicts) * len(names) or not all(type(name) is str for name in names):
        return None
    try:
        columns = [_column(name, [tag[name] for tag in dicts], allow_pickle) for name in names]
    except (KeyError, UncarriableValueError, UnicodeEncodeError):
        return None
    return TagTable(len(tags), columns)


def _are_all(values: Sequence[Any], kind: type) -> bool:
    """Return whether each value has this type."""
    return list(map(type, values)).count(kind) == len(values)


def _column(name: str, values: list[Any], allow_pickle: bool) -> EntryColumn:
    name.encode()
    column = _column_of_one_type(name, values)
    if column is None:
        values = [encode_tag_value(value, allow_pickle=allow_pickle) for value in values]
        column = _column_of_one_type(name, values)  # numpy's numbers have become numbers
    return _mixed(name, values) if column is None else column


def _column_of_one_type(name: str, values: list[Any]) -> EntryColumn | None:
    """Return the column of values that are all ints, floats, texts, bools or None; otherwise None."""
    kind = type(values[0])
    if not _are_all(values, kind):
        return None
    try:
        if kind is int:
            return EntryColumn(name, _BYTE[INT], array("q", values).tobytes())
        if kind is float:
            return EntryColumn(name, _BYTE[FLOAT], array("d", values).tobytes())
        if kind is str:
            return _texts(name, values)
        if kind is bool:
            return EntryColumn(name, _BYTE[BOOL], bytes(values))
    except (OverflowError, UnicodeEncodeError):
        # an integer of more than 64 bits, or a text that UTF-8 cannot represent
        return None
    return EntryColumn(name, _BYTE[NONE]) if kind is type(None) else None


def _texts(name: str, values: list[str]) -> EntryColumn:
    pool = list(dict.fromkeys(values))
    "".join(pool).encode()
    if len(pool) == 1:
        return EntryColumn(name, _BYTE[POOLED], b"", pool)
    places = dict(zip(pool, range(len(pool))))
    kind = "B" if len(pool) <= 256 else "q"
    return EntryColumn(name, _BYTE[POOLED], array(kind, map(places.__getitem__, values)).tobytes(), pool)


def _mixed(name: str, values: list[Any]) -> EntryColumn:
    """Return the column of values of any types, in their form in messages."""
    kinds, payload = np.empty(len(values), "u1"), np.zeros(len(values), "<i8")
    floats = payload.view("<f8")
    pool: list[Any] = []
    texts: dict[str, int] = {}
    for at, value in enumerate(values):
        kind = type(value)
        if kind is int and -(2**63) <= value < 2**63:
            kinds[at], payload[at] = INT, value
        elif kind is float:
            kinds[at], floats[at] = FLOAT, value
        elif kind is bool:
            kinds[at], payload[at] = BOOL, value
        elif value is None:
            kinds[at] = NONE
        elif kind is Ext and value.code == DELETE_CODE:
            kinds[at] = DELETED
        else:
            kinds[at], payload[at] = POOLED, len(pool)
            if kind is str:
                payload[at] = texts.setdefault(value, len(pool))
                if payload[at] < len(pool):
                    continue
            pool.append(value)
    return entry_column(name, kinds, payload, pool)


class TagRows:
    """The tags of rows as a reply has them. Makes the dicts when they are read: new ones each time."""

    __slots__ = ("_allow_pickle", "_select", "_size", "_table")

    def __init__(self, table: TagTable, allow_pickle: bool = True, select: Selection = None) -> None:
        self._table = table
        self._allow_pickle = allow_pickle
        self._select = select
        self._size = table.rows if select is None else len(select)

    @classmethod
    def checked(cls, table: TagTable, allow_pickle: bool) -> TagRows:
        """Return the tags of a reply. Raises the errors of `decode_tag_value` for a value that cannot be decoded."""
        table.check()
        for column in table.columns:
            for value in column.pool:
                if type(value) is not str:
                    decode_tag_value_copied(value, allow_pickle=allow_pickle)
        return cls(table, allow_pickle)

    def __len__(self) -> int:
        return self._size

    def take(self, selection: Selection) -> TagRows:
        """Return the tags of the selected rows."""
        places = np.arange(self._table.rows) if self._select is None else self._select
        return TagRows(self._table, self._allow_pickle, places[selection])

    def to_list(self) -> list[dict[str, Any]]:
        """Return a dict for each row. No two of them share a mutable value."""
        return self._table.to_rows(self._select, self._decode)

    def _decode(self, value: Any) -> Any:
        return decode_tag_value_copied(value, allow_pickle=self._allow_pickle)

    def __getstate__(self) -> tuple[bytes, bool]:
        table = self._table if self._select is None else self._table.take(self._select)
        return msgspec.msgpack.encode(table), self._allow_pickle

    def __setstate__(self, state: tuple[bytes, bool]) -> None:
        self.__init__(msgspec.msgpack.decode(state[0], type=TagTable), state[1])  # type: ignore[misc]


def empty_tags(rows: int) -> TagRows:
    """Return the tags of rows of which each is empty."""
    return TagRows(TagTable(rows, []))
