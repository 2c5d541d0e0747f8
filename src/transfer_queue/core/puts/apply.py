"""Applies puts. No other code adds rows, or gives them values that clients have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Union

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.fields import FieldStats, dims_parts
from transfer_queue.core.tables.ready_sets import Fields
from transfer_queue.core.tables.rows import RowsOfChunk
from transfer_queue.messages.descriptors import DIGEST, FieldSpec, NewBlock

NO_FIELDS: Fields = frozenset()
Positions = Union[Sequence[int], np.ndarray]


class _Values(NamedTuple):
    """Where rows of a put have their values of some fields from now on."""

    fields: Sequence[FieldSpec | r.SharedField]
    blocks: int | np.ndarray
    """The number of the block of all rows, or of each."""
    slots: int | np.ndarray
    """The row in the block."""
    targets: np.ndarray | None = None
    """The places of the rows among those of the put; None: all of them."""


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
    state.next_index = max(state.next_index, put.first_index + put.count)
    next_block = put.first_block
    for part in put.puts:
        next_block += len(part.blocks)
    state.next_block = max(state.next_block, next_block)


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
    numbers, counts = [], []
    for part in put.puts:
        numbers.append(owners.setdefault(part.client, len(owners) + 1))
        counts.append(part.count if len(put.puts) > 1 else len(positions))
        if partition.wants.promised:
            partition.wants.fulfil(part.client, counts[-1])
    owner = np.repeat(np.array(numbers, "i4"), counts) if len(numbers) > 1 else None
    for _, chunk, at, where in added:
        chunk.owner[at] = numbers[0] if owner is None else owner[where]
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
    if ranks.names:
        for _, chunk, at, _ in rows:
            ranks.remove(chunk, at)
    values, names = _find_values(partition, put)
    released: list[np.ndarray] = []
    for each in values:
        its = rows
        if each.targets is not None:
            its = list(partition.rows.split(np.asarray(positions)[each.targets]))
        released += _set_columns(partition, its, each)
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


def _find_values(partition: Partition, put: r.SamplesPut) -> tuple[list[_Values], Fields]:
    """Return where the values of a put are, and of which fields. Adds its blocks, and retains those that it shares."""
    found: list[_Values] = []
    for field in put.shared:
        numbers = np.frombuffer(field.blocks, "<i8")
        partition.blocks.retain(numbers)
        found.append(_Values([field], numbers, np.frombuffer(field.slots, "<i4"), np.frombuffer(field.targets, "<i4")))
    names: Fields = frozenset([field.name for field in put.shared]) if found else NO_FIELDS
    number = put.first_block
    for part in put.puts:
        for block in part.blocks:
            slots: int | np.ndarray = 0
            targets = None
            if block.slots is not None:
                slots, targets = _slots_of(block.slots, part.count)
            elif part.count > 1:
                slots = np.arange(part.count, dtype="i4")
            fields = add_types(partition, block, len(part.blocks) == 1)
            needed = len(fields) * (part.count if targets is None else len(targets))
            partition.blocks.add(number, part.client, block, needed, partition.number)
            partition.nbytes += block.nbytes
            found.append(_Values(block.schema, number, slots, targets))
            names = fields if names <= fields else names | fields
            number += 1
    if len(put.puts) > 1:  # one block each, with equal schemas
        counts = [part.count for part in put.puts]
        numbers = np.repeat(np.arange(put.first_block, number), counts)
        within = np.concatenate([np.arange(count, dtype="i4") for count in counts])
        found = [_Values(found[0].fields, numbers, within)]
    return found, names


def _slots_of(packed: bytes, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rows of a block that have the values of `count` rows of its put, and the places of these rows.

    The places are None if the block has a value of every row. Otherwise the put shares the other values.
    """
    slots = np.frombuffer(packed, "<i4")
    targets = np.flatnonzero(slots >= 0)
    return (slots, None) if len(targets) == count else (slots[targets], targets)


def _set_columns(partition: Partition, rows: Sequence[RowsOfChunk], values: _Values) -> list[np.ndarray]:
    """Set the values of these rows. Return their former blocks."""
    blocks, slots, losses = values.blocks, values.slots, partition.losses
    released: list[np.ndarray] = []
    for _, chunk, at, where in rows:
        block = blocks if isinstance(blocks, int) else blocks[where]
        slot = slots if isinstance(slots, int) else slots[where]
        for named in values.fields:
            name = named.name
            columns = chunk.field.get(name) or chunk.field_columns(name)
            before = columns[0][at]  # of rows that were just added, whose places are a slice, a view on zeros
            held = int(np.count_nonzero(before))
            if held:
                released.append(before)
            if losses.counts:
                losses.forget(chunk, name, at)
            field = partition.fields[name]
            field.live += len(before) - held
            field.ever += len(before) - held
            columns[0][at] = block
            columns[1][at] = slot
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
