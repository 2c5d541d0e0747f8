"""Checks that a state is sound: that columns have one length, references lead somewhere, and numbers are in range.

A sound state can be recounted (`invariants.py`) and used: nothing in it causes an error that is not a client's mistake.
A state that consists of applied records is always sound; a state from a file may be anything that has the right form.
The cost is that of reading each column once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.blocks.block_chunk import CHUNK_BITS as BLOCK_BITS
from transfer_queue.core.blocks.block_chunk import PLACE
from transfer_queue.core.blocks.block_table import BlockTable
from transfer_queue.core.columns.intern_table import InternTable
from transfer_queue.core.columns.schema import MOST, BrokenInvariant, require
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.dealt_batches import DealtBatches
from transfer_queue.core.tables.field_ranks import value_ranks
from transfer_queue.core.tables.field_types import FieldStats, dims_parts
from transfer_queue.core.tables.lease_table import Counts
from transfer_queue.core.tables.row_table import CHUNK, CHUNK_BITS, CONSUMED, Chunk
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import NESTED, ORDERS, PartitionOptions
from transfer_queue.sampler.sampler_spec import sampler_of

MOST_ROUNDS = 1 << 28  # of one task in one partition; more than one round each second for eight years

_decode_tags = msgspec.msgpack.Decoder(list[dict[str, Any] | None]).decode


def check_references(state: State) -> None:
    """Raise BrokenInvariant if the state is not sound."""
    blocks = _NeededBlocks(state.blocks, state.next_block)
    before: list[np.ndarray] = [np.zeros(0, "i8")]
    for name, partition in state.partitions.items():
        require(name == partition.name, f"partition {name!r} has the name {partition.name!r}")
        partition.check_columns(name)
        require(partition.number <= state.changes, f"{name} was made after the newest change")
        before.append(_rows(partition, state.next_index))
        _check_values(partition, blocks)
        _check_keys(partition)
        _check_groups(partition)
        _check_tasks(partition)
        _check_times(partition)
        require(partition.version <= state.changes, f"{name} has a later version than the newest change")
        require(0 <= partition.changes.made <= partition.version, f"{name} was made after its last change")
        require(partition.changes.sealed <= partition.version, f"{name} was sealed after its last change")
    numbers = {partition.number for partition in state.partitions.values()}
    require(len(numbers) == len(state.partitions), "two partitions have the same number")
    require(_distinct(np.concatenate(before)), "2: two live samples have the same global index")
    blocks.check_all_used()
    for client, kept in state.clients.items():
        kept.check_columns(f"client {client!r}")
    _check_samplers(state)
    require(state.draining <= set(state.units), "a unit that is drained does not exist")


def _distinct(numbers: np.ndarray) -> bool:
    """Return whether all numbers are different. Other threads run during the sort, unlike during `np.unique`."""
    ascending = np.sort(numbers)
    return bool((ascending[1:] != ascending[:-1]).all())


# ------------------------------------------------------------ blocks


class _NeededBlocks:
    """The columns of all needed blocks of a table, ascending by number, and how many values were found in each."""

    def __init__(self, table: BlockTable, next_block: int) -> None:
        parts = [_block_chunk(table, key, next_block) for key in sorted(table.chunks)]
        self.table = table
        self.number = _joined([numbers for numbers, _ in parts])
        names = ("rows", "schema", "dims", "live", "nbytes", "owner")
        columns = {name: _joined([c[name] for _, c in parts]) for name in names}
        self.rows, self.schema, _, self.live, self.nbytes, self.owner = (columns[name] for name in names)
        self.used = np.zeros(len(self.number), "i8")
        self.owned = np.zeros(len(self.number), bool)
        _check_interned(table.schemas, columns["schema"], "schema")
        _check_interned(table.dims, columns["dims"], "dims")
        _check_shapes(table, columns["schema"], columns["dims"], columns["rows"])
        self.dtypes = [{spec.name: spec.dtype for spec in schema or ()} for schema in table.schemas.values]
        require(int(self.nbytes.sum()) == table.live_bytes, "7: the bytes of live blocks differ from a recount")
        for place in table.freed:
            require(place not in table.extents, f"extent {place} is both free and in use")

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


def _block_chunk(table: BlockTable, key: int, next_block: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Check a chunk of the table. Return (numbers, columns) of its needed blocks."""
    chunk = table.chunks[key]
    columns, second = chunk.columns, chunk.second
    chunk.check_columns(f"blocks {key}")
    require(bool((columns["live"] >= 0).all()), f"7: a block of {key} has a negative number of live values")
    at = np.flatnonzero(columns["live"])
    numbers = at + (key << BLOCK_BITS)
    require(0 < len(at) == chunk.alive, f"7: blocks {key} count {chunk.alive} needed blocks, a recount gives {len(at)}")
    below = key < MOST >> BLOCK_BITS and numbers[0] > 0 and numbers[-1] < next_block
    require(below, "a block number is not below the next one")
    few = {name: column[at] for name, column in columns.items()}
    require(bool((few["rows"] > 0).all()), f"a block of {key} has no rows")
    for name in ("nbytes", *PLACE):
        require(bool(((few[name] >= 0) & (few[name] <= MOST)).all()), f"a block of {key} has a wrong {name}")
    _check_known_places(table, few["unit"], few["extent"])
    if second:
        there = at[second["extent"][at] != 0]
        for name in PLACE:
            column = second[name][there]
            require(
                bool(((column >= 0) & (column <= MOST)).all()), f"a second location of blocks {key} has a wrong {name}"
            )
        _check_known_places(table, second["unit"][there], second["extent"][there])
    return numbers, few


