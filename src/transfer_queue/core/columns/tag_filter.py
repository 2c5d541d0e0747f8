"""Which rows of a chunk have the tags that a list or a watch asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.columns.tag_columns import FEW, ChunkTags, EntryValues, Places
from transfer_queue.messages.tag_table import ABSENT, BOOL, FLOAT, INT, NONE, POOLED

_decode: Any = msgspec.msgpack.Decoder().decode


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
    found = np.ones(len(at), bool)
    for name, value in where.items():
        column = None if tags is None else tags.columns.get(name)
        if column is not None:
            found &= _equal_rows(column, value, at)
        elif tags is not None and tags.rest:
            found &= np.array([equal_values(each, value) for each in tags.values(name, at)], bool)
        else:
            found[:] = False
    return found


def _has_entries(tags: ChunkTags, where: Mapping[str, Any], at: int) -> bool:
    """Return whether a row has all these entries, with equal values."""
    for name, value in where.items():
        column = tags.columns.get(name)
        found = tags.rest.get(at, {}).get(name, ABSENT) if column is None else column.value(at)
        if not equal_values(found, value):
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
    found = np.zeros(len(kinds), bool)
    if type(value) in (int, float):
        as_int, as_float = _both_forms(value)
        if as_int is not None:
            found |= (kinds == INT) & (payload == as_int)
        if as_float is not None:
            floats = column.floats[at]
            found |= (kinds == FLOAT) & (np.isnan(floats) if as_float != as_float else floats == as_float)
    pooled = kinds == POOLED
    for code in _equal_codes(column, value, payload[pooled]):
        found |= pooled & (payload == code)
    return found


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
    found = []
    for code in np.unique(codes).tolist():
        each = column.pool[code]
        if type(each) is bytes and equal_values(_decode(each), value):
            found.append(code)
    return found
