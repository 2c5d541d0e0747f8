"""The rows of one partition as chunked columns, addressed by position: the order of reservation.

Positions and global indexes ascend together, so an index is found by two binary searches. A chunk is removed when all
its rows are cleared, so that an endless partition stays as small as its live rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np

from transfer_queue.core.columns.kinds import PerRow, per_row
from transfer_queue.core.columns.schema import (
    MOST,
    BrokenInvariant,
    Column,
    Count,
    Persisted,
    array_of,
    counter,
    custom_column,
    parts_of,
    require,
    scalar,
)
from transfer_queue.core.tables.tags import ChunkTags
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.tag_table import SentTags, TagTable

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
MASK = CHUNK - 1
_BITS, _PLACES = np.array(CHUNK_BITS), np.array(MASK)
"""The same as arrays: numpy takes as long for the conversion of a number as for an operation with a few rows."""
CONSUMED, CLAIMED = 1, 2  # the states of a row for a task; 0: neither

ValueColumns = tuple[np.ndarray, np.ndarray]
"""For each row of a chunk the number of a value's block (0: the row has no value), and the row in the block."""
Indexer = Any  # int | slice | np.ndarray: where in a chunk, or where in the caller's arrays


_encode = msgspec.msgpack.Encoder().encode
_decode_tags = msgspec.msgpack.Decoder(SentTags).decode


def indexes_in(column: bytes) -> np.ndarray:
    """Return the global indexes in a column of a message. Raise InvalidArgumentError if its length is wrong."""
    if len(column) % 8:
        raise InvalidArgumentError(f"a column of {len(column)} bytes contains no global indexes of 8 bytes each")
    return np.frombuffer(column, "<i8")


def sort_unique(indexes: np.ndarray) -> np.ndarray:
    """Return each index once, ascending. `np.unique` takes a microsecond for each index even if they are sorted."""
    ordered = indexes if (indexes[1:] > indexes[:-1]).all() else np.sort(indexes)
    again = ordered[1:] == ordered[:-1]
    return ordered[np.flatnonzero(np.append(True, ~again))] if again.any() else ordered


