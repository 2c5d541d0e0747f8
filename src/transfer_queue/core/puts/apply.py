"""Applies puts. No other code adds rows, or gives them values that clients have written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Union

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies
from transfer_queue.core.ready.deferred_updates import Fields
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.field_types import FieldStats, dims_parts
from transfer_queue.core.tables.row_table import RowsOfChunk
from transfer_queue.messages.descriptors import DIGEST, FieldSpec, NewBlock

NO_FIELDS: Fields = frozenset()
Positions = Union[Sequence[int], np.ndarray]


@applies(r.SamplesPut)
def apply_put(state: State, put: r.SamplesPut) -> None:
    """Apply a reservation, a put, or puts of several clients."""
    partition = state.new_version(put.partition) if put.puts else state.partitions[put.partition]
    if put.pre_allocated:
        partition.waiting += range(partition.rows.end, partition.rows.end + put.count)
        partition.rows.append(put.first_index, put.count, waiting=True)
    else:
        _apply_to_rows(partition, put)
    for field in put.noted:
        slots = np.frombuffer(field.slots, "<i4").tolist()
        digests = [field.digests[at : at + DIGEST] for at in range(0, len(field.digests), DIGEST)]
        values = {digest: (field.block, slot) for digest, slot in zip(digests, slots, strict=True)}
        state.blocks.equal.add(partition.number, field.name, values)
    next_block = put.first_block
    for part in put.puts:
        next_block += len(part.blocks)
    state.next_block = max(state.next_block, next_block)
    state.next_index = max(state.next_index, put.first_index + put.count)


def _apply_to_rows(partition: Partition, put: r.SamplesPut) -> None:
    added: Sequence[RowsOfChunk] = ()
    new: Positions = ()
    if put.count or put.taken:
        added, new = _add_rows(partition, put)
    rows, positions = added, new
    if put.rows is not None:
        named = partition.rows.positions_of(np.frombuffer(put.rows, "<i8"))
        rows, positions = list(partition.rows.split(named)), named
    if put.groups is not None:
        _join_groups(partition, put.groups, positions, new)
    if put.tags is not None:
        for key, chunk, at, where in rows:
            partition.put_tags(key, chunk, at, put.tags, where, put.replace_tags)
    has_values = put.first_block > 0 or bool(put.shared)
    if has_values:
        _set_values(partition, put, rows, positions)
    for key, chunk, at, _ in rows if has_values or put.tags is not None else added if put.keys is not None else ():
        chunk.changed[at] = partition.version
        partition.changes.mark_chunk_changed(partition.version, key)


def _add_rows(partition: Partition, put: r.SamplesPut) -> tuple[Sequence[RowsOfChunk], Sequence[int]]:
    """Take and add the rows that a put takes and adds, with their keys. Return them, and their positions."""
    table, owners = partition.rows, partition.owners
    added = table.append(put.first_index, put.count)
    positions: Sequence[int] = range(table.end - put.count, table.end)
    if put.taken:
        positions = [*partition.waiting[: put.taken], *positions]
        del partition.waiting[: put.taken]
        added = list(table.split(np.array(positions, "i8")))
        for _, chunk, at, _ in added:
            chunk.waiting[at] = 0
    numbers = []
    for part in put.puts:
        numbers.append(owners.setdefault(part.client, len(owners) + 1))
        if partition.wants.promised:
            partition.wants.fulfil(part.client, part.count if len(put.puts) > 1 else len(positions))
    owner = numbers[0] if len(numbers) == 1 else np.repeat(numbers, [part.count for part in put.puts])
    for _, chunk, at, where in added:
        chunk.owner[at] = owner if isinstance(owner, int) else owner[where]
    partition.admitted += len(positions)
    if partition.limits:
        partition.window.add_rows(len(positions))
    if put.keys is not None:
        partition.keys.update(zip(put.keys, positions, strict=True))
        for _, chunk, at, where in added:
            listed = chunk.key_list()
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


def _set_values(partition: Partition, put: r.SamplesPut, rows: Sequence[RowsOfChunk], positions: Positions) -> None:
    """Add the blocks of a put, and record where its rows have their values from now on."""
    ranks = partition.field_ranks
    released: list[np.ndarray] = []
    if ranks.names:
        for _, chunk, at, _ in rows:
            ranks.remove(chunk, at)
    for field in put.shared:
        numbers = np.frombuffer(field.blocks, "<i8")
        partition.blocks.retain(numbers)
        its = partition.rows.split(np.asarray(positions)[np.frombuffer(field.targets, "<i4")])
        released += _set_columns(partition, its, [field], numbers, np.frombuffer(field.slots, "<i4"))
    names: Fields = frozenset([field.name for field in put.shared]) if put.shared else NO_FIELDS
    number = put.first_block
    for part in put.puts:
        for block in part.blocks:
            fields = add_types(partition, block, len(part.blocks) == 1)
            names = names | fields if names else fields
            if len(put.puts) == 1:
                released += _set_block(partition, part, block, number, rows, positions)
            else:
                partition.blocks.add(number, part.client, block, part.count * len(fields), partition.number)
            partition.nbytes += block.nbytes
            number += 1
    if len(put.puts) > 1:  # one block each, with equal schemas
        counts = [part.count for part in put.puts]
        numbers = np.repeat(np.arange(put.first_block, number), counts)
        slots = np.concatenate([np.arange(count, dtype="i4") for count in counts])
        _set_columns(partition, rows, put.puts[0].blocks[0].schema, numbers, slots)
    if ranks.names:
        for _, chunk, at, _ in rows:
            ranks.add(chunk, at)
        partition.forget_gone_ranks()
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))
    if partition.ready:
        for key, chunk, at, _ in rows:
            partition.unseen.add(names, key, chunk, at)
        partition.update_awaited_sets(names)


def _set_block(
    partition: Partition,
    part: r.WriterPart,
    block: NewBlock,
    number: int,
    rows: Iterable[RowsOfChunk],
    positions: Positions,
) -> list[np.ndarray]:
    """Add a block, and record that the rows of its put have its values. Return their former blocks."""
    count = part.count
    slots: int | np.ndarray = 0
    if block.slots is not None:
        slots = np.frombuffer(block.slots, "<i4")
        targets = np.flatnonzero(slots >= 0)
        if len(targets) < count:  # the put shares the other values
            count, slots = len(targets), slots[targets]
            rows = partition.rows.split(np.asarray(positions)[targets])
    elif count > 1:
        slots = np.arange(count, dtype="i4")
    partition.blocks.add(number, part.client, block, count * len(block.schema), partition.number)
    return _set_columns(partition, rows, block.schema, number, slots)


def _set_columns(
    partition: Partition,
    rows: Iterable[RowsOfChunk],
    fields: Sequence[FieldSpec | r.SharedField],
    blocks: int | np.ndarray,
    slots: int | np.ndarray,
) -> list[np.ndarray]:
    """Set the values of rows: the number of the block, and the row in the block, of all or of each of them.

    Returns the former blocks of the rows.
    """
    released: list[np.ndarray] = []
    losses = partition.losses
    for _, chunk, at, where in rows:
        block = blocks if isinstance(blocks, int) else blocks[where]
        slot = slots if isinstance(slots, int) else slots[where]
        for named in fields:
            name = named.name
            blocks_of, slots_of = chunk.field.get(name) or chunk.field_columns(name)
            if isinstance(at, slice):  # rows that were just added, which have no value
                gained = at.stop - at.start
            else:
                before = blocks_of[at]
                gained = len(at) - int(np.count_nonzero(before))
                if gained < len(at):
                    released.append(before)
                if losses.counts:
                    losses.forget(chunk, name, at)
            field = partition.fields[name]
            field.live += gained
            field.ever += gained
            blocks_of[at] = block
            slots_of[at] = slot
    return released


def add_types(partition: Partition, block: NewBlock, alone: bool) -> Fields:
    """Add the row shapes of a block to the types of its fields. Return the names of the fields.

    alone: whether its put has no other block.
    """
    shape = (block.rows, block.dims, block.schema)
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
