"""Applies puts, clears and drops. No other code adds or removes rows, or gives them values of clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Union

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies, applies_to_partition
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.fields import FieldStats, dims_parts
from transfer_queue.core.tables.ready_sets import Fields
from transfer_queue.core.tables.rows import CHUNK_BITS, CONSUMED, Chunk, RowsOfChunk
from transfer_queue.messages.descriptors import DIGEST, FieldSpec, NewBlock

NO_FIELDS: Fields = frozenset()
Positions = Union[Sequence[int], np.ndarray]

# ------------------------------------------------------------ puts


@applies(r.SamplesPut)
def apply_put(state: State, put: r.SamplesPut) -> None:
    """Apply a reservation, a put, or puts of several clients."""
    partition = state.new_version(put.partition)
    state.next_index = max(state.next_index, put.first_index + put.count)
    if put.pre_allocated:
        partition.waiting += range(partition.rows.end, partition.rows.end + put.count)
        partition.rows.append(put.first_index, put.count, waiting=True)
        return
    added: Sequence[RowsOfChunk] = ()
    new: Positions = ()
    if put.count or put.taken:
        added, new = _add_rows(partition, put)
    rows, positions = added, new
    if put.rows is not None:
        positions = partition.rows.positions_of(np.frombuffer(put.rows, "<i8"))
        rows = partition.rows.split(positions)
    if put.groups is not None:
        _join_groups(partition, put.groups, positions, new)
    if put.tags is not None:
        for key, chunk, at, where in rows:
            partition.put_tags(key, chunk, at, put.tags, where, put.replace_tags)
    if put.first_block or put.shared:
        next_block = _set_values(partition, put, rows, positions)
        state.next_block = max(state.next_block, next_block)
    elif put.tags is None:  # without keys, the rows have not got anything that others can see
        rows = () if put.keys is None else added
    partition.changes.mark_rows_changed(partition.version, rows)
    for field in put.noted:
        slots = np.frombuffer(field.slots, "<i4").tolist()
        digests = [field.digests[at : at + DIGEST] for at in range(0, len(field.digests), DIGEST)]
        values = {digest: (field.block, slot) for digest, slot in zip(digests, slots, strict=True)}
        state.blocks.equal.add(partition.number, field.name, values)


def _add_rows(partition: Partition, put: r.SamplesPut) -> tuple[Sequence[RowsOfChunk], Sequence[int]]:
    """Take and add the rows that a put takes and adds, with their keys. Return them, and their positions."""
    table, owners, numbers = partition.rows, partition.owners, []
    for part in put.puts:
        numbers.append(owners.setdefault(part.client, len(owners) + 1))
    first = table.end
    added = table.append(put.first_index, put.count, owner=numbers[0])
    positions: Sequence[int] = range(first, table.end)
    if put.taken:
        positions = [*partition.waiting[: put.taken], *positions]
        del partition.waiting[: put.taken]
        added = table.split(np.array(positions, "i8"))
        for _, chunk, at, _ in added:
            chunk.waiting[at] = 0
            chunk.owner[at] = numbers[0]
    count = len(positions)
    if len(numbers) > 1:
        owner = np.repeat(numbers, [part.count for part in put.puts])
        for _, chunk, at, where in added:
            chunk.owner[at] = owner[where]
    if partition.wants.promised:
        for part in put.puts:
            partition.wants.fulfil(part.client, part.count if len(numbers) > 1 else count)
    partition.admitted += count
    if partition.window.limit is not None:
        partition.window.unfinished += count
    if put.keys is not None:
        partition.keys.update(zip(put.keys, positions, strict=True))
        for _, chunk, at, where in added:
            listed = chunk.keys or chunk.key_list()
            if isinstance(at, slice):
                listed[at] = put.keys[where]
            else:
                for place, key in zip(at.tolist(), put.keys[where], strict=True):
                    listed[place] = key
    return added, positions


def _join_groups(partition: Partition, groups: Sequence[str | None], positions: Positions, new: Positions) -> None:
    """Let rows join their groups. New rows join before those that exist."""
    members = list(zip(np.asarray(positions).tolist(), groups, strict=True))
    if 0 < len(new) < len(members):
        first = set(new)
        members.sort(key=lambda member: member[0] not in first)
    partition.join([group for _, group in members], [position for position, _ in members])


def _set_values(partition: Partition, put: r.SamplesPut, rows: Sequence[RowsOfChunk], positions: Positions) -> int:
    """Add the blocks of a put, and record where its rows have their values from now on.

    Returns the number after that of its last block.
    """
    ranks, puts = partition.field_ranks, put.puts
    released: list[np.ndarray] = []
    if ranks.names:
        for _, chunk, at, _ in rows:
            ranks.remove(chunk, at)
    names = _share_values(partition, put.shared, positions, released) if put.shared else NO_FIELDS
    number = put.first_block
    for part in puts:
        for block in part.blocks:
            parts, count = rows, part.count
            slots: int | np.ndarray = 0
            if block.slots is not None:
                slots = np.frombuffer(block.slots, "<i4")
                targets = np.flatnonzero(slots >= 0)
                if len(targets) < count:  # the put shares the other values
                    count, slots = len(targets), slots[targets]
                    parts = partition.rows.split(np.asarray(positions)[targets])
            elif count > 1:
                slots = np.arange(count, dtype="i4")
            partition.blocks.add(number, part.client, block, count * len(block.schema), partition.number)
            fields = add_types(partition, block, len(part.blocks) == 1)
            names = names | fields if names else fields
            if len(puts) == 1:
                _set_columns(partition, parts, block.schema, number, slots, released)
            partition.nbytes += block.nbytes
            number += 1
    if len(puts) > 1:  # one block each, with equal schemas
        counts = [part.count for part in puts]
        numbers = np.repeat(np.arange(put.first_block, number), counts)
        slots = np.concatenate([np.arange(count, dtype="i4") for count in counts])
        _set_columns(partition, rows, puts[0].blocks[0].schema, numbers, slots, released)
    if ranks.names:
        for _, chunk, at, _ in rows:
            ranks.add(chunk, at)
        partition.forget_empty_ranks()
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))
    if partition.ready:
        for key, chunk, at, _ in rows:
            partition.unseen.add(names, key, chunk, at)
        partition.update_awaited_sets(names)
    return number


def _share_values(
    partition: Partition, shared: Sequence[r.SharedField], positions: Positions, released: list[np.ndarray]
) -> Fields:
    """Give rows values of earlier puts, and add their former blocks to `released`. Return the fields."""
    for field in shared:
        numbers = np.frombuffer(field.blocks, "<i8")
        partition.blocks.retain(numbers)
        parts = partition.rows.split(np.asarray(positions)[np.frombuffer(field.targets, "<i4")])
        _set_columns(partition, parts, [field], numbers, np.frombuffer(field.slots, "<i4"), released)
    return frozenset([field.name for field in shared])


def _set_columns(
    partition: Partition,
    rows: Iterable[RowsOfChunk],
    fields: Sequence[FieldSpec | r.SharedField],
    blocks: int | np.ndarray,
    slots: int | np.ndarray,
    released: list[np.ndarray],
) -> None:
    """Set the values of rows: the number of the block, of all or of each of them, and the row in the block of each.

    Adds the former blocks of the rows to `released`.
    """
    stats, losses = partition.fields, partition.losses
    for _, chunk, at, where in rows:
        columns, block, slot = chunk.field, blocks, slots
        is_new = isinstance(at, slice)  # rows that were just added, which have no value
        gained = at.stop - at.start if is_new else 0
        if isinstance(slots, np.ndarray):
            slot = slots[where]
            block = blocks[where] if isinstance(blocks, np.ndarray) else blocks
        elif is_new:
            at = at.start  # numpy sets one entry faster than a slice
        for named in fields:
            name = named.name
            blocks_of, slots_of = columns.get(name) or chunk.field_columns(name)
            if not is_new:
                before = blocks_of[at]
                gained = len(at) - int(np.count_nonzero(before))
                if gained < len(at):
                    released.append(before)
                if losses.counts:
                    losses.forget(chunk, name, at)
            field = stats[name]
            field.live += gained
            field.ever += gained
            blocks_of[at] = block
            slots_of[at] = slot


def add_types(partition: Partition, block: NewBlock, alone: bool) -> Fields:
    """Add the row shapes of the block that was added last to the types of its fields. Return the names of the fields.

    alone: whether its put has no other block.
    """
    # equal schemas are one object in the table of blocks, so that the comparison takes no time
    shape = (block.rows, block.dims, partition.blocks.newest_schema)
    if partition.learnt == shape:
        return partition.learnt_fields  # equal shapes change nothing; usual for a writer that puts in a loop
    dims = np.frombuffer(block.dims, "<i8")
    several = False
    for spec, part in zip(block.schema, dims_parts(block.schema, dims, block.rows)):
        field = partition.fields.get(spec.name)
        if field is None:
            field = partition.fields[spec.name] = FieldStats(spec.name)
        field.add(spec, part)
        several |= bool(field.others)
        if field.further:
            partition.field_ranks.names.add(spec.name)
    # every put into a field of several dtypes is checked, so that each client can warn once
    partition.learnt = shape if alone and not several else None
    partition.learnt_fields = frozenset([spec.name for spec in block.schema])
    return partition.learnt_fields


# ------------------------------------------------------------ clears and drops


@applies_to_partition(r.RowsCleared)
def _apply_rows_cleared(partition: Partition, record: r.RowsCleared) -> None:
    clear_rows(partition, partition.rows.positions_of(np.frombuffer(record.rows, "<i8")))


@applies_to_partition(r.RowsDropped)
def _apply_rows_dropped(partition: Partition, dropped: r.RowsDropped) -> None:
    rows = np.frombuffer(dropped.rows, "<i8")
    positions = partition.rows.positions_of(rows)
    partition.admitted -= len(rows)
    if not dropped.withdrawn:
        partition.drops.add(rows, dropped.reason)
    clear_rows(partition, positions, withdrawn=dropped.withdrawn)
    for name, count in dropped.unborn:
        if count:
            partition.groups.unborn[name] = count
        else:
            partition.groups.unborn.pop(name, None)


def clear_all(partition: Partition) -> None:
    """Remove all rows of a partition that is removed itself."""
    partition.ready.clear()
    partition.unseen.clear()
    clear_rows(partition, partition.rows.live_positions())


def free_rows(partition: Partition, freed: bytes) -> None:
    """Remove these rows (i8), which nobody needs any more, and count them."""
    rows = np.frombuffer(freed, "<i8")
    clear_rows(partition, partition.rows.positions_of(rows))
    partition.freed += len(rows)


def clear_rows(partition: Partition, positions: np.ndarray, *, withdrawn: bool = False) -> None:
    """Remove these rows. withdrawn: as if they had never joined their groups."""
    for key, chunk, at, _ in partition.rows.split(np.sort(positions)):
        partition.window.remove(key, chunk, at)
        chunk.alive[at] = 0
        chunk.living -= len(at)
        partition.rows.count -= len(at)
        for task, taken in chunk.consumed.items():
            partition.tasks[task] -= int(np.count_nonzero(taken[at] == CONSUMED))
            partition.count_unclaimed(task, taken[at])
            taken[at] = 0
        partition.leases.clear_rows(key, at)
        for column in (*chunk.held.values(), *chunk.finished.values()):
            column[at] = 0
        partition.passed.codes.clear_rows(key, at)
        for task, dealt in chunk.dealt.items():
            numbers, counts = np.unique(dealt[at], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if number:
                    partition.dealt[task].remove_rows(number, count)
            dealt[at] = 0
        for ready in partition.ready.values():
            ready.update(key, chunk, at, partition.groups)
        if chunk.group is not None:
            for place, number in zip(at.tolist(), chunk.group[at].tolist(), strict=True):
                if number >= 0 and withdrawn:
                    _forget_member(partition, number, place + (key << CHUNK_BITS))
                elif number >= 0:
                    partition.groups.leave(number)
            chunk.group[at] = -1
        partition.changes.clear(partition.version, chunk, at)
        _clear_values(partition, chunk, at)
        if chunk.waiting[at].any():
            cleared = set((at[chunk.waiting[at] == 1] + (key << CHUNK_BITS)).tolist())
            partition.waiting = [p for p in partition.waiting if p not in cleared]
            chunk.waiting[at] = 0
        if partition.rows.drop_if_empty(key):
            partition.changes.forget_chunk(key)
            for ready in partition.ready.values():
                ready.forget_chunk(key)
    partition.forget_empty_ranks()


def _forget_member(partition: Partition, number: int, position: int) -> None:
    partition.groups.forget_member(number, position)
    if number in partition.groups.declared:
        for ready in partition.ready.values():
            ready.note_group_size(number, partition.groups)
            partition.gained.add(ready.task)  # a group that was too large may be complete now


def _clear_values(partition: Partition, chunk: Chunk, at: np.ndarray) -> None:
    released: list[np.ndarray] = []
    for name in chunk.lost:
        partition.losses.forget(chunk, name, at)
    partition.field_ranks.remove(chunk, at)
    for name, (column, _) in chunk.field.items():
        old = column[at]
        count = int(np.count_nonzero(old))
        if count:
            column[at] = 0
            released.append(old)
            partition.remove_values(name, count)
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))
    chunk.clear_tags(at)
    for key in chunk.take_keys(at):
        del partition.keys[key]
