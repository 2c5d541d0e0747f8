"""Checks that a state does not contradict itself: lengths of columns, references, ranges of numbers, and counts.

Nothing in a sound state causes an error that is not a client's mistake. A state that consists of applied records is
always sound; a state from a file may be anything that has the right form. Each fact is checked at one place: what is
saved here, at the cost of reading each column once, and what is derived, which no file contains, in
`transfer_queue.testing.state_recount`, for tests.

The numbers at the beginning of messages are those of the invariants on the architecture page.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from transfer_queue.core.columns.kinds import InternTable
from transfer_queue.core.columns.schema import MOST, BrokenInvariant, require
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import CHUNK_BITS as BLOCK_BITS
from transfer_queue.core.tables.blocks import PLACE, BlockTable, pair_sums
from transfer_queue.core.tables.dealt import DealtBatches
from transfer_queue.core.tables.fields import FieldStats, dims_parts, value_ranks
from transfer_queue.core.tables.rows import CHUNK, CHUNK_BITS, CLAIMED, CONSUMED, Chunk
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import DIGEST, NESTED, ORDERS, PartitionOptions
from transfer_queue.sampler.sampler_spec import sampler_of

Columns = dict[str, np.ndarray]

_COLUMNS = ("rows", "schema", "dims", "live", "nbytes", "owner")
_RANGE = ("unit", "extent", "offset", "nbytes")

MAX_ROUNDS = 1 << 28  # of one task in one partition; more than one round each second for eight years


def check_state(state: State) -> None:
    """Raise BrokenInvariant if the state contradicts itself. Takes some seconds for a million rows."""
    blocks = NeededBlocks(state)
    indexes: list[np.ndarray] = []
    for name, partition in state.partitions.items():
        require(name == partition.name, f"partition {name!r} has the name {partition.name!r}")
        partition.check_columns(name)
        require(partition.number <= state.changes, f"{name} was made after the newest change")
        indexes.append(_check_rows(partition, state.next_index))
        _check_values(partition, blocks)
        _check_losses(partition)
        _check_keys(partition)
        _check_groups(partition)
        _check_tasks(partition)
        _check_leases(partition)
        _check_unseen(partition)
        _check_holds(partition)
        _check_times(partition)
        _check_changes(partition)
        require(partition.version <= state.changes, f"{name} has a later version than the newest change")
    numbers = {partition.number for partition in state.partitions.values()}
    require(len(numbers) == len(state.partitions), "two partitions have the same number")
    require(_distinct(joined(indexes)), "2: two live samples have the same global index")
    blocks.check_all_used()
    check_digests(state, blocks)
    _check_tokens(state)
    for client, kept in state.clients.items():
        kept.check_columns(f"client {client!r}")
        require(not any(map(kept.is_finished, kept.replies)), f"6: a reply is kept that {client} has acknowledged")
    for task, spec in state.samplers.items():
        try:
            sampler_of(*spec)
        except InvalidArgumentError as error:
            raise BrokenInvariant(f"task {task!r} cannot have its sampler: {error}") from None
    require(state.draining <= set(state.units), "a unit that is drained does not exist")


def _distinct(numbers: np.ndarray) -> bool:
    """Return whether all numbers are different. Other threads run during the sort, unlike during `np.unique`."""
    ascending = np.sort(numbers)
    return bool((ascending[1:] != ascending[:-1]).all())


def _check_tokens(state: State) -> None:
    """Check the locks, and that the tokens of leases, batches and locks are distinct."""
    tokens = list(state.locks.by_token)
    for partition in state.partitions.values():
        tokens += [*partition.leases.by_token, *partition.unseen_batches.by_token]
    require(len(set(tokens)) == len(tokens), "two leases or locks have the same token")
    require(all(token < state.next_token for token in tokens), "the token of a lease is not below the next one")
    for token, lock in state.locks.by_token.items():
        require(lock.token == token > 0 and bool(lock.keys), f"9: lock {token} has another token, or no keys")
    keys = [(lock.partition, key) for lock in state.locks.by_token.values() for key in lock.keys]
    require(len(set(keys)) == len(keys), "9: two locks have the same key")


# ------------------------------------------------------------ partitions


def _check_rows(partition: Partition, next_index: int) -> np.ndarray:
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


def _check_values(partition: Partition, blocks: NeededBlocks) -> None:
    used = np.zeros(len(blocks.number), bool)
    for name, field in partition.fields.items():
        where = f"field {name!r} of {partition.name}"
        columns = [pair for chunk in partition.rows.chunks.values() if (pair := chunk.field.get(name)) is not None]
        places = [np.flatnonzero(numbers) for numbers, _ in columns]
        numbers = joined([column[at] for (column, _), at in zip(columns, places, strict=True)])
        slots = joined([column[at] for (_, column), at in zip(columns, places, strict=True)])
        require(field.name == name, f"{where} has the name {field.name!r}")
        blocks.take(field, numbers, slots, used, partition.name)
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
            check_ranks(blocks.table, field, numbers, slots, where)
    require(not (used & blocks.owned).any(), f"a block of {partition.name} also has values of another partition")
    blocks.owned |= used
    of_it = bool((blocks.owner[used] == partition.number).all())
    require(of_it, f"a block of {partition.name} is recorded as another partition's")
    require(int(blocks.nbytes[used].sum()) == partition.nbytes, f"7: {partition.name} miscounts its bytes")


def _check_losses(partition: Partition) -> None:
    """Check that values are recorded as lost that their rows do not have, and their number."""
    name, losses = partition.name, partition.losses
    counts: dict[str, int] = {}
    for chunk in partition.rows.chunks.values():
        for field, column in chunk.lost.items():
            at = np.flatnonzero(column)
            columns = chunk.field.get(field)
            require(columns is None or not columns[0][at].any(), f"1: a {field} of {name} counts as lost")
            known = set(column[at].tolist()) <= set(losses.events)
            require(known, f"values of {field} of {name} were lost by an unknown event")
            if len(at):
                counts[field] = counts.get(field, 0) + len(at)
    require(losses.counts == counts, f"7: {name} miscounts its lost values")


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
            names = {name: at for at, name in enumerate(chunk.keys) if name is not None}
            require(bool(chunk.alive[list(names.values())].all()), f"a cleared row of {partition.name} has a key")
            same = all(partition.keys.get(name) == first + at for name, at in names.items())
            require(same, f"the keys of {partition.name} are not those of its rows")
            with_key = sum(name is not None for name in chunk.keys)
            require(len(names) == with_key, f"two rows of {partition.name} have the same key")
            count += with_key
    require(count == len(partition.keys), f"the keys of {partition.name} are not those of its rows")
    positions = np.concatenate(waiting).tolist()
    require(positions == partition.waiting, f"the list of pre-allocated rows of {partition.name} is wrong")


def _check_groups(partition: Partition) -> None:
    name, groups, rows = partition.name, partition.groups, partition.rows
    declared = list(groups.declared.values())
    require(len(groups.by_name) == len(declared), f"two groups of {name} have the same id")
    for number, group in groups.declared.items():
        require(
            group.number == number < groups.next_number, f"group {group.name} of {name} is listed under another number"
        )
        require(groups.by_name[group.name] is group, f"group {group.name} of {name} is listed under another id")
    positions, of = _joined_lists([np.array(group.members, "i8") for group in declared])
    inside = not len(positions) or (positions.min() >= 0 and positions.max() < rows.end)
    require(inside, f"a group of {name} has a wrong row")
    require(_distinct(positions), f"a row of {name} is listed twice in a group")
    alive = np.zeros(len(positions), bool)
    for _, chunk, at, where in rows.split(positions):
        require(bool((at < chunk.size).all()), f"a group of {name} has a row that does not exist")
        alive[where] = chunk.alive[at] == 1
    for group, living in zip(declared, np.bincount(of[alive], minlength=len(declared)).tolist(), strict=True):
        size = len(group.members)
        require(0 < living == size - group.cleared, f"7: group {group.name} of {name} miscounts itself")
        small = groups.size is None or size <= groups.size
        require(small, f"4: group {group.name} has more members than its group_size")
    numbers = np.array([group.number for group in declared], "i8")[of[alive]]
    columns = [(key, chunk.group, -1) for key, chunk in rows.chunks.items()]
    _check_same(partition, "group", positions[alive], numbers, columns)
    require(all(count > 0 for count in groups.unborn.values()), f"{name} expects no members of a dropped group")


def _joined_lists(lists: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of all lists, and for each entry the place of its list."""
    return joined(lists), np.repeat(np.arange(len(lists)), [len(each) for each in lists])


