"""The columns of published blocks and of their extents, with the number of values for which each block is needed.

A block is needed while a live row has a value in it. It has one location, or two in extents of different units; the
first one is returned to readers. An extent can be freed once its writer has closed it and no needed block is in it.
Block numbers start at 1 and are never used again (0 means "no value"). Consecutive blocks are in one chunk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.core.columns.kinds import (
    InternTable,
    JoinedBytes,
    columns_of,
    interned,
    join_columns,
    split_columns,
)
from transfer_queue.core.columns.schema import Count, Persisted, counter, part, parts_of, scalar
from transfer_queue.core.tables.digest_index import DigestIndex
from transfer_queue.core.tables.extents import PublishedExtents
from transfer_queue.core.tables.rows import Indexer, count_values, runs_of
from transfer_queue.messages.descriptors import BlockLocation, Blocks, FieldSpec, NewBlock

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
FIELDS = (
    ("unit", "i4"), ("extent", "i8"), ("offset", "i8"), ("generation", "i8"), ("nbytes", "i8"),
    ("rows", "i4"), ("schema", "i4"), ("dims", "i4"), ("live", "i8"), ("owner", "i8"),
)  # fmt: skip
BLOCK = np.dtype(list(FIELDS), align=True)
PLACE = ("unit", "extent", "offset", "generation")
"""The columns of a location."""


def _place(columns: dict[str, np.ndarray], at: int) -> BlockLocation:
    unit, extent, offset, generation = (int(columns[name][at]) for name in PLACE)
    return BlockLocation(unit, extent, offset, generation)


OfChunk = Annotated[int, msgspec.Meta(ge=0, le=CHUNK)]


class BlockChunk(Persisted):
    """The columns of CHUNK consecutive block numbers."""

    alive: int = scalar(OfChunk, 0)
    """The number of blocks that are still needed."""
    capacity: int = scalar(OfChunk, 16)
    columns: dict[str, np.ndarray] = columns_of(FIELDS, optional=False)
    second: dict[str, np.ndarray] = columns_of([each for each in FIELDS if each[0] in PLACE], optional=True)
    """The second locations; extent 0 if a block has none. Empty until a block has one."""
    shared: dict[str, np.ndarray] = columns_of([("values", "i8")], optional=True, missing={})
    """The number of values for which a block with `NewBlock.slots` was put; 0 for other blocks.

    Empty until there is such a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._use(np.zeros(self.capacity, BLOCK))

    def _use(self, blocks: np.ndarray) -> None:
        """Keep the columns in this array, in which those of a block are set together."""
        self.blocks = blocks
        self.columns = {name: blocks[name] for name, _ in FIELDS}

    def derive(self) -> None:
        """Move the loaded columns into one array, unless their length is wrong, which a check reports."""
        loaded = self.columns
        if all(len(column) == self.capacity for column in loaded.values()):
            self._use(np.zeros(self.capacity, BLOCK))
            for name, column in loaded.items():
                self.columns[name][:] = column

    def grow(self, at: int) -> None:
        """Increase the capacity so that it includes this block."""
        while self.capacity <= at:
            self.capacity *= 2
        blocks = np.zeros(self.capacity, BLOCK)
        blocks[: len(self.blocks)] = self.blocks
        self._use(blocks)
        for columns in (self.second, self.shared):
            for name, column in columns.items():
                columns[name] = np.append(column, np.zeros(self.capacity - len(column), column.dtype))

    def second_columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the second locations. Makes them if they are missing."""
        if not self.second:
            self.second = {name: np.zeros(self.capacity, kind) for name, kind in FIELDS if name in PLACE}
        return self.second

    def note_shared(self, at: int | np.ndarray, values: int | np.ndarray) -> None:
        """Note that blocks whose rows may have several values of a field were put for these numbers of values."""
        if not self.shared:
            self.shared = {"values": np.zeros(self.capacity, "i8")}
        self.shared["values"][at] = values

    def exchange(self, at: np.ndarray) -> None:
        """Exchange the first and the second location of these blocks."""
        for name in PLACE:
            first, second = self.columns[name], self.second[name]
            first[at], second[at] = second[at], first[at]

    def locations(self, at: np.ndarray) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
        """Return the columns of the first and of the second locations, each with those of these blocks that have it."""
        first = [(self.columns, at)]
        return [*first, (self.second, at[self.second["extent"][at] > 0])] if self.second else first

    def second_units(self, at: np.ndarray) -> np.ndarray:
        """Return the unit of the second location of each of these blocks; -1 if it has none."""
        if not self.second:
            return np.full(len(at), -1)
        return np.where(self.second["extent"][at] > 0, self.second["unit"][at], -1)

    def places(self, at: int) -> list[BlockLocation]:
        """Return the locations of a block."""
        return [_place(columns, at) for columns, stored in self.locations(np.array([at])) if len(stored)]


_SENT = ("unit", "offset", "generation", "nbytes", "rows")  # the columns of which a reply has one entry for each block
MAX_PLACES = 2
_MOVES = ("unit", "offset", "generation")  # those of them that depend on the location


class LiveBlock(NamedTuple):
    """A needed block."""

    number: int
    needed: int
    """The number of values of it that are needed."""
    locations: list[BlockLocation]
    nbytes: int


class BlocksOfChunk(NamedTuple):
    """Blocks of one chunk."""

    number: int
    """The number of the chunk."""
    chunk: BlockChunk
    places: np.ndarray
    """Their places in the chunk."""
    at: Indexer
    """Their places among the blocks of an operation."""


Schema = tuple[FieldSpec, ...]


def _count_distinct(values: np.ndarray) -> list[tuple[int, int]]:
    """Return each distinct value with its number of entries."""
    if len(values) == 1:
        return [(int(values[0]), 1)]
    unique, counts = np.unique(values, return_counts=True)
    return list(zip(unique.tolist(), counts.tolist(), strict=True))


def _number_distinct(values: np.ndarray) -> tuple[list[int], bytes]:
    """Return the distinct values, and for each entry (i4) the position of its value among them."""
    if len(values) and (values == values[0]).all():
        return [int(values[0])], bytes(4 * len(values))
    distinct, at = np.unique(values, return_inverse=True)
    return distinct.tolist(), at.astype("i4").tobytes()


def pair_sums(firsts: np.ndarray, seconds: np.ndarray, values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first, second, sum of values) of each distinct pair. The sums must be less than 2**53."""
    if not len(values):
        return []
    if len(values) == 1 or ((firsts == firsts[0]).all() and (seconds == seconds[0]).all()):
        return [(int(firsts[0]), int(seconds[0]), int(values.sum()))]
    one, at = np.unique(firsts, return_inverse=True)
    other, to = np.unique(seconds, return_inverse=True)
    pairs = at * len(other) + to
    totals, distinct = np.bincount(pairs, values), np.unique(pairs)
    columns = one[distinct // len(other)], other[distinct % len(other)], totals[distinct].astype("i8")
    return list(zip(*(column.tolist() for column in columns)))


def _renumber(column: np.ndarray, at: np.ndarray, numbers: dict[int, int]) -> None:
    """Replace the entries of a column at these places by other numbers."""
    distinct, where = np.unique(column[at], return_inverse=True)
    column[at] = np.array([numbers[value] for value in distinct.tolist()], column.dtype)[where]


def places_of(block: NewBlock) -> list[BlockLocation]:
    """Return all locations of a block as its writer publishes it."""
    origin = block.session, block.begin, block.proof
    first = BlockLocation(block.unit, block.extent, block.offset, block.generation, block.length, *origin)
    return [first, *block.copies]


class BlockTable(PublishedExtents):
    """All blocks that live rows need, and the extents that contain them."""

    chunks: dict[int, BlockChunk] = parts_of(Count, BlockChunk)
    schemas: InternTable[Schema] = interned(
        "schemas",
        "schema_values",
        list[list[FieldSpec] | None],
        save=msgspec.to_builtins,
        load=lambda values: [tuple(value or ()) for value in values],
    )
    dims: InternTable[bytes] = interned(
        "dims",
        "dims_values",
        JoinedBytes,
        save=lambda values: join_columns(np.frombuffer(value or b"", "u1") for value in values),
        load=lambda values: [value.tobytes() for value in split_columns(values)],
    )
    equal: DigestIndex = part(DigestIndex, missing=[])
    """The digests of values in these blocks."""
    live_bytes: int = counter()
    """Bytes of the blocks; each block counts once, whatever its number of locations is."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """Number of a partition -> unit -> bytes of its blocks there, for each location; may be 0. Derived."""
        self.saved: Counter[int] = Counter()
        """Number of a partition -> bytes that its blocks would need more if no two values shared them. Derived.

        A value of a block counts with the mean length of its values.
        """
        self.newest_schema: Schema = ()
        """The schema of the block that was added last; equal schemas are one object. Not part of the state."""

    def add(self, number: int, writer: str, block: NewBlock, values: int, owner: int) -> None:
        """Add block `number`, which is needed for `values` values. `owner` is the number of the partition."""
        key, at = number >> CHUNK_BITS, number & (CHUNK - 1)
        chunk = self.chunks.get(key)
        if chunk is None:
            chunk = self.chunks[key] = BlockChunk()
        if at >= chunk.capacity:
            chunk.grow(at)
        schema = self.schemas.add(tuple(block.schema))
        self.newest_schema = self.schemas.values[schema] or ()
        chunk.blocks[at] = (
            block.unit, block.extent, block.offset, block.generation, block.nbytes,
            block.rows, schema, self.dims.add(block.dims), values, owner,
        )  # fmt: skip
        chunk.alive += 1
        self.live_bytes += block.nbytes
        self.stored[owner][block.unit] += block.nbytes
        self.put_block(block, writer, block.nbytes)
        if block.slots is not None:
            chunk.note_shared(at, values)
            self._count_saved(chunk, np.array([at]), 1)
        for place in block.copies:
            for name, column in chunk.second_columns().items():
                column[at] = getattr(place, name)
            self.stored[owner][place.unit] += block.nbytes
            self.put_block(place, writer, block.nbytes)

    def retain(self, numbers: np.ndarray) -> None:
        """Count one needed value more for each entry. The blocks are needed already."""
        unique, counts = count_values(numbers)
        for _, chunk, at, where in self._split(unique):
            self._count_saved(chunk, at, -1)
            chunk.columns["live"][at] += counts[where]
            self._count_saved(chunk, at, 1)
            shared = chunk.shared["values"][at] if chunk.shared else np.zeros(len(at), "i8")
            chunk.note_shared(at, np.maximum(shared, chunk.columns["live"][at]))
        self.changes += 1

    def _split(self, numbers: np.ndarray) -> Iterator[BlocksOfChunk]:
        """Iterate over these blocks, by chunk."""
        keys, at = numbers >> CHUNK_BITS, numbers & (CHUNK - 1)
        is_one = len(keys) and keys[0] == keys[-1] and (keys == keys[0]).all()
        runs = [(int(keys[0]), slice(None))] if is_one else runs_of(keys) if len(keys) else ()
        for key, where in runs:
            chunk = self.chunks.get(key)
            if chunk is not None:
                yield BlocksOfChunk(key, chunk, at[where], where)

    def _count_saved(self, chunk: BlockChunk, at: np.ndarray, sign: int) -> None:
        """Count what these blocks save, for their partitions."""
        columns = chunk.columns
        widths = np.array([len(self.schemas[number]) for number in columns["schema"][at].tolist()], "i8")
        stored = columns["rows"][at] * widths
        saved = np.maximum(columns["live"][at] - stored, 0) * (columns["nbytes"][at] // np.maximum(stored, 1))
        for owner, nbytes in zip(columns["owner"][at].tolist(), saved.tolist(), strict=True):
            self.saved[owner] += sign * nbytes

    def release(self, numbers: np.ndarray) -> int:
        """Count one needed value fewer for each entry other than 0. Return the bytes of the blocks that are removed."""
        numbers = numbers[numbers > 0]
        if len(numbers) == 1:
            return self._release(int(numbers[0]) >> CHUNK_BITS, numbers & (CHUNK - 1), 1)
        unique, counts = count_values(numbers) if len(numbers) else (numbers, numbers)
        return sum(self._release(key, at, counts[where]) for key, _, at, where in self._split(unique))

    def _release(self, key: int, at: np.ndarray, counts: np.ndarray | int) -> int:
        """Do the same for distinct blocks of one chunk."""
        self.changes += 1
        chunk = self.chunks[key]
        column = chunk.columns
        if chunk.shared:
            self._count_saved(chunk, at, -1)
        column["live"][at] -= counts
        if chunk.shared:
            self._count_saved(chunk, at, 1)
        at = at[column["live"][at] == 0]
        if not len(at):
            return 0
        tables: tuple[tuple[InternTable[Any], str], ...] = ((self.schemas, "schema"), (self.dims, "dims"))
        for table, name in tables:
            for value, uses in _count_distinct(column[name][at]):
                table.drop(value, uses)
        if self.equal.of_block:
            for number in at.tolist():
                self.equal.forget_block((key << CHUNK_BITS) + number)
        nbytes = int(column["nbytes"][at].sum())
        self.live_bytes -= nbytes
        for location, places in chunk.locations(at):
            self._leave(chunk, location, places)
        chunk.alive -= len(at)
        if not chunk.alive:
            del self.chunks[key]
        return nbytes

    def _leave(self, chunk: BlockChunk, columns: dict[str, np.ndarray], at: np.ndarray) -> None:
        """Remove these blocks from their locations in these columns of the chunk."""
        self._store(chunk, columns, at, -1)
        self._leave_extents(columns, at)

    def _leave_extents(self, columns: dict[str, np.ndarray], at: np.ndarray) -> None:
        units = columns["unit"][at]
        distinct = set(units.tolist())
        for unit in distinct:
            of_unit = at if len(distinct) == 1 else at[units == unit]
            for extent, blocks in _count_distinct(columns["extent"][of_unit]):
                self.extents[unit, extent].blocks -= blocks
                self.free_if_done((unit, extent))

    def _store(self, chunk: BlockChunk, columns: dict[str, np.ndarray], at: np.ndarray, sign: int = 1) -> None:
        """Count the bytes of these blocks for their partitions, in the units of these columns."""
        sizes = chunk.columns["nbytes"][at]
        for owner, unit, nbytes in pair_sums(chunk.columns["owner"][at], columns["unit"][at], sizes):
            self.stored[owner][unit] += sign * nbytes

    def absorb(self, other: BlockTable, owners: dict[int, int], shift: int) -> None:
        """Take over all blocks and extents of another table, which must not be used afterwards.

        Args:
            other: The table. None of its extents is in this table.
            owners: The number of each partition in `other` -> its number from now on.
            shift: The offset that is added to the numbers of its chunks. This table has no chunk of these numbers.
        """
        self.changes += 1
        self.equal.absorb(other.equal, owners, shift << CHUNK_BITS)
        for place, extent in other.extents.items():
            self.enter_empty(place, extent)
            self.extents[place].blocks = extent.blocks
        for key, chunk in other.chunks.items():
            columns = chunk.columns
            at = np.flatnonzero(columns["live"])
            tables: tuple[tuple[InternTable[Any], InternTable[Any], str], ...] = (
                (self.schemas, other.schemas, "schema"), (self.dims, other.dims, "dims"),
            )  # fmt: skip
            for table, values, name in tables:
                _renumber(
                    columns[name],
                    at,
                    {value: table.take(values[value], uses) for value, uses in _count_distinct(columns[name][at])},
                )
            _renumber(columns["owner"], at, owners)
            self.chunks[key + shift] = chunk
            self.live_bytes += int(columns["nbytes"][at].sum())
            self._count_chunk(chunk, at)

    def places(self, number: int) -> list[BlockLocation]:
        """Return the one or two locations of a needed block. Readers get the first one."""
        return self.chunks[number >> CHUNK_BITS].places(number & (CHUNK - 1))

    def units_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first unit of each of these needed blocks, and its second one (-1: none)."""
        second = np.full(len(numbers), -1, "i8")
        for _, chunk, at, where in self._split(numbers):
            second[where] = chunk.second_units(at)
        return self.column("unit", numbers), second

    def needed_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return those of these blocks that some live row needs, in order."""
        alive = np.zeros(len(numbers), bool)
        for _, chunk, at, where in self._split(numbers):
            alive[where] = chunk.columns["live"][np.minimum(at, chunk.capacity - 1)] > 0
        return numbers[alive]

    def relocate(
        self,
        numbers: np.ndarray,
        place: BlockLocation,
        offsets: np.ndarray,
        left: int,
        writer: str,
        mirrors: Collection[int] = (),
    ) -> None:
        """Record that blocks (ascending) are now at these offsets in the extent of `place`, and not in unit `left`.

        If `left` is -1, they keep their location too, and readers get the new one first if the other one is in one of
        `mirrors`. Blocks that are not needed any more, or whose locations do not match, are unchanged.
        """
        for _, chunk, at, where in self._split(numbers):
            to, first, second = offsets[where], chunk.columns["unit"][at], chunk.second_units(at)
            needed = (chunk.columns["live"][at] > 0) & ((first == left) | (first != place.unit))
            if left < 0:
                needed &= second < 0
                self._enter(chunk, chunk.second_columns(), at[needed], to[needed], place, writer)
                if mirrors and place.unit not in mirrors:
                    chunk.exchange(at[needed & np.isin(first, list(mirrors))])
                continue
            needed &= (second == left) | (second != place.unit)
            for columns, units in ((chunk.columns, first), (chunk.second, second)):
                chosen = needed & (units == left)
                if chosen.any():
                    self._enter(chunk, columns, at[chosen], to[chosen], place, writer, leave=True)

    def _enter(
        self,
        chunk: BlockChunk,
        columns: dict[str, np.ndarray],
        at: np.ndarray,
        offsets: np.ndarray,
        place: BlockLocation,
        writer: str,
        leave: bool = False,
    ) -> None:
        """Set the locations in these columns of these blocks to the extent of `place`.

        `leave` says that they are not in their former location any more.
        """
        if not len(at):
            return
        owners, sizes = chunk.columns["owner"][at], chunk.columns["nbytes"][at]
        self.extent_for(place.unit, place.extent, place.length, writer).blocks += len(at)
        low = int(offsets.min())
        self.mark_used(place.unit, place.extent, low, int((offsets + sizes).max()) - low)
        for owner, unit, nbytes in pair_sums(owners, columns["unit"][at], sizes):
            stored = self.stored[owner]
            stored[place.unit] += nbytes
            if leave:
                stored[unit] -= nbytes
        if leave:
            self._leave_extents(columns, at)
        columns["unit"][at], columns["extent"][at] = place.unit, place.extent
        columns["offset"][at], columns["generation"][at] = offsets, place.generation

    def remove_lost_locations(self, is_lost: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """Remove locations that are gone from blocks that have another one. Return the other blocks (i8, ascending).

        `is_lost` returns for arrays of units and extents which locations are gone.
        """
        self.changes += 1
        lost = [np.zeros(0, "i8")]
        for key in sorted(self.chunks):
            chunk = self.chunks[key]
            columns, second = chunk.columns, chunk.second
            at = np.flatnonzero(columns["live"])
            first_lost = is_lost(columns["unit"][at], columns["extent"][at])
            if not second:
                lost.append(at[first_lost] + (key << CHUNK_BITS))
                continue
            has_copy = second["extent"][at] > 0
            other_lost = has_copy & is_lost(second["unit"][at], second["extent"][at])
            alone = first_lost & (other_lost | ~has_copy)
            lost.append(at[alone] + (key << CHUNK_BITS))
            swap, rid = at[first_lost & has_copy & ~other_lost], at[other_lost & ~first_lost]
            self._leave(chunk, columns, swap)
            self._leave(chunk, second, rid)
            for name in PLACE:
                columns[name][swap] = second[name][swap]
            second["extent"][np.append(swap, rid)] = 0
        return np.concatenate(lost)

    def column(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Return one column of these blocks, in order."""
        return self._columns([name], numbers)[name]

    def _columns(self, names: Sequence[str], numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return some columns of these blocks, in order."""
        keys = numbers >> CHUNK_BITS
        if len(numbers) and keys[0] == keys[-1] and (keys == keys[0]).all():
            columns, at = self.chunks[int(keys[0])].columns, numbers & (CHUNK - 1)
            return {name: columns[name][at] for name in names}
        out = {name: np.zeros(len(numbers), BLOCK[name]) for name in names}
        for _, chunk, at, where in self._split(numbers):
            for name in names:
                out[name][where] = chunk.columns[name][at]
        return out

    def describe(self, numbers: np.ndarray) -> Blocks:
        """Return these blocks as a reply contains them."""
        if len(numbers) == 1:  # a single block is usual, and needs no search for equal values
            number = numbers.item()
            only, at = self.chunks[number >> CHUNK_BITS].columns, number & (CHUNK - 1)
            one = slice(at, at + 1)
            return Blocks(
                only["unit"][one].tobytes(), only["offset"][one].tobytes(), only["generation"][one].tobytes(),
                only["nbytes"][one].tobytes(), only["rows"][one].tobytes(), bytes(4), bytes(4),
                [list(self.schemas[only["schema"].item(at)])], [self.dims[only["dims"].item(at)]],
            )  # fmt: skip
        columns = self._columns([*_SENT, "schema", "dims"], numbers)
        schemas, schema_at = _number_distinct(columns["schema"])
        dims, dims_at = _number_distinct(columns["dims"])
        return Blocks(
            unit=columns["unit"].tobytes(),
            offset=columns["offset"].tobytes(),
            generation=columns["generation"].tobytes(),
            nbytes=columns["nbytes"].tobytes(),
            rows=columns["rows"].tobytes(),
            schema=schema_at,
            dims=dims_at,
            schemas=[list(self.schemas[n]) for n in schemas],
            dims_values=[self.dims[n] for n in dims],
        )

    def describe_for(self, numbers: np.ndarray, near: list[int], avoid: list[int]) -> Blocks:
        """Do the same for a reader, with the better location of each block. For `near` and `avoid` see `Lookup`."""
        made = self.describe(numbers)
        better = {name: np.frombuffer(getattr(made, name), BLOCK[name]).copy() for name in _MOVES}
        for _, chunk, at, where in self._split(numbers):
            if not chunk.second:
                continue
            one, other = better["unit"][where], chunk.second_units(at)
            wanted = np.isin(other, near) & ~np.isin(one, near) | np.isin(one, avoid)
            wanted &= (other >= 0) & ~np.isin(other, avoid)
            for name in _MOVES:
                better[name][where] = np.where(wanted, chunk.second[name][at], better[name][where])
        return msgspec.structs.replace(made, **{name: column.tobytes() for name, column in better.items()})

    def shape_source(self, number: int) -> tuple[Schema, bytes, int]:
        """Return the schema, dims and row count of one block."""
        columns = self.chunks[number >> CHUNK_BITS].columns
        at = number & (CHUNK - 1)
        schema, dims, rows = (int(columns[name][at]) for name in ("schema", "dims", "rows"))
        return self.schemas[schema], self.dims[dims], rows

    def live_blocks(self) -> Iterator[LiveBlock]:
        """Iterate over every needed block, for checks of invariants."""
        for key, chunk in sorted(self.chunks.items()):
            live, nbytes = chunk.columns["live"], chunk.columns["nbytes"]
            for at in np.flatnonzero(live).tolist():
                yield LiveBlock((key << CHUNK_BITS) + at, int(live[at]), chunk.places(at), int(nbytes[at]))

    def derive(self) -> None:
        """Compute what is derived from the blocks and extents."""
        self.leased_in = {}
        for (unit, _), extent in self.extents.items():
            self.leased_in[unit] = self.leased_in.get(unit, 0) + extent.length
        self.count_stored()
        self._measure_extents()

    def count_stored(self) -> None:
        """Count again how many bytes each partition has in each unit, and how many it saves."""
        self.stored.clear()
        self.saved.clear()
        for chunk in self.chunks.values():
            self._count_chunk(chunk, np.flatnonzero(chunk.columns["live"]))

    def _count_chunk(self, chunk: BlockChunk, at: np.ndarray) -> None:
        """Count the bytes of these blocks of a chunk, and what they save."""
        if chunk.shared:
            self._count_saved(chunk, at[chunk.shared["values"][at] > 0], 1)
        for columns, places in chunk.locations(at):
            self._store(chunk, columns, places)

    def _measure_extents(self) -> None:
        """Compute the used bytes of the extents from the locations of the blocks."""
        parts = [np.zeros((4, 0), "i8")]
        for chunk in self.chunks.values():
            for columns, at in chunk.locations(np.flatnonzero(chunk.columns["live"])):
                start = columns["offset"][at]
                parts.append(
                    np.stack([columns["unit"][at], columns["extent"][at], start, start + chunk.columns["nbytes"][at]])
                )
        self.measure(*np.concatenate(parts, axis=1))
