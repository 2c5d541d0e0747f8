"""Kinds of columns that are saved as one long array: many short arrays, or many texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, get_type_hints

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import I8, AnyColumn, Column, list_form, several, tuple_form, unique_dict

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
    """Iterate over packed texts, piece by piece. Raise ValueError or msgspec.DecodeError if they are not packed texts.

    Older releases saved the texts as one list, which is split into pieces here.
    """
    if isinstance(saved, list):
        for at in range(0, len(saved), PIECE):
            yield saved[at : at + PIECE]
    else:
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
    """A dict from texts to numbers, which is saved as packed texts and an array."""

    def __init__(self, texts_key: str, numbers_key: str, loaded: Callable[[Any, np.ndarray, np.ndarray], None]) -> None:
        super().__init__(JoinedBytes | list[str], dict)  # older releases saved a list
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


def numbers_of_texts(texts_key: str, numbers_key: str, loaded: Callable[[Any, np.ndarray, np.ndarray], None]) -> Any:
    """Declare a dict from texts to integers, saved as packed texts and an array under these keys.

    It is made for a million entries. After loading, `loaded` is called with the table, the texts and the numbers.
    """
    return _NumbersOfTexts(texts_key, numbers_key, loaded)