def rows_without(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return those of these distinct ascending rows that are not among others. For a few rows numpy is slow."""
    if not len(rows) or not len(others):
        return rows
    if len(rows) == 1 or len(others) == 1:
        return rows[rows != others] if len(others) == 1 else rows[:0] if rows[0] in others else rows
    return np.setdiff1d(rows, others)


def sort_with_values(indexes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indexes ascending, each once, and the value of each. `values`: i8, above 0; the last one counts.

    For indexes that are close together, as those of a deal are, a lookup table takes a tenth of the time of a sort.
    """
    if len(indexes) < 2:
        return indexes, values
    low = int(indexes.min())
    span = int(indexes.max()) - low + 1
    if span > 8 * len(indexes):
        distinct, last = np.unique(indexes[::-1], return_index=True)
        return distinct, values[::-1][last]
    table = np.zeros(span, "i8")
    table[indexes - low] = values
    at = table.nonzero()[0]
    return at + low, table[at]


def count_values(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each distinct number of at least one, ascending, and how often it occurs.

    For numbers that are close together, to count is faster than to sort.
    """
    low = int(numbers.min())
    if int(numbers.max()) - low > 8 * len(numbers):
        return np.unique(numbers, return_counts=True)
    counts = np.bincount(numbers - low)
    present = counts.nonzero()[0]
    return present + low, counts[present]


def runs_of(numbers: np.ndarray) -> Iterator[tuple[int, Indexer]]:
    """Iterate over (number, its places): each number once, ascending."""
    order = None
    if (numbers[1:] < numbers[:-1]).any():
        low = numbers - numbers.min()
        # numpy sorts numbers of 16 bits by radix
        order = np.argsort(low.astype("u2") if low.max() < 1 << 16 else low, kind="stable")
        numbers = numbers[order]
    edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(numbers)]):
        yield int(numbers[start]), slice(start, stop) if order is None else order[start:stop]


OfChunk = Annotated[int, msgspec.Meta(ge=0, le=CHUNK)]


class _PackedTags(Column):
    """The tags of a chunk, as bytes. Those of a loaded chunk are decoded when they are first read.

    Earlier releases saved a list with a dict for each row, which is still the form of tags with very many names.
    """

    def __init__(self) -> None:
        super().__init__(array_of("|u1") | None, None)

    def forms(self) -> list[tuple[str, Any, Any]]:
        """See `Column`."""
        return [("tags", self.form, self.missing)]

    def save(self, table: Chunk, tree: dict[str, Any]) -> None:
        """See `Column`."""
        packed = table._packed
        if table._tags is not None:
            packed = np.frombuffer(_encode(table._tags.pack(table.size)), "u1")
        tree["tags"] = packed

    def load(self, table: Chunk, loaded: Any) -> None:
        """See `Column`."""
        table._packed = loaded.tags

    def to_comparable(self, table: Chunk) -> Any:
        """See `Column`. A row without tags has an empty dict."""
        return [{}] * table.size if table.tags is None else table.tags.rows(slice(0, table.size))

    def check(self, table: Chunk, where: str) -> None:
        """See `Column`."""
        if table._packed is None:
            return
        try:
            tags = _decode_tags(table._packed.data)
            if isinstance(tags, TagTable):
                tags.check()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BrokenInvariant(f"the tags of {where} cannot be decoded: {error}") from None
        require(len(tags) <= table.capacity, f"{where} has more tags than rows")


class Chunk(Persisted):
    """Up to CHUNK consecutive rows.

    A dict of columns by field or task has no entry for a field or task that no row of the chunk needs.
    """

    size: int = scalar(OfChunk, 0)
    living: int = scalar(OfChunk, 0)
    # Not compared: a replay increases it in other steps.
    capacity: int = scalar(OfChunk, 0, compared=False)
    index: np.ndarray = per_row("i8", least=0)
    """Global indexes, ascending."""
    alive: np.ndarray = per_row("u1", most=1)
    """1 for rows that are not cleared."""
    waiting: np.ndarray = per_row("u1", most=1, cleared=True)
    """1 for pre-allocated rows that are not taken yet."""
    changed: np.ndarray = per_row("i8", least=0, cleared=True)
    """The version of the partition at the last change of tags or fields; 0 if there was none, and for cleared rows."""
    group: np.ndarray | None = per_row("i8", fill=-1, cleared=True, optional=True)
    """The number of the declared group; -1 if the row has none."""
    field: dict[str, ValueColumns] = per_row("i8", "i4", cleared=True, by_name=True)
    """Field -> its values. A field that no row of the chunk has may have no columns."""
    consumed: dict[str, np.ndarray] = per_row("u1", most=CLAIMED, cleared=True, by_name=True)
    """Task -> CONSUMED, CLAIMED or 0."""
    dealt: dict[str, np.ndarray] = per_row("i8", cleared=True, by_name=True)
    """Task -> number of the dealt batch; 0 if there is none."""
    owner: np.ndarray = per_row("i4")
    """Number of the client that reserved the row; 0 if there is none."""
    held: dict[str, np.ndarray] = per_row("u2", cleared=True, by_name=True)
    """Task -> the number of references of clients to the row (`core.tables.windows`)."""
    finished: dict[str, np.ndarray] = per_row("u2", cleared=True, by_name=True)
    """Task -> how often the row was finished."""
    lost: dict[str, np.ndarray] = per_row("i4", cleared=True, by_name=True)
    """Field -> number of the event that lost the value; 0 if it is not lost."""
    packed_tags: Any = custom_column(_PackedTags())

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str | None] | None = None
        """The key of each row, None if it has none. The partition saves them, in the order of their creation."""
        self._tags: ChunkTags | None = None
        self._packed: np.ndarray | None = None  # u1: the tags as they were saved, until one of them is read
        self.numbers: dict[str, np.ndarray] = {}
        """Watched tag -> its values; NaN if it is missing or not a number."""
        self.wrong: dict[str, set[int]] = {}
        """Watched tag -> the rows in which it is not a number."""

    def grow(self, size: int) -> None:
        """Increase the capacity of every column to at least `size` rows, to a power of two."""
        if size > self.capacity:
            self._set_capacity(min(1 << max(4, (size - 1).bit_length()), CHUNK))

    def _set_capacity(self, capacity: int) -> None:
        self.capacity = capacity
        for column in _PER_ROW.values():
            column.grow(self)
        for tag, known in self.numbers.items():
            self.numbers[tag] = np.append(known, np.full(self.capacity - len(known), math.nan))
        if self.keys is not None:
            self.keys += [None] * (self.capacity - len(self.keys))
        if self._tags is not None:
            self._tags.grow(self.capacity)

    @classmethod
    def with_names_of(cls, other: Chunk, first_index: int) -> Chunk:
        """Return a chunk with the rows of another one, but other global indexes, and with their keys and tags only.

        It takes the keys and tags over, so the other chunk must not be used for them afterwards.
        """
        made = cls()
        made._set_capacity(other.capacity)
        made.size, made.living, made.alive = other.size, other.living, other.alive
        made.index[: made.size] = np.arange(first_index, first_index + made.size)
        made.keys, made._tags, made._packed = other.keys, other._tags, other._packed
        made.numbers, made.wrong = other.numbers, other.wrong
        return made

    def key_list(self) -> list[str | None]:
        """Return the list of keys. Makes it if it is missing."""
        if self.keys is None:
            self.keys = [None] * self.capacity
        return self.keys

    def take_keys(self, at: np.ndarray) -> list[str]:
        """Remove the keys of these rows, and return them."""
        keys, taken = self.keys, []
        if keys is not None:
            for a in at.tolist():
                key = keys[a]
                if key is not None:
                    taken.append(key)
                    keys[a] = None
        return taken

    def clear_tags(self, at: np.ndarray) -> None:
        """Remove the tags of these rows."""
        tags = self.tags
        if tags is not None:
            tags.clear(at)
            for tag, numbers in self.numbers.items():
                numbers[at] = math.nan
                self.wrong[tag].difference_update(at.tolist())

    @property
    def tags(self) -> ChunkTags | None:
        """The tags of the rows; None if no row has had tags."""
        if self._packed is not None:
            self._tags = ChunkTags.from_saved(_decode_tags(self._packed.data), self.capacity)
            self._packed = None
        return self._tags

    def tag_columns(self) -> ChunkTags:
        """Return the tags of the rows. Makes them if they are missing."""
        tags = self.tags
        if tags is None:
            tags = self._tags = ChunkTags(self.capacity)
        return tags

    def field_columns(self, name: str) -> ValueColumns:
        """Return the columns of a field. Makes them if they are missing."""
        columns = self.field.get(name)
        if columns is None:
            columns = self.field[name] = (np.zeros(self.capacity, "i8"), np.zeros(self.capacity, "i4"))
        return columns

    def _column(self, columns: dict[str, np.ndarray], name: str, dtype: str) -> np.ndarray:
        column = columns.get(name)
        if column is None:
            column = columns[name] = np.zeros(self.capacity, dtype)
        return column

    def consumed_column(self, task: str) -> np.ndarray:
        """Return the consumption column of a task. Makes it if it is missing."""
        column = self.consumed.get(task)
        if column is None:
            column = self.consumed[task] = np.zeros(self.capacity, "u1")
        return column

    def dealt_column(self, task: str) -> np.ndarray:
        """Return the dealt-batch column of a task. Makes it if it is missing."""
        return self._column(self.dealt, task, "i8")

    def held_columns(self, task: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the (held, finished) columns of a task. Makes them if they are missing."""
        return self._column(self.held, task, "u2"), self._column(self.finished, task, "u2")

    def watch(self, tag: str) -> None:
        """Keep this tag as a column of numbers from now on."""
        self.numbers[tag] = np.full(self.capacity, math.nan)
        self.wrong[tag] = set()
        self.set_watched(tag, slice(0, self.size))

    def set_watched(self, tag: str, at: Indexer) -> None:
        """Update the numbers of a watched tag of these rows from their tags."""
        if self.tags is None:
            return
        numbers, wrong = self.tags.numbers(tag, at)
        self.numbers[tag][at] = numbers
        if self.wrong[tag] or wrong.any():
            places = np.arange(self.capacity)[at]
            self.wrong[tag].difference_update(places[~wrong].tolist())
            self.wrong[tag].update(places[wrong].tolist())

    def group_column(self) -> np.ndarray:
        """Return the group column. Makes it if it is missing."""
        if self.group is None:
            self.group = np.full(self.capacity, -1, "i8")
        return self.group


_PER_ROW = {column.name: column for column in Chunk.declared_columns() if isinstance(column, PerRow)}


RowsOfChunk = tuple[int, Chunk, Indexer, Indexer]
"""Rows of one chunk: its number, the chunk, their places in it, and their places among the rows of an operation.

Each put and each lookup makes some, so that it is a plain tuple.
"""


class RowTable(Persisted):
    """The rows of one partition."""

    chunks: dict[int, Chunk] = parts_of(Count, Chunk)
    """The chunks by number, ascending."""
    end: int = counter()
    """The position of the next row."""
    count: int = counter()
    """The number of live rows."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[str] = []
        """The tags that are also kept as columns of numbers. Derived from the tags, and not part of the state."""
        self._firsts: list[int] | None = None  # first global index of each chunk, cached with
        self._keys: list[int] = []  # the chunk numbers

    def append(self, first_index: int, count: int, *, owner: int = 0, waiting: bool = False) -> list[RowsOfChunk]:
        """Add rows with consecutive global indexes. Returns where they are; their places are slices."""
        added: list[RowsOfChunk] = []
        self.count += count
        done = 0
        while done < count:
            end = self.end
            key, first = end >> CHUNK_BITS, end & MASK
            chunk = self.chunks.get(key)
            if chunk is None:
                chunk = self.chunks[key] = Chunk()
                if key:
                    chunk.grow(CHUNK)  # a partition that has filled a chunk fills the next one soon
                for tag in self.watched:
                    chunk.watch(tag)
                self._firsts = None
            take = min(count - done, CHUNK - first)
            last = first + take
            if last > chunk.capacity:
                chunk.grow(last)
            at = slice(first, last)
            if take == 1:  # numpy sets one entry faster than a slice
                chunk.index[first], chunk.alive[first], chunk.owner[first] = first_index + done, 1, owner
            else:
                chunk.index[at] = np.arange(first_index + done, first_index + done + take)
                chunk.alive[at], chunk.owner[at] = 1, owner
            if waiting:
                chunk.waiting[at] = 1
            chunk.size = last
            chunk.living += take
            added.append((key, chunk, at, slice(done, done + take)))
            self.end = end + take
            done += take
        return added

    def add_chunk(self, key: int, chunk: Chunk) -> None:
        """Add a chunk after all others."""
        self.chunks[key] = chunk
        for tag in self.watched:
            if tag not in chunk.numbers:
                chunk.watch(tag)
        self.end = (key << CHUNK_BITS) + chunk.size
        self.count += chunk.living
        self._firsts = None

    def watch(self, tag: str) -> None:
        """Keep a tag as a column of numbers. This reads all existing tags once."""
        if tag not in self.watched:
            self.watched.append(tag)
            for chunk in self.chunks.values():
                chunk.watch(tag)

    def split(self, positions: np.ndarray) -> list[RowsOfChunk]:
        """Return the rows at these positions, by chunk."""
        count = len(positions)
        if not count:
            return []
        first = positions.item(0) >> CHUNK_BITS
        if count > 1:
            keys = positions >> _BITS
            # to compare bytes is faster than to compare arrays if they are few
            if keys.item(-1) != first or keys.tobytes() != keys[:1].tobytes() * count:
                parts = [(self.chunks.get(key), key, where) for key, where in runs_of(keys)]
                return [(key, chunk, positions[at] & _PLACES, at) for chunk, key, at in parts if chunk is not None]
        chunk = self.chunks.get(first)
        return [] if chunk is None else [(first, chunk, positions & _PLACES, slice(None))]

    def _chunk_starts(self) -> list[int]:
        if self._firsts is None:
            self._firsts = [int(chunk.index[0]) for chunk in self.chunks.values()]
            self._keys = list(self.chunks)
        return self._firsts

    def position_of(self, index: int) -> int:
        """Return the position of a global index; -1 if it is not a live row of this partition."""
        starts = self._firsts or self._chunk_starts()
        at = bisect_right(starts, index) - 1
        if at < 0:
            return -1
        key = self._keys[at]
        chunk = self.chunks[key]
        # usually the indexes in a chunk have no gaps; otherwise it is searched
        place = index - starts[at]
        if place >= chunk.size or chunk.index.item(place) != index:
            place = int(chunk.index[: chunk.size].searchsorted(index))
            if place == chunk.size or chunk.index.item(place) != index:
                return -1
        return (key << CHUNK_BITS) + place if chunk.alive.item(place) else -1

    def positions_of(self, indexes: np.ndarray) -> np.ndarray:
        """Return the position of each global index; -1 if it is not a live row of this partition."""
        count = len(indexes)
        if count == 1:
            return np.array([self.position_of(indexes.item(0))])
        if not self.chunks or not count:
            return np.full(count, -1, "i8")
        first, starts = indexes.item(0), self._firsts or self._chunk_starts()
        low = bisect_right(starts, first) - 1
        if low >= 0 and indexes.item(-1) - first == count - 1:
            # Most batches are consecutive rows of one chunk, which all live. To compare bytes is faster than arrays.
            key, place = self._keys[low], first - starts[low]
            chunk, run = self.chunks[key], slice(place, place + count)
            if chunk.index[run].tobytes() == indexes.tobytes() and 0 not in chunk.alive[run].tobytes():
                start = (key << CHUNK_BITS) + place
                return np.arange(start, start + count)
        low = bisect_right(starts, int(indexes.min())) - 1
        if low >= 0 and (low + 1 == len(starts) or int(indexes.max()) < starts[low + 1]):
            return self._positions_in(self._keys[low], indexes)
        out = np.full(count, -1, "i8")
        high = bisect_right(starts, int(indexes[-1]))
        if low >= 0 and high - low <= count and (indexes[1:] >= indexes[:-1]).all():
            edges = indexes.searchsorted(starts[low:high]).tolist()  # faster, as there are more rows than chunks
            for key, begin, end in zip(self._keys[low:high], edges, [*edges[1:], count], strict=True):
                if begin < end:
                    out[begin:end] = self._positions_in(key, indexes[begin:end])
            return out
        at = np.searchsorted(starts, indexes, "right") - 1
        for k, places in runs_of(at):
            if k >= 0:
                out[places] = self._positions_in(self._keys[k], indexes[places])
        return out

    def live_positions_of(self, indexes: np.ndarray) -> np.ndarray:
        """Return the positions of those of these global indexes that are live rows of this partition."""
        positions = self.positions_of(indexes)
        return positions[positions >= 0]

    def _positions_in(self, key: int, indexes: np.ndarray) -> np.ndarray:
        """Do the same for indexes that are in this chunk or nowhere, and not below its first index."""
        chunk = self.chunks[key]
        first, last = int(chunk.index[0]), chunk.size - 1
        if int(chunk.index[last]) - first == last:  # its indexes have no gaps
            places: np.ndarray = np.minimum(indexes - first, last)
        else:
            places = np.minimum(chunk.index[: chunk.size].searchsorted(indexes), last)
        good = (chunk.index[places] == indexes) & (chunk.alive[places] != 0)
        places += key << CHUNK_BITS
        if not good.all():
            places[~good] = -1
        return places

    def has_cleared(self, positions: Iterable[int]) -> bool:
        """Return whether any of these positions, all below `end`, was cleared."""
        for p in positions:
            chunk = self.chunks.get(p >> CHUNK_BITS)
            if chunk is None or not chunk.alive[p & MASK]:
                return True
        return False

    def indexes_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the global index of each position. Their chunks must exist."""
        if len(positions) == 1:
            position = positions.item()
            at = position & MASK
            return self.chunks[position >> CHUNK_BITS].index[at : at + 1].copy()
        parts = self.split(positions)
        if len(parts) == 1:
            _, chunk, places, _ = parts[0]
            return chunk.index[places]
        out = np.empty(len(positions), "i8")
        for _, chunk, at, where in parts:
            out[where] = chunk.index[at]
        return out

    def live_positions(self) -> np.ndarray:
        """Return all live positions, ascending, including those of pre-allocated rows."""
        parts = [np.flatnonzero(chunk.alive[: chunk.size]) + (key << CHUNK_BITS) for key, chunk in self.chunks.items()]
        return np.concatenate(parts) if parts else np.zeros(0, "i8")

    def first_positions(self, count: int = MOST, below: int = MOST) -> np.ndarray:
        """Return the first `count` live positions below `below`, ascending, without those of pre-allocated rows."""
        parts = [np.zeros(0, "i8")]
        for key, chunk in self.chunks.items():
            start = key << CHUNK_BITS
            size = min(chunk.size, below - start)
            if count <= 0 or size <= 0:
                break
            places = np.flatnonzero((chunk.alive[:size] == 1) & (chunk.waiting[:size] == 0))[:count]
            count -= len(places)
            parts.append(places + start)
        return np.concatenate(parts)

    def first_position(self) -> int:
        """Return the position of the first row that `first_positions` returns, or `end`."""
        positions = self.first_positions(1)
        return int(positions[0]) if len(positions) else self.end

    def owners_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the client that reserved each row."""
        out = np.zeros(len(positions), "i4")
        for _, chunk, at, where in self.split(positions):
            out[where] = chunk.owner[at]
        return out

    def drop_if_empty(self, key: int) -> bool:
        """Remove a full chunk without live rows; return whether it is removed. A chunk that is not full stays."""
        chunk = self.chunks.get(key)
        if chunk is None or chunk.living or chunk.size < CHUNK:
            return False
        del self.chunks[key]
        self._firsts = None
        return True