def _check_known_places(table: BlockTable, unit: np.ndarray, extent: np.ndarray) -> None:
    for number in np.unique(unit).tolist():
        for one in np.unique(extent[unit == number]).tolist():
            require(
                (number, one) in table.extents, f"a block is in extent {one} of unit {number}, which does not exist"
            )


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


def _check_samplers(state: State) -> None:
    for task, spec in state.samplers.items():
        try:
            sampler_of(*spec)
        except InvalidArgumentError as error:
            raise BrokenInvariant(f"task {task!r} cannot have its sampler: {error}") from None


def check_apart(state: State) -> None:
    """Raise BrokenInvariant if two needed blocks overlap in a unit.

    An extent of an external store is an object and not a range of the unit, so its blocks are compared with each other.
    """
    found: dict[str, list[np.ndarray]] = {name: [np.zeros(0, "i8")] for name in ("unit", "extent", "offset", "nbytes")}
    for chunk in state.blocks.chunks.values():
        at = np.flatnonzero(chunk.columns["live"])
        for columns in (chunk.columns, chunk.second):
            if columns:
                some = at[columns["extent"][at] != 0] if columns is chunk.second else at
                for name in ("unit", "extent", "offset"):
                    found[name].append(columns[name][some])
                found["nbytes"].append(chunk.columns["nbytes"][some])
    unit, extent, offset, nbytes = (np.concatenate(parts) for parts in found.values())
    external = np.isin(unit, [each.unit for each in state.units.values() if each.store])
    within = np.where(external, extent, 0)
    some = np.flatnonzero(nbytes > 0)
    order = some[np.lexsort((offset[some], within[some], unit[some]))]
    unit, within, start, end = unit[order], within[order], offset[order], (offset + nbytes)[order]
    over = (unit[1:] == unit[:-1]) & (within[1:] == within[:-1]) & (start[1:] < end[:-1])
    if over.any():
        first = int(np.flatnonzero(over)[0])
        raise BrokenInvariant(f"two blocks overlap at byte {int(start[first + 1])} of unit {int(unit[first])}")


# ------------------------------------------------------------ partitions


def _rows(partition: Partition, next_index: int) -> np.ndarray:
    """Check the rows. Return the global indexes of the live ones."""
    name, rows = partition.name, partition.rows
    last = -1
    keys = list(rows.chunks)
    require(keys == sorted(keys), f"the chunks of {name} are not in order")
    for key, chunk in rows.chunks.items():
        where = f"chunk {key} of {name}"
        _check_chunk(chunk, where)
        index = chunk.index[: chunk.size]
        require(last < index[0] and bool((np.diff(index) > 0).all()), f"2: the indexes of {name} do not ascend")
        last = int(index[-1])
        full = chunk.size == CHUNK or (key << CHUNK_BITS) + chunk.size == rows.end
        require(full and (key << CHUNK_BITS) + chunk.size <= rows.end, f"{where} is neither full nor the last chunk")
        require(set(chunk.field) <= set(partition.fields), f"{where} has values of a field that {name} does not know")
        require(set(chunk.consumed) <= set(partition.tasks), f"{where} is consumed by a task that {name} does not know")
        require(set(chunk.dealt) <= set(partition.dealt), f"{where} was dealt to a task that {name} does not know")
    require(last < next_index, "2: a live index is not below the next one")
    require(not rows.end % CHUNK or rows.end >> CHUNK_BITS in rows.chunks, f"the last rows of {name} are missing")
    positions = rows.live_positions()
    require(len(positions) == rows.count, f"7: {name} counts {rows.count} rows, a recount gives {len(positions)}")
    return rows.indexes_of(positions)