def _check_same(
    partition: Partition,
    what: str,
    positions: np.ndarray,
    numbers: np.ndarray,
    columns: Iterable[tuple[int, np.ndarray | None, int]],
) -> None:
    """Check that a column has for each live row the number of the group, or dealt batch, in whose list it is.

    `positions` and `numbers` are those of the lists. `columns` contains (chunk number, column, entry of a row that is
    in none).
    """
    order = np.argsort(positions)
    members = [
        (np.flatnonzero(column != none) + (k << CHUNK_BITS), column)
        for k, column, none in columns
        if column is not None
    ]
    members_at = joined([at for at, _ in members])
    recorded = joined([column[at & (CHUNK - 1)] for at, column in members])
    same = np.array_equal(members_at, positions[order]) and np.array_equal(recorded, numbers[order])
    require(same, f"the column and the lists of {partition.name} disagree on the {what} of a row")


def _check_tasks(partition: Partition) -> None:
    name, chunks, positions = partition.name, partition.rows.chunks, partition.rows.live_positions()
    added = max(0, partition.admitted + sum(partition.drops.rows.values()))
    require(partition.done <= added, f"7: {partition.done} rows of {name} are done, and {added} were added")
    require(set(partition.claimed) <= set(partition.tasks), f"{name} has claimed rows of an unknown task")
    for task, count in partition.tasks.items():
        taken = partition.consumption_states(task, positions)
        claimed = np.count_nonzero(taken == CLAIMED)
        require(np.count_nonzero(taken == CONSUMED) == count, f"7: task {task} of {name} miscounts what it consumed")
        same = claimed == partition.claimed.get(task, 0)
        require(same, f"7: task {task} of {name} miscounts what it claimed")
    for task, dealt in partition.dealt.items():
        _check_dealt(partition, task, dealt)
    passed = partition.passed
    for task, key, column in passed.codes.columns():
        require(key in chunks, f"{task!r} skipped rows of {name} that do not exist")
        require(int(column.max()) <= passed.reason_count, f"{task!r} skipped a row of {name} for an unknown reason")


