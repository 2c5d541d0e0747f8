"""Kinds of columns, beside those that `schema` declares itself.

- Arrays as long as a chunk of rows, and arrays for each chunk or task.
- Columns that are saved as one long array: many short arrays, or many texts.
- A set of integers, stored as disjoint intervals, so that a mostly contiguous set of any size takes little memory.
- A table that stores equal values once, for example the schemas of blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import (
    I8,
    AnyColumn,
    Column,
    Persisted,
    SeveralKeys,
    array_of,
    dict_form,
    list_form,
    list_of,
    numbers,
    require,
    several,
    tuple_form,
    unique_dict,
)


def _array_form(dtype: str) -> Any:
    return array_of(np.dtype(dtype).str)


class _Columns(Column):
    """A dict of arrays with fixed names, each as long as the table's `capacity`; `optional`: or empty.

    missing: {} if trees of older releases did not have the columns.
    """

    def __init__(self, dtypes: Iterable[tuple[str, str]], optional: bool, missing: Any = msgspec.NODEFAULT) -> None:
        self._dtypes = {name: _array_form(dtype) for name, dtype in dtypes}
        self._optional = optional
        absent = (None,) if optional else ()
        fields = [(name, form | None if optional else form, *absent) for name, form in self._dtypes.items()]
        form = msgspec.defstruct("Columns", fields, forbid_unknown_fields=True, frozen=True)
        super().__init__(form, dict, load=self._decode, missing=form() if missing == {} else missing)

    def _decode(self, part: Any) -> Any:
        arrays = {name: getattr(part, name) for name in self._dtypes}
        if not self._optional:
            return arrays
        present = {name: array for name, array in arrays.items() if array is not None}
        if present and len(present) < len(arrays):
            raise ValueError(f"`{self.key}` has the columns {list(present)}, but not all of {list(arrays)}")
        return present

    def check(self, table: Any, where: str) -> None:
        for name, array in getattr(table, self.name).items():
            _check_length(array, table.capacity, f"{self.key} {name!r} of {where}")


columns_of: Any = _Columns
"""Declares such a dict."""


def _check_length(array: np.ndarray, length: int, what: str) -> None:
    require(len(array) == length, f"the column {what} is {len(array)} long, not {length}")


class PerRow(Column):
    """Arrays with an entry for each row of a chunk, as long as the chunk's `capacity`."""

    def __init__(
        self,
        *dtypes: str,
        fill: int = 0,
        least: int | None = None,
        most: int | None = None,
        cleared: bool = False,
        optional: bool = False,
        by_name: bool = False,
    ) -> None:
        """Declare the arrays of a column.

        Args:
            dtypes: The dtype of the array; two dtypes declare pairs of arrays, which need `by_name`.
            fill: The entry of rows without a value.
            least: The smallest allowed entry of the first array; None if there is no limit.
            most: The largest allowed entry of the first array; None if there is no limit.
            cleared: Whether the entry of a cleared row must be `fill`.
            optional: Whether the attribute is None if no row has a value.
            by_name: Whether the attribute is a dict of such arrays, or of pairs of arrays.
        """
        forms = [_array_form(dtype) for dtype in dtypes]
        form = forms[0] if len(forms) == 1 else tuple_form(forms)
        if by_name:
            super().__init__(dict_form(str, form), dict)
        elif optional:
            super().__init__(form | None, lambda: None)
        else:
            super().__init__(form, lambda: np.zeros(0, dtypes[0]))
        self._by_name, self._fill, self._least, self._most, self._cleared = by_name, fill, least, most, cleared

    def grow(self, table: Any) -> None:
        """Make the arrays as long as the chunk's capacity."""
        value = getattr(table, self.name)
        if self._by_name:
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
        if not self._by_name:
            return None if value is None else value[: table.size].tolist()
        shown: dict[str, Any] = {}
        for name, each in sorted(value.items()):
            first, *others = each if isinstance(each, tuple) else (each,)
            places = np.flatnonzero(first[: table.size] != self._fill)
            if len(places):
                shown[name] = [places.tolist(), *(array[places].tolist() for array in (first, *others))]
        return shown

    def check(self, table: Any, where: str) -> None:
        """Check the length of each array and the range of its numbers."""
        value = getattr(table, self.name)
        named = value.items() if self._by_name else [] if value is None else [("", value)]
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
        pairs = ("at least", self._least), ("at most", self._most)
        limits = [f"{word} {limit}" for word, limit in pairs if limit is not None]
        require(fine, f"{what} has numbers from {low} to {high}, but must have {' and '.join(limits)}")


per_row: Any = PerRow
"""Declares such arrays."""


PIECE = 4096
"""The number of texts in one piece of packed texts."""

