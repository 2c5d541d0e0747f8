"""Kinds of columns for rows and chunks: arrays as long as a chunk, and arrays for each chunk or task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import Column, Count, array_of, dict_form, map_of, require, tuple_form


def _array_form(dtype: str, length: int | None = None) -> Any:
    return array_of(np.dtype(dtype).str, length=length)


def per_chunk(dtype: str, length: int) -> Any:
    """Declare a dict from chunk number to an array of this length, for the chunks in which any row has a value."""
    return map_of(Count, _array_form(dtype, length))


def per_task(value: Any) -> Any:
    """Declare a dict from the name of a task to such a value."""
    return map_of(str, value)


class _Columns(Column):
    """Arrays with fixed names and dtypes, each as long as the `capacity` of the table."""

    def __init__(self, dtypes: Iterable[tuple[str, str]], optional: bool, missing: Any) -> None:
        self._dtypes = {name: _array_form(dtype) for name, dtype in dtypes}
        self._optional = optional
        absent = (None,) if optional else ()
        fields = [(name, form | None if optional else form, *absent) for name, form in self._dtypes.items()]
        form = msgspec.defstruct("Columns", fields, forbid_unknown_fields=True, frozen=True)
        super().__init__(form, dict, missing=form() if missing == {} else missing)

    def decode_part(self, part: Any) -> Any:
        found = {name: getattr(part, name) for name in self._dtypes}
        if not self._optional:
            return found
        there = {name: array for name, array in found.items() if array is not None}
        if there and len(there) < len(found):
            raise ValueError(f"`{self.key}` has the columns {list(there)}, but not all of {list(found)}")
        return there

    def check(self, table: Any, where: str) -> None:
        for name, array in getattr(table, self.name).items():
            _check_length(array, table.capacity, f"{self.key} {name!r} of {where}")


def columns_of(dtypes: Iterable[tuple[str, str]], optional: bool, missing: Any = msgspec.NODEFAULT) -> Any:
    """Declare a dict of arrays with fixed names, each as long as the table's `capacity`; `optional`: or empty.

    missing: {} if trees of older releases did not have the columns.
    """
    return _Columns(dtypes, optional, missing)


def _check_length(array: np.ndarray, length: int, what: str) -> None:
    require(len(array) == length, f"the column {what} is {len(array)} long, not {length}")


class PerRow(Column):
    """Arrays with an entry for each row of a chunk. See `per_row`."""

    ONE, OPTIONAL, BY_NAME = range(3)  # an array; an array or None; a dict of arrays, or of pairs of arrays, by name

    def __init__(
        self,
        dtypes: tuple[str, ...],
        shape: int,
        fill: int,
        least: int | None,
        most: int | None,
        cleared: bool,
    ) -> None:
        forms = [_array_form(dtype) for dtype in dtypes]
        form = forms[0] if len(forms) == 1 else tuple_form(forms)
        if shape == self.BY_NAME:
            super().__init__(dict_form(str, form), dict)
        elif shape == self.OPTIONAL:
            super().__init__(form | None, lambda: None)
        else:
            super().__init__(form, lambda: np.zeros(0, dtypes[0]))
        self._shape, self._fill, self._least, self._most, self._cleared = shape, fill, least, most, cleared

    def grow(self, table: Any) -> None:
        """Make the arrays as long as the chunk's capacity."""
        value = getattr(table, self.name)
        if self._shape == self.BY_NAME:
            setattr(table, self.name, {name: self.grow_array(each, table.capacity) for name, each in value.items()})
        elif value is not None:
            setattr(table, self.name, self.grow_array(value, table.capacity))

    def grow_array(self, value: Any, capacity: int) -> Any:
        """Return a copy of an array, or of a pair of arrays, with this number of entries."""
        if isinstance(value, tuple):
            return tuple(self.grow_array(each, capacity) for each in value)
        out = np.full(capacity, self._fill, value.dtype) if self._fill else np.zeros(capacity, value.dtype)
        out[: len(value)] = value
        return out

    def to_comparable(self, table: Any) -> Any:
        """Leave out names without any value, because a column may be made before there is a value."""
        value = getattr(table, self.name)
        if self._shape != self.BY_NAME:
            return None if value is None else value[: table.size].tolist()
        shown: dict[str, Any] = {}
        for name, each in sorted(value.items()):
            first, *others = each if isinstance(each, tuple) else (each,)
            there = np.flatnonzero(first[: table.size] != self._fill)
            if len(there):
                shown[name] = [there.tolist(), *(array[there].tolist() for array in (first, *others))]
        return shown

    def check(self, table: Any, where: str) -> None:
        """Check the length of each array and the range of its numbers."""
        value = getattr(table, self.name)
        named = value.items() if self._shape == self.BY_NAME else [] if value is None else [("", value)]
        dead: np.ndarray | tuple[()] = ()
        if self._cleared:
            _check_length(table.alive, table.capacity, f"alive of {where}")
            dead = np.flatnonzero(table.alive == 0)
        for name, each in named:
            what = self.key if name == "" else f"{self.key} of {name!r}"
            first, *others = each if isinstance(each, tuple) else (each,)
            for array in (first, *others):
                _check_length(array, table.capacity, f"{what} of {where}")
            self._check_range(first, f"{what} of {where}")
            if len(dead):
                require((first[dead] == self._fill).all(), f"1: a cleared row of {where} still has something: {what}")

    def _check_range(self, array: np.ndarray, what: str) -> None:
        if not len(array):
            return
        low, high = int(array.min()), int(array.max())
        fine = (self._least is None or low >= self._least) and (self._most is None or high <= self._most)
        limits = [
            f"{word} {limit}"
            for word, limit in (("at least", self._least), ("at most", self._most))
            if limit is not None
        ]
        require(fine, f"{what} has numbers from {low} to {high}, but must have {' and '.join(limits)}")


def per_row(
    *dtypes: str,
    fill: int = 0,
    least: int | None = None,
    most: int | None = None,
    cleared: bool = False,
    optional: bool = False,
    by_name: bool = False,
) -> Any:
    """Declare an array with an entry for each row of a chunk, as long as the chunk's `capacity`.

    Args:
        dtypes: The dtype of the array; two dtypes declare pairs of arrays, which need `by_name`.
        fill: The entry of rows without a value.
        least: The smallest allowed entry of the first array; None if there is no limit.
        most: The largest allowed entry of the first array; None if there is no limit.
        cleared: Whether the entry of a cleared row must be `fill`.
        optional: Whether the attribute is None if no row has a value.
        by_name: Whether the attribute is a dict of such arrays, or of pairs of arrays.
    """
    shape = PerRow.BY_NAME if by_name else PerRow.OPTIONAL if optional else PerRow.ONE
    return PerRow(dtypes, shape, fill, least, most, cleared)