def _check_dealt(partition: Partition, task: str, dealt: DealtBatches) -> None:
    where = f"task {task!r} of {partition.name}"
    batches = list(dealt.batches.values())
    require(len(dealt.by_key) == len(batches), f"4: two dealt batches of {where} have the same key")
    require(
        all(0 < number < dealt.next_number for number in dealt.batches), f"a batch of {where} is not below the next one"
    )
    rows, of = _joined_lists([batch.rows for batch in batches])
    require(_distinct(rows), f"4: a row is in two dealt batches of {where}")
    positions = partition.rows.positions_of(rows)
    positions, of = positions[positions >= 0], of[positions >= 0]
    free = of[partition.consumption_states(task, positions) == 0]
    living, ready = (np.bincount(places, minlength=len(batches)).tolist() for places in (of, free))
    for at, batch in enumerate(batches):
        key = batch.dp_rank, batch.batch_index
        require(0 < batch.live == living[at], f"7: batch {key} of {task} miscounts its live rows")
        require(not ready[at], f"3: batch {key} of {task} has rows that are neither consumed nor claimed")
    columns = [(key, chunk.dealt.get(task), 0) for key, chunk in partition.rows.chunks.items()]
    _check_same(partition, "dealt batch", positions, np.array(list(dealt.batches), "i8")[of], columns)
    size = sum(last - first + 1 for first, last in zip(dealt.rounds.starts, dealt.rounds.ends, strict=True))
    fine = size == dealt.round_count <= MAX_ROUNDS
    require(fine, f"7: {where} counts {dealt.round_count} rounds, a recount gives {size}")
    require(dealt.unasked <= dealt.issued.keys(), f"{where} has ranks that have never asked and were dealt nothing")


def _check_leases(partition: Partition) -> None:
    """Check the leases, the claimed rows of each task, and the deliveries and acknowledgements that are counted."""
    name, leases = partition.name, partition.leases
    alone: dict[str, list[np.ndarray]] = {task: [] for task in partition.tasks}
    for token, lease in leases.by_token.items():
        where = f"lease {token} of {name}"
        require(0 < token == lease.token and lease.replicas > 0, f"{where} has another token, or no replicas")
        require(lease.task in partition.tasks, f"{where} belongs to a task that {name} does not know")
        require(lease.batch is None or lease.batch[0] == lease.task, f"{where} belongs to a batch of another task")
        require(0 < lease.seconds < math.inf, f"{where} lasts {lease.seconds} seconds")
        require(bool((np.diff(lease.rows) > 0).all()), f"the rows of {where} do not ascend")
        rows = partition.rows.live_positions_of(lease.rows)
        claimed = partition.consumption_states(lease.task, rows) == CLAIMED
        require(bool(claimed.all()), f"3: {where} has rows not claimed")
        same = all(partition.batch_of(lease.task, row) == lease.batch for row in rows.tolist())
        require(same, f"4: {where} has a row of another batch")
        if lease.batch is None:
            alone[lease.task].append(rows)
    positions = partition.rows.live_positions()
    for task, parts in alone.items():
        claimed = positions[partition.consumption_states(task, positions) == CLAIMED]
        of_batch = np.array([partition.batch_of(task, row) is not None for row in claimed.tolist()], bool)
        rows = joined(parts)
        require(_distinct(rows), f"3: a row of {name} is in two leases")
        require(np.array_equal(np.sort(rows), claimed[~of_batch]), f"3: rows of {name} are claimed under no lease")
        acked = positions[leases.acked.numbers_of(task, positions) > 0]
        fine = bool(np.isin(acked, claimed[of_batch]).all())
        require(fine, f"7: rows of {name} count acknowledgements although they are in no dealt batch")
    for counts in (leases.delivered, leases.acked):
        for task, key, _ in counts.columns():
            require(key in partition.rows.chunks, f"{task!r} has deliveries of rows of {name} that do not exist")