_encode = msgspec.msgpack.Encoder().encode
_decode_texts = msgspec.msgpack.Decoder(list[str]).decode


class Joined(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the result of `join_columns` for 64-bit integers."""

    ends: I8
    values: I8


class JoinedBytes(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the result of `join_columns` for bytes. If there are no columns, its values are `I8`."""

    ends: I8
    values: AnyColumn


def join_columns(columns: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Return columns of one dtype as one concatenated array with the ends of the parts. Without columns it is i8."""
    parts = list(columns)
    ends = np.cumsum([len(part) for part in parts], dtype="i8")
    return {"ends": ends, "values": np.concatenate(parts) if parts else np.zeros(0, "i8")}


def split_columns(saved: Any) -> list[np.ndarray]:
    """Return the columns that `join_columns` joined, as views. `saved` is its result or a `Joined`.

    Raises ValueError if it cannot be the result of `join_columns`.
    """
    ends, values = (saved["ends"], saved["values"]) if isinstance(saved, dict) else (saved.ends, saved.values)
    edges = [0, *ends.tolist()]
    if edges != sorted(edges) or edges[-1] != len(values):
        raise ValueError(f"{len(values)} numbers cannot be split at {edges[1:][:5]}")
    return [values[a:b] for a, b in pairwise(edges)]


def pack_texts(texts: list[str]) -> dict[str, np.ndarray]:
    """Return texts as bytes, in pieces. One piece takes a millisecond to decode, during which other threads wait."""
    return join_columns([np.frombuffer(_encode(texts[at : at + PIECE]), "u1") for at in range(0, len(texts), PIECE)])


def unpack_texts(saved: Any) -> Iterator[list[str]]:
    """Iterate over packed texts, piece by piece. Raise ValueError or DecodeError if they are not packed texts."""
    for piece in split_columns(saved):
        yield _decode_texts(piece.data)


def rows_of(row: type[msgspec.Struct], key: str, array: str, by: str) -> Any:
    """Declare a dict of structs, which is saved as a list of tuples and one joined array.

    Args:
        row: The type of the structs.
        key: The key of the list.
        array: The field of the struct that contains an array, and the key of the joined array.
        by: The field whose value is the key in the dict.
    """
    types = get_type_hints(row, include_extras=True)
    names = [name for name in row.__struct_fields__ if name != array]

    def save(rows: dict[Any, Any]) -> tuple[Any, ...]:
        listed = [tuple(getattr(each, name) for name in names) for each in rows.values()]
        return listed, join_columns([getattr(each, array) for each in rows.values()])

    def load(entries: list[tuple[Any, ...]], arrays: Joined) -> dict[Any, Any]:
        made = [
            row(**dict(zip(names, entry, strict=True)), **{array: values})
            for entry, values in zip(entries, split_columns(arrays), strict=True)
        ]
        return unique_dict([(getattr(each, by), each) for each in made])

    entry = tuple_form(types[name] for name in names)
    return several({key: list_form(entry), array: Joined}, dict, save, load)


class _NumbersOfTexts(Column):
    """A dict from texts to integers, saved as packed texts and an array under these keys.

    It is made for a million entries. After loading, `loaded` is called with the table, the texts and the numbers.
    """

    def __init__(self, texts_key: str, numbers_key: str, loaded: Callable[[Any, np.ndarray, np.ndarray], None]) -> None:
        super().__init__(JoinedBytes, dict)
        self._texts_key, self._numbers_key, self._loaded = texts_key, numbers_key, loaded

    def forms(self) -> list[tuple[str, Any, Any]]:
        return [(self._texts_key, self.form, self.missing), (self._numbers_key, I8, self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        value = getattr(table, self.name)
        tree[self._texts_key] = pack_texts(list(value))
        tree[self._numbers_key] = np.fromiter(value.values(), "i8", len(value))

    def load(self, table: Any, loaded: Any) -> None:
        numbers = getattr(loaded, self._numbers_key)
        value: dict[str, int] = {}
        names = np.empty(len(numbers), object)
        done = 0
        for texts in unpack_texts(getattr(loaded, self._texts_key)):  # other threads run between two pieces
            first, done = done, done + len(texts)
            value.update(zip(texts, numbers[first:done].tolist(), strict=True))
            names[first:done] = texts
        if done != len(numbers):
            raise ValueError(f"{done} {self.name}, for {len(numbers)} rows")
        if len(value) != done:
            raise ValueError(f"{done} {self.name}, of which {len(value)} are distinct")
        setattr(table, self.name, value)
        self._loaded(table, names, numbers)

    def to_comparable(self, table: Any) -> Any:
        return dict(getattr(table, self.name))


numbers_of_texts: Any = _NumbersOfTexts
"""Declares such a dict."""


class IntervalSet(Persisted, array_like=True):
    """A set of integers, stored as sorted, disjoint, non-adjacent closed intervals."""

    starts: list[int] = list_of(int)
    ends: list[int] = list_of(int)

    def check_columns(self, where: str) -> None:
        """Raise BrokenInvariant unless the intervals are disjoint, ascending and not adjacent."""
        fine = len(self.starts) == len(self.ends) and all(a <= b for a, b in zip(self.starts, self.ends, strict=True))
        fine = fine and all(b + 1 < a for a, b in zip(self.starts[1:], self.ends, strict=False))
        require(fine, f"the intervals {where} are not in order")

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value) - 1
        return at >= 0 and value <= self.ends[at]

    def add(self, first: int, last: int | None = None) -> None:
        """Add the integers from `first` to `last`, which is included (None: only `first`)."""
        last = first if last is None else last
        if last < first:
            return
        low = bisect_left(self.ends, first - 1)
        high = bisect_right(self.starts, last + 1)
        if low < high:
            first = min(first, self.starts[low])
            last = max(last, self.ends[high - 1])
        self.starts[low:high] = [first]
        self.ends[low:high] = [last]

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts (first, last) of first..last that are not in the set, ascending."""
        gaps = []
        for at in range(bisect_left(self.ends, first), bisect_right(self.starts, last)):
            if first < self.starts[at]:
                gaps.append((first, self.starts[at] - 1))
            first = self.ends[at] + 1
        if first <= last:
            gaps.append((first, last))
        return gaps

    def difference(self, other: IntervalSet | None) -> Iterator[int]:
        """Iterate over the integers that are in this set and not in the other, ascending."""
        other = other or IntervalSet()
        for start, end in zip(self.starts, self.ends, strict=True):
            at = bisect_left(other.ends, start)
            while start <= end:
                if at == len(other.starts) or other.starts[at] > end:
                    yield from range(start, end + 1)
                    break
                yield from range(start, other.starts[at])
                start = other.ends[at] + 1
                at += 1

    def drop_up_to(self, value: int) -> None:
        """Remove all integers up to this one, which is included."""
        count = bisect_right(self.ends, value)
        del self.starts[:count], self.ends[:count]
        if self.starts and self.starts[0] <= value:
            self.starts[0] = value + 1


T = TypeVar("T", bound=Hashable)


class InternTable(Persisted, Generic[T]):
    """Stores equal values once and counts their uses. Each value has a small number; freed numbers are used again."""

    uses: list[int] = numbers()
    """The number of uses of each value, by number."""
    spare: list[int] = numbers()
    """The unused numbers below the number of values."""

    def __init__(self) -> None:
        super().__init__()
        self.number: dict[T, int] = {}
        self.values: list[T | None] = []

    def add(self, value: T) -> int:
        """Return the number of this value, and count one more use of it."""
        at = self.number.get(value)
        if at is not None:
            self.uses[at] += 1
            return at
        if self.spare:
            at = self.spare.pop()
            self.values[at], self.uses[at] = value, 1
        else:
            at = len(self.values)
            self.values.append(value)
            self.uses.append(1)
        self.number[value] = at
        return at

    def take(self, value: T, uses: int) -> int:
        """Do the same for several uses."""
        at = self.add(value)
        self.uses[at] += uses - 1
        return at

    def drop(self, at: int, uses: int = 1) -> None:
        """Count fewer uses of a value. It is removed with its last use."""
        self.uses[at] -= uses
        if not self.uses[at]:
            del self.number[self[at]]
            self.values[at] = None
            self.spare.append(at)

    def __getitem__(self, at: int) -> T:
        value = self.values[at]
        assert value is not None
        return value

    def set_values(self, values: list[T]) -> None:
        """Set the values by number, after the counts were restored. Entries of unused numbers are ignored."""
        self.values = [value if uses else None for value, uses in zip(values, self.uses, strict=True)]
        self.number = {value: at for at, value in enumerate(self.values) if value is not None}


class _Interning(SeveralKeys):
    """A column that is an `InternTable`. Its values are saved under a key of their own."""

    def to_comparable(self, table: Any) -> Any:
        """See `Column`."""
        interned: InternTable[Any] = getattr(table, self.name)
        return {**interned.to_comparable(), "values": list(interned.values)}


def interned(key: str, values_key: str, form: Any, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
    """Declare a column that is an `InternTable`. `save` encodes the list of its values, and `load` decodes it.

    The counts are saved under its own key, and the values under `values_key`.
    """

    def restore(loaded: Any, values: Any) -> InternTable[Any]:
        table: InternTable[Any] = InternTable()
        table.load(loaded)
        table.set_values(load(values))
        return table

    forms = {key: InternTable.form(), values_key: form}
    return _Interning(forms, InternTable, lambda table: (table.to_tree(), save(table.values)), restore)
