"""Checks the table of blocks of a state: locations, extents, shapes, uses and digests. See `check`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from transfer_queue.core.columns.kinds import InternTable
from transfer_queue.core.columns.schema import MOST, BrokenInvariant, require
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import CHUNK_BITS, PLACE, BlockTable, pair_sums
from transfer_queue.core.tables.fields import FieldStats, dims_parts, value_ranks
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import DIGEST, NESTED

Columns = dict[str, np.ndarray]

_COLUMNS = ("rows", "schema", "dims", "live", "nbytes", "owner")
_RANGE = ("unit", "extent", "offset", "nbytes")


class NeededBlocks:
    """The columns of all needed blocks of a state, ascending by number, and how many values were found in each.

    The table is checked when this is made, `take` checks the values of a field, and `check_all_used` comes last.
    """

    def __init__(self, state: State) -> None:
        table = self.table = state.blocks
        parts = [_check_chunk(table, key, state.next_block) for key in sorted(table.chunks)]
        self.number = joined([numbers for numbers, _, _ in parts])
        columns = {name: joined([first[name] for _, first, _ in parts]) for name in _COLUMNS}
        self.rows, self.schema, _, self.live, self.nbytes, self.owner = (columns[name] for name in _COLUMNS)
        self.used = np.zeros(len(self.number), "i8")
        self.owned = np.zeros(len(self.number), bool)
        _check_interned(table.schemas, columns["schema"], "schema")
        _check_interned(table.dims, columns["dims"], "dims")
        _check_shapes(table, columns["schema"], columns["dims"], columns["rows"])
        self.dtypes = [{spec.name: spec.dtype for spec in schema or ()} for schema in table.schemas.values]
        require(int(self.nbytes.sum()) == table.live_bytes, "7: the bytes of live blocks differ from a recount")
        places = [each for _, first, second in parts for each in (first, second) if each]
        _check_extents(table, places)
        _check_apart(state, places)

    def take(self, field: FieldStats, numbers: np.ndarray, slots: np.ndarray, mine: np.ndarray, where: str) -> None:
        """Count the values of a field in these rows of these blocks. `mine` marks the blocks of the partition."""
        name = field.name
        if not len(numbers):
            return
        at = np.minimum(np.searchsorted(self.number, numbers), max(len(self.number) - 1, 0))
        there = len(self.number) > 0 and bool((self.number[at] == numbers).all())
        require(there, f"1: a value of {name} of {where} is in a block that does not exist")
        fine = bool(((slots >= 0) & (slots < self.rows[at])).all())
        require(fine, f"1: a value of {name} of {where} is in a row that its block does not have")
        for schema in np.flatnonzero(np.bincount(self.schema[at])).tolist():
            dtype = self.dtypes[schema].get(name)
            require(dtype is not None, f"1: a value of {name} of {where} is in a block without that field")
            require(dtype in (field.dtype, *field.others), f"{name} of {where} has a value of another dtype, {dtype}")
        low, high = int(at.min()), int(at.max()) + 1
        if high - low <= 8 * len(at):
            self.used[low:high] += np.bincount(at - low, minlength=high - low)
        else:
            np.add.at(self.used, at, 1)
        mine[at] = True

    def check_all_used(self) -> None:
        """Check, after all partitions, that every block is needed for as many values as were found in it."""
        require(bool((self.used == self.live).all()), "7: the live values of a block differ from a recount")


def check_ranks(table: BlockTable, field: FieldStats, numbers: np.ndarray, slots: np.ndarray, where: str) -> None:
    """Check the counts of the ranks of a field, which has these live values."""
    ranks = value_ranks(table, field.name, numbers, slots)
    found = dict(zip(*(each.tolist() for each in np.unique(ranks, return_counts=True)), strict=True))
    first = field.live - field.counts.total()
    counted = {field.ndim: first, **field.counts} if field.live else {}
    require(found == counted, f"7: {where} counts rows of ranks {counted}, a recount gives {found}")


def check_digests(state: State, blocks: NeededBlocks) -> None:
    """Check that every digest names a row of a needed block that has the field."""
    if not state.blocks.equal.fields:
        return
    live = set(blocks.number.tolist())
    fields = {
        (partition.number, name): field
        for partition in state.partitions.values()
        for name, field in partition.fields.items()
    }
    for key, known in state.blocks.equal.fields.items():
        require(key in fields and fields[key].live > 0, f"digests are kept of field {key}, which has no values")
        for digest, (number, slot) in known.items():
            require(number in live, f"a digest names block {number}, which was freed")
            schema, _, rows = state.blocks.shape_source(number)
            there = 0 <= slot < rows and any(spec.name == key[1] for spec in schema)
            require(there, f"a digest names row {slot} of block {number}, which does not have field {key[1]!r}")
            require(len(digest) == DIGEST, "a digest has another length")


def _check_chunk(table: BlockTable, key: int, next_block: int) -> tuple[np.ndarray, Columns, Columns]:
    """Check a chunk of the table.

    Returns:
        The numbers of its needed blocks, their columns, and the second locations of those that have one.
    """
    chunk = table.chunks[key]
    columns = chunk.columns
    chunk.check_columns(f"blocks {key}")
    require(bool((columns["live"] >= 0).all()), f"7: a block of {key} has a negative number of live values")
    at = np.flatnonzero(columns["live"])
    numbers = at + (key << CHUNK_BITS)
    require(0 < len(at) == chunk.alive, f"7: blocks {key} count {chunk.alive} needed blocks, a recount gives {len(at)}")
    below = key < MOST >> CHUNK_BITS and numbers[0] > 0 and numbers[-1] < next_block
    require(below, "a block number is not below the next one")
    few = {name: column[at] for name, column in columns.items()}
    require(bool((few["rows"] > 0).all()), f"a block of {key} has no rows")
    _check_range(few, ("nbytes", *PLACE), f"a block of {key}")
    if not chunk.second:
        return numbers, few, {}
    there = np.flatnonzero(chunk.second["extent"][at])
    second = {name: column[at[there]] for name, column in chunk.second.items()}
    _check_range(second, PLACE, f"a second location of blocks {key}")
    twice = numbers[there][second["unit"] == few["unit"][there]]
    require(not len(twice), f"blocks {twice[:5].tolist()} are in one unit twice")
    return numbers, few, {**second, "nbytes": few["nbytes"][there]}


def _check_range(columns: Columns, names: tuple[str, ...], what: str) -> None:
    for name in names:
        require(bool(((columns[name] >= 0) & (columns[name] <= MOST)).all()), f"{what} has a wrong {name}")


def _check_interned(table: InternTable[Any], column: np.ndarray, name: str) -> None:
    """Check that each of these numbers stands for a value, and that the uses are counted correctly."""
    size = len(table.uses)
    require(len(table.values) == size, f"{name} has {len(table.values)} values and {size} counts")
    require(not len(column) or (column.min() >= 0 and column.max() < size), f"a block has a {name} that does not exist")
    counts = np.bincount(column, minlength=size).tolist()
    require(counts == table.uses, f"7: the uses of {name} values differ from a recount")
    unused = [at for at, count in enumerate(counts) if not count]
    require(sorted(table.spare) == unused, f"the spare numbers of {name} are not the unused ones")
    require(len(table.number) == size - len(unused), f"two numbers have the same {name}")


def _check_shapes(table: BlockTable, schema: np.ndarray, dims: np.ndarray, rows: np.ndarray) -> None:
    """Check that the dims of each block match its schema."""
    for specs in table.schemas.values:
        names = [spec.name for spec in specs or ()]
        kinds = {spec.kind for spec in specs or ()} <= {"tensor", "object", NESTED}
        require(len(set(names)) == len(names) and kinds, f"a block cannot have the fields {names}")
    for one, its_dims, count in np.unique(np.stack([schema, dims, rows]), axis=1).T.tolist():
        packed = table.dims[its_dims]
        try:
            require(len(packed) % 8 == 0, f"dims of {len(packed)} bytes are not 64-bit integers")
            dims_parts(table.schemas[one], np.frombuffer(packed, "<i8"), count)
        except InvalidArgumentError as error:
            raise BrokenInvariant(str(error)) from None


def _check_extents(table: BlockTable, places: list[Columns]) -> None:
    """Check the extents against the locations of all needed blocks, which are listed by chunk."""
    counts: Counter[tuple[int, int]] = Counter()
    for columns in places:
        ones = np.ones(len(columns["unit"]), "i8")
        for unit, extent, count in pair_sums(columns["unit"], columns["extent"], ones):
            there = (unit, extent) in table.extents
            require(there, f"a block is in extent {extent} of unit {unit}, which does not exist")
            counts[unit, extent] += count
    for place, record in table.extents.items():
        require(record.blocks == counts[place], f"7: extent {place} miscounts its blocks")
        require(record.blocks > 0 or not record.closed, f"extent {place} is closed and empty, and was not freed")
        require(place not in table.freed, f"extent {place} is both free and in use")
    lengths = sum(record.length for record in table.extents.values())
    require(lengths == table.leased, "7: the lengths of extents differ from a recount")


def _check_apart(state: State, places: list[Columns]) -> None:
    """Check that no two needed blocks overlap in a unit, and that no empty block is inside of another one.

    An extent of an external store is an object and not a range of the unit, so its blocks are compared with each other.
    """
    unit, extent, start, nbytes = (joined([each[name] for each in places]) for name in _RANGE)
    end, within = start + nbytes, np.where(np.isin(unit, list(state.stores)), extent, 0)
    order = np.lexsort((end, start, within, unit))  # an empty block may begin where another one does
    unit, within, start, end = (column[order] for column in (unit, within, start, end))
    over = (unit[1:] == unit[:-1]) & (within[1:] == within[:-1]) & (start[1:] < end[:-1])
    if over.any():
        first = int(np.flatnonzero(over)[0])
        raise BrokenInvariant(f"two blocks overlap at byte {int(start[first + 1])} of unit {int(unit[first])}")


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return these arrays as one."""
    return np.concatenate(parts) if parts else np.zeros(0, "i8")