def _check_unseen(partition: Partition) -> None:
    """Check the batches that were not handed over."""
    name = partition.name
    dealt: dict[str, list[np.ndarray]] = {task: [] for task in partition.tasks}
    for token, batch in partition.unseen_batches.by_token.items():
        where = f"batch {token} of {name}, which was not handed over,"
        require(0 < token == batch.token, f"{where} has another token")
        require(batch.task in partition.tasks, f"{where} belongs to a task that {name} does not know")
        require(len(batch.rows) % 8 == 0, f"the rows of {where} are not 8 bytes each")
        require(_distinct(batch.indexes), f"{where} has a row twice")
        positions = partition.rows.live_positions_of(batch.indexes)
        consumed = partition.consumption_states(batch.task, positions) == CONSUMED
        require(bool(consumed.all()), f"rows of {where} are not consumed")
        dealt[batch.task].append(positions)
    fine = all(_distinct(joined(parts)) for parts in dealt.values())
    require(fine, f"3: a row of {name} is in two batches")


def _check_holds(partition: Partition) -> None:
    """Check the references to rows."""
    name, holds = partition.name, partition.holds
    held: dict[str, list[np.ndarray]] = {}
    for holder, rows in holds.by_holder.items():
        require(bool((np.diff(rows) > 0).all()), f"the rows of {name} to which {holder} refers do not ascend")
        held.setdefault(holder[0], []).append(partition.rows.live_positions_of(rows))
    tasks = held.keys() | {task for chunk in partition.rows.chunks.values() for task in chunk.held}
    require(tasks <= set(holds.tasks), f"{name} has references of tasks that are not in its free_when")
    for task in tasks:
        positions = np.sort(joined(held.get(task, [])))
        columns = [(key, chunk.held[task]) for key, chunk in partition.rows.chunks.items() if task in chunk.held]
        held_at = joined([np.flatnonzero(column) + (key << CHUNK_BITS) for key, column in columns])
        counts = joined([column[np.flatnonzero(column)] for _, column in columns])
        same = int(counts.sum()) == len(positions) and np.array_equal(np.repeat(held_at, counts), positions)
        require(same, f"7: {name} miscounts the references to its rows")
    finished = holds.finished_rows(partition.rows.live_positions())
    require(not finished.any(), f"rows of {name} are finished and were not cleared")


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
    """Check the options of a partition, and the ages of its rows."""
    name, births = partition.name, partition.births
    try:
        check_options(partition.options)
    except InvalidArgumentError as error:
        raise BrokenInvariant(f"{name} cannot have its options: {error}") from None
    times = [time for began, at, _ in births.marks for time in (began, at)]
    require(all(map(math.isfinite, times)) and times == sorted(times), f"the times of rows of {name} do not ascend")
    ends = [end for _, _, end in births.marks]
    require(ends == sorted(ends) and births.end == max(ends, default=0), f"the ages of rows of {name} are out of order")
    require(births.end <= partition.rows.end, f"{name} has ages of rows that do not exist")