def _check_chunk(chunk: Chunk, where: str) -> None:
    size, capacity = chunk.size, chunk.capacity
    require(0 < size <= capacity <= CHUNK, f"{where} has {size} rows and the capacity {capacity}")
    require(not chunk.alive[size:].any(), f"{where} has live rows after its last row")
    require(chunk.living == int(chunk.alive.sum()), f"7: {where} miscounts its live rows as {chunk.living}")
    require(
        set(chunk.held) == set(chunk.finished), f"{where} has references and counts of finished rows of other tasks"
    )


def _check_values(partition: Partition, blocks: _NeededBlocks) -> None:
    mine = np.zeros(len(blocks.number), bool)
    for name, field in partition.fields.items():
        where = f"field {name!r} of {partition.name}"
        columns = [found for chunk in partition.rows.chunks.values() if (found := chunk.field.get(name)) is not None]
        there = [np.flatnonzero(numbers) for numbers, _ in columns]
        numbers = _joined([column[at] for (column, _), at in zip(columns, there, strict=True)])
        slots = _joined([column[at] for (_, column), at in zip(columns, there, strict=True)])
        require(field.name == name, f"{where} has the name {field.name!r}")
        blocks.take(field, numbers, slots, mine, partition.name)
        require(field.live == len(numbers), f"7: {where} counts {field.live} values, a recount gives {len(numbers)}")
        require(field.live <= field.ever, f"7: {where} has more live values than it ever got")
        require((not field.kind) == (not field.live), f"{where} has values without a type, or a type without values")
        dimensions = 0 <= field.ndim <= 64 and len(field.shape) == field.ndim
        require(
            field.kind in ("", "tensor", "object", NESTED) and dimensions,
            f"{where} has an unknown kind or dimensions that do not match",
        )
        dtypes = (field.dtype, *field.others)
        apart = len(set(dtypes)) == len(dtypes) and (not field.others or field.kind == "tensor")
        require(apart, f"{where} cannot have the dtypes {dtypes}")
        require(field.mixed_rank == bool(field.further), f"{where} has rows of several ranks, or not")
        if field.further:
            shapes = all(len(shape) == rank != field.ndim for rank, (shape, _) in field.further.items())
            require(shapes and field.kind == "tensor", f"{where} cannot have these ranks")
            check_ranks(field, value_ranks(partition.blocks, name, numbers, slots), where)
    require(not (mine & blocks.owned).any(), f"a block of {partition.name} also has values of another partition")
    blocks.owned |= mine
    of_it = bool((blocks.owner[mine] == partition.number).all())
    require(of_it, f"a block of {partition.name} is recorded as another partition's")
    require(int(blocks.nbytes[mine].sum()) == partition.nbytes, f"7: {partition.name} miscounts its bytes")


def check_ranks(field: FieldStats, ranks: np.ndarray, where: str) -> None:
    """Check the counts of the ranks of a field, whose live values have these ranks."""
    found = dict(zip(*(each.tolist() for each in np.unique(ranks, return_counts=True)), strict=True))
    first = field.live - field.counts.total()
    counted = {field.ndim: first, **field.counts} if field.live else {}
    require(found == counted, f"7: {where} counts rows of ranks {counted}, a recount gives {found}")