def _check_changes(partition: Partition) -> None:
    """Check the versions of rows, and the cleared rows that are remembered."""
    name, changes, chunks = partition.name, partition.changes, partition.rows.chunks
    require(0 <= changes.made <= partition.version, f"{name} was made after its last change")
    require(changes.sealed <= partition.version, f"{name} was sealed after its last change")
    newest = list(changes.newest.values())
    require(newest == sorted(newest), f"the chunks of {name} are not in order of change")
    require(changes.newest.keys() <= chunks.keys(), f"{name} lists a chunk that does not exist")
    for key, chunk in chunks.items():
        changed = int(chunk.changed.max(initial=0))
        listed = changes.newest.get(key, 0)
        require(changed <= listed, f"chunk {key} of {name} has changed after its listed version")
        require(changed <= partition.version, f"a row of {name} has a later version than its partition")
    versions = [version for version, _, _ in changes.cleared]
    require(versions == sorted(versions) and max(versions, default=0) <= partition.version, f"{name} has later clears")
    for _, indexes, keys in changes.cleared:
        fine = len(indexes) % 8 == 0 and (keys is None or len(keys) == len(indexes) // 8)
        require(fine, f"the list of cleared rows of {name} is malformed")


# ------------------------------------------------------------ blocks


class NeededBlocks:
    """The columns of all needed blocks of a state, ascending by number, and how many values were found in each.

    The table is checked when this is made, `take` checks the values of a field, and `check_all_used` comes last.
    """

    def __init__(self, state: State) -> None:
        table = self.table = state.blocks
        parts = [_check_blocks(table, key, state.next_block) for key in sorted(table.chunks)]
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

    def take(self, field: FieldStats, numbers: np.ndarray, slots: np.ndarray, used: np.ndarray, where: str) -> None:
        """Count the values of a field in these rows of these blocks. `used` marks the blocks of the partition."""
        name = field.name
        if not len(numbers):
            return
        at = np.minimum(np.searchsorted(self.number, numbers), max(len(self.number) - 1, 0))
        exists = len(self.number) > 0 and bool((self.number[at] == numbers).all())
        require(exists, f"1: a value of {name} of {where} is in a block that does not exist")
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
        used[at] = True

    def check_all_used(self) -> None:
        """Check, after all partitions, that every block is needed for as many values as were found in it."""
        require(bool((self.used == self.live).all()), "7: the live values of a block differ from a recount")


def check_ranks(table: BlockTable, field: FieldStats, numbers: np.ndarray, slots: np.ndarray, where: str) -> None:
    """Check the counts of the ranks of a field, which has these live values."""
    ranks = value_ranks(table, field.name, numbers, slots)
    recounted = dict(zip(*(each.tolist() for each in np.unique(ranks, return_counts=True)), strict=True))
    first = field.live - field.counts.total()
    counted = {field.ndim: first, **field.counts} if field.live else {}
    require(recounted == counted, f"7: {where} counts rows of ranks {counted}, a recount gives {recounted}")


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
            exists = 0 <= slot < rows and any(spec.name == key[1] for spec in schema)
            require(exists, f"a digest names row {slot} of block {number}, which does not have field {key[1]!r}")
            require(len(digest) == DIGEST, "a digest has another length")


def _check_blocks(table: BlockTable, key: int, next_block: int) -> tuple[np.ndarray, Columns, Columns]:
    """Check a chunk of the table.

    Returns:
        The numbers of its needed blocks, their columns, and the second locations of those that have one.
    """
    chunk = table.chunks[key]
    columns = chunk.columns
    chunk.check_columns(f"blocks {key}")
    require(bool((columns["live"] >= 0).all()), f"7: a block of {key} has a negative number of live values")
    at = np.flatnonzero(columns["live"])
    numbers = at + (key << BLOCK_BITS)
    require(0 < len(at) == chunk.alive, f"7: blocks {key} count {chunk.alive} needed blocks, a recount gives {len(at)}")
    below = key < MOST >> BLOCK_BITS and numbers[0] > 0 and numbers[-1] < next_block
    require(below, "a block number is not below the next one")
    few = {name: column[at] for name, column in columns.items()}
    require(bool((few["rows"] > 0).all()), f"a block of {key} has no rows")
    _check_range(few, ("nbytes", *PLACE), f"a block of {key}")
    if not chunk.second:
        return numbers, few, {}
    copied = np.flatnonzero(chunk.second["extent"][at])
    second = {name: column[at[copied]] for name, column in chunk.second.items()}
    _check_range(second, PLACE, f"a second location of blocks {key}")
    twice = numbers[copied][second["unit"] == few["unit"][copied]]
    require(not len(twice), f"blocks {twice[:5].tolist()} are in one unit twice")
    return numbers, few, {**second, "nbytes": few["nbytes"][copied]}


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
    for one, packed_dims, count in np.unique(np.stack([schema, dims, rows]), axis=1).T.tolist():
        packed = table.dims[packed_dims]
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
            exists = (unit, extent) in table.extents
            require(exists, f"a block is in extent {extent} of unit {unit}, which does not exist")
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