def _check_keys(partition: Partition) -> None:
    """Check keys and pre-allocated rows. Reads one chunk at a time, so that other threads run in between."""
    count = 0
    waiting = [np.zeros(0, "i8")]
    for key, chunk in partition.rows.chunks.items():
        first = key << CHUNK_BITS
        waiting.append(np.flatnonzero(chunk.waiting) + first)
        if chunk.keys is not None:
            require(
                len(chunk.keys) == chunk.capacity, f"chunk {key} of {partition.name} has keys of another number of rows"
            )
            mine = {name: at for at, name in enumerate(chunk.keys) if name is not None}
            require(bool(chunk.alive[list(mine.values())].all()), f"a cleared row of {partition.name} has a key")
            there = all(partition.keys.get(name) == first + at for name, at in mine.items())
            require(there, f"the keys of {partition.name} are not those of its rows")
            with_key = sum(name is not None for name in chunk.keys)
            require(len(mine) == with_key, f"two rows of {partition.name} have the same key")
            count += with_key
    require(count == len(partition.keys), f"the keys of {partition.name} are not those of its rows")
    positions = np.concatenate(waiting).tolist()
    require(positions == partition.waiting, f"the list of pre-allocated rows of {partition.name} is wrong")


def _check_groups(partition: Partition) -> None:
    name, groups = partition.name, partition.groups
    declared = list(groups.declared.values())
    require(len(groups.by_name) == len(declared), f"two groups of {name} have the same id")
    for number, group in groups.declared.items():
        require(
            group.number == number < groups.next_number, f"group {group.name} of {name} is listed under another number"
        )
        require(groups.by_name[group.name] is group, f"group {group.name} of {name} is listed under another id")
    members = [np.array(group.members, "i8") for group in declared]
    numbers = np.repeat([group.number for group in declared], [len(each) for each in members]).astype("i8")
    _check_same(
        partition, "group", _joined(members), numbers, [(k, c.group, -1) for k, c in partition.rows.chunks.items()]
    )
    require(all(count > 0 for count in groups.unborn.values()), f"{name} expects no members of a dropped group")


def _check_same(
    partition: Partition,
    what: str,
    positions: np.ndarray,
    numbers: np.ndarray,
    columns: Iterable[tuple[int, np.ndarray | None, int]],
) -> None:
    """Check that a column and lists agree on the group, or dealt batch, of each live row.

    `columns` contains (chunk number, column, entry of a row that is in none).
    """
    name, rows = partition.name, partition.rows
    require(
        not len(positions) or (positions.min() >= 0 and positions.max() < rows.end),
        f"a {what} of {name} has a wrong row",
    )
    require(_distinct(positions), f"a row of {name} is listed twice in a {what}")
    alive = np.zeros(len(positions), bool)
    for _, chunk, at, where in rows.split(positions):
        require(bool((at < chunk.size).all()), f"a {what} of {name} has a row that does not exist")
        alive[where] = chunk.alive[at] == 1
    order = np.argsort(positions[alive])
    found = [
        (np.flatnonzero(column != none) + (k << CHUNK_BITS), column)
        for k, column, none in columns
        if column is not None
    ]
    there = _joined([at for at, _ in found])
    said = _joined([column[at & (CHUNK - 1)] for at, column in found])
    same = np.array_equal(there, positions[alive][order]) and np.array_equal(said, numbers[alive][order])
    require(same, f"the column and the lists of {name} disagree on the {what} of a row")


def _check_tasks(partition: Partition) -> None:
    name, chunks = partition.name, partition.rows.chunks
    for task, dealt in partition.dealt.items():
        _check_dealt(partition, task, dealt)
    passed = partition.passed
    for task, key, column in passed.columns():
        require(key in chunks, f"{task!r} skipped rows of {name} that do not exist")
        require(int(column.max()) <= passed.reason_count, f"{task!r} skipped a row of {name} for an unknown reason")
    for counts in (partition.leases.delivered, partition.leases.acked):
        _check_counts(partition, counts)
    for token, lease in partition.leases.by_token.items():
        where = f"lease {token} of {name}"
        require(0 < token == lease.token and lease.replicas > 0, f"{where} has another token, or no replicas")
        require(lease.task in partition.tasks, f"{where} belongs to a task that {name} does not know")
        require(lease.batch is None or lease.batch[0] == lease.task, f"{where} belongs to a batch of another task")
        require(0 < lease.seconds < math.inf, f"{where} lasts {lease.seconds} seconds")
        require(bool((np.diff(lease.rows) > 0).all()), f"the rows of {where} do not ascend")
    for token, batch in partition.unseen_batches.by_token.items():
        where = f"batch {token} of {name}, which was not handed over,"
        require(0 < token == batch.token, f"{where} has another token")
        require(batch.task in partition.tasks, f"{where} belongs to a task that {name} does not know")
        require(len(batch.rows) % 8 == 0, f"the rows of {where} are not 8 bytes each")
        require(len(np.unique(batch.indexes)) == len(batch.indexes), f"{where} has a row twice")
        consumed = partition.consumption_states(batch.task, partition.rows.live_positions_of(batch.indexes)) == CONSUMED
        require(bool(consumed.all()), f"rows of {where} are not consumed")
    of_holds = {task for chunk in chunks.values() for task in chunk.held} | {
        task for task, _, _ in partition.holds.by_holder
    }
    require(of_holds <= set(partition.holds.tasks), f"{name} has references of tasks that are not in its free_when")
    for holder, rows in partition.holds.by_holder.items():
        require(bool((np.diff(rows) > 0).all()), f"the rows of {name} to which {holder} refers do not ascend")


def _check_counts(partition: Partition, counts: Counts) -> None:
    for task, key, _ in counts.columns():
        require(key in partition.rows.chunks, f"{task!r} has deliveries of rows of {partition.name} that do not exist")


def _check_dealt(partition: Partition, task: str, dealt: DealtBatches) -> None:
    where = f"task {task!r} of {partition.name}"
    require(len(dealt.by_key) == len(dealt.batches), f"4: two dealt batches of {where} have the same key")
    require(
        all(0 < number < dealt.next_number for number in dealt.batches), f"a batch of {where} is not below the next one"
    )
    rows = [batch.rows for batch in dealt.batches.values()]
    numbers = np.repeat(list(dealt.batches), [len(each) for each in rows]).astype("i8")
    positions = partition.rows.positions_of(_joined(rows))
    live = positions >= 0
    columns = [(key, chunk.dealt.get(task), 0) for key, chunk in partition.rows.chunks.items()]
    _check_same(partition, "dealt batch", positions[live], numbers[live], columns)
    size = sum(last - first + 1 for first, last in zip(dealt.rounds.starts, dealt.rounds.ends, strict=True))
    fine = size == dealt.round_count <= MOST_ROUNDS
    require(fine, f"7: {where} counts {dealt.round_count} rounds, a recount gives {size}")
    require(dealt.unasked <= dealt.issued.keys(), f"{where} has ranks that have never asked and were dealt nothing")


def check_options(options: PartitionOptions) -> None:
    """Raise InvalidArgumentError if no partition can be created with these options."""
    positive = ("group_size", "producers", "replicas", "rows_per_version")
    for name in (*positive, "keep_rows", "keep_bytes", "keep_seconds", "max_rows"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InvalidArgumentError(f"{name} must be positive, not {value}")
    if (options.max_staleness is None) != (options.rows_per_version is None):
        raise InvalidArgumentError(
            f"max_staleness ({options.max_staleness}) and rows_per_version ({options.rows_per_version}) go together: "
            f"how many policy versions a row may be old, and how many rows train one version"
        )
    if options.trained_by and options.max_staleness is None:
        raise InvalidArgumentError(
            f"trained_by ({options.trained_by!r}) names the task that finishes rows for max_staleness, which is not "
            f"set; pass max_staleness and rows_per_version, too"
        )
    if options.order not in ("", *ORDERS):
        raise InvalidArgumentError(
            f"order must be one of {', '.join(ORDERS)}, or empty for the system's sampler, got {options.order!r}"
        )


def _check_times(partition: Partition) -> None:
    """Check the options of a partition, the ages of its rows, and its cleared rows."""
    name, births, changes = partition.name, partition.births, partition.changes
    try:
        check_options(partition.options)
    except InvalidArgumentError as error:
        raise BrokenInvariant(f"{name} cannot have its options: {error}") from None
    times = [time for began, at, _ in births.marks for time in (began, at)]
    require(all(map(math.isfinite, times)) and times == sorted(times), f"the times of rows of {name} do not ascend")
    ends = [end for _, _, end in births.marks]
    require(ends == sorted(ends) and births.end == max(ends, default=0), f"the ages of rows of {name} are out of order")
    require(births.end <= partition.rows.end, f"{name} has ages of rows that do not exist")
    versions = [version for version, _, _ in changes.cleared]
    require(versions == sorted(versions) and max(versions, default=0) <= partition.version, f"{name} has later clears")
    for _, indexes, keys in changes.cleared:
        fine = len(indexes) % 8 == 0 and (keys is None or len(keys) == len(indexes) // 8)
        require(fine, f"the list of cleared rows of {name} is malformed")


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, "i8")
