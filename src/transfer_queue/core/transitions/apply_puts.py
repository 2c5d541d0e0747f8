"""How puts, losses and repacked blocks change the values of a partition. Called only by `transitions.apply`.

`apply_rows_put` is the short path of most rows: they are new and consecutive, so that there is nothing to look up, to
merge or to release. `partition.Partition.reserve` and `publish` are the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.core.events.records import (
    Published,
    RowsPut,
    RowsPutTogether,
    RowsRepacked,
    SharedField,
    ValuesShared,
)
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.field_types import FieldStats, dims_parts, shape_of
from transfer_queue.core.tables.lost_values import Found, LossEvent
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, ValueColumns
from transfer_queue.messages.descriptors import FieldSpec, NewBlock


def apply_rows_put(partition: Partition, put: RowsPut) -> None:
    """Apply a `records.RowsPut`."""
    count, blocks = put.count, put.blocks
    start = partition.rows.end
    runs = partition.rows.append(put.first_index, count, owner=partition.owner_number(put.client))
    partition.count_new_rows(put.client, count)
    if put.keys is not None:
        partition.keys.update(zip(put.keys, range(start, start + count), strict=True))
    values: list[tuple[int, NewBlock, list[FieldStats]]] = []
    schemas = []
    for number, block in enumerate(blocks, put.block_number):
        partition.blocks.add(number, put.client, block, count * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        schemas.append(add_types(partition, block, len(blocks) == 1))
        values.append((number, block, _count_new(partition, block.schema, count)))
    done = 0
    for key, chunk, at, first, last in runs:
        before, done = done, done + last - first
        if put.keys is not None:
            chunk.key_list()[first:last] = put.keys[before:done]
        if put.tags is not None:
            partition.put_tags(key, chunk, slice(first, last), put.tags, slice(before, done))
        for number, block, fields in values:
            slots: Any = before  # the usual put of one row
            if done - before > 1:
                slots = slot_column(block, before, done)
            elif block.slots is not None:
                slots = slot_column(block, before, done)[0]
            _set_new_values(chunk, at, fields, number, slots)
        if partition.field_ranks.names:
            partition.field_ranks.add(chunk, at)
        if values or put.keys is not None or put.tags is not None:
            chunk.changed[at] = partition.version
            partition.changes.mark_chunk_changed(partition.version, key)
    partition.forget_gone_ranks()
    if put.groups is not None:
        partition.join(put.groups, range(start, start + count))
    if blocks and partition.ready:
        names = partition.names_of(schemas)
        for key, chunk, _, first, last in runs:
            partition.unseen.add_run(names, key, chunk, first, last)
        partition.update_awaited_sets(names)


def apply_rows_put_together(partition: Partition, put: RowsPutTogether) -> None:
    """Apply a `records.RowsPutTogether`."""
    clients, blocks = [each.client for each in put.puts], put.blocks
    counts = [block.rows for block in blocks]
    count, start = sum(counts), partition.rows.end
    partition.blocks.add_alike(put.block_number, clients, blocks, partition.number)
    for client, block in zip(clients, blocks, strict=True):
        partition.count_new_rows(client, block.rows)
        partition.nbytes += block.nbytes
        schema = add_types(partition, block, True)
    fields = _count_new(partition, schema, count)
    if put.keys is not None:
        partition.keys.update(zip(put.keys, range(start, start + count), strict=True))
    numbers = np.arange(put.block_number, put.block_number + len(counts))
    owners = np.array([partition.owner_number(client) for client in clients], "i4")
    slots: Any = 0
    if count > len(counts):
        numbers, owners = np.repeat(numbers, counts), np.repeat(owners, counts)
        slots = np.concatenate([np.arange(rows, dtype="i4") for rows in counts])
    runs = partition.rows.append(put.first_index, count)
    done = 0
    for key, chunk, at, first, last in runs:
        before, done = done, done + last - first
        mine = slice(before, done)
        chunk.owner[first:last] = owners[mine]
        if put.keys is not None:
            chunk.key_list()[first:last] = put.keys[mine]
        if put.tags is not None:
            partition.put_tags(key, chunk, slice(first, last), put.tags, mine)
        _set_new_values(
            chunk, slice(first, last), fields, numbers[mine], slots if isinstance(slots, int) else slots[mine]
        )
        if partition.field_ranks.names:
            partition.field_ranks.add(chunk, at)
        chunk.changed[at] = partition.version
        partition.changes.mark_chunk_changed(partition.version, key)
    partition.forget_gone_ranks()
    if partition.ready:
        names = partition.names_of([schema])
        for key, chunk, _, first, last in runs:
            partition.unseen.add_run(names, key, chunk, first, last)
        partition.update_awaited_sets(names)


def _count_new(partition: Partition, schema: Sequence[FieldSpec], count: int) -> list[FieldStats]:
    """Count the values of new rows. Return the fields."""
    fields = [partition.fields[spec.name] for spec in schema]
    for field in fields:
        field.live += count
        field.ever += count
    return fields


def _set_new_values(chunk: Chunk, at: Any, fields: Sequence[FieldStats], number: Any, slots: Any) -> None:
    """Set the values of new rows of a chunk: the numbers of their blocks, and their rows in the blocks."""
    for field in fields:
        column, slot = chunk.field.get(field.name) or chunk.field_columns(field.name)
        column[at] = number
        slot[at] = slots


def slot_column(block: NewBlock, first: int, last: int) -> np.ndarray:
    """Return the row of a block that has the value of each target from `first` to before `last`, i4."""
    if block.slots is None:
        return np.arange(first, last, dtype="i4")
    return np.frombuffer(block.slots, "<i4")[first:last]


def publish(partition: Partition, positions: np.ndarray, put: Published) -> None:
    """Record that the values of these rows are in the blocks of a put, which has at least one."""
    blocks = put.blocks
    rows = list(partition.rows.split(positions))
    released: list[np.ndarray] = []
    schemas = []
    for _, chunk, at, _ in rows:
        partition.field_ranks.remove(chunk, at)
    for number, block in enumerate(blocks, put.block_number):
        values = len(positions) if block.slots is None else _count_slots(block.slots)
        partition.blocks.add(number, put.writer, block, values * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        schemas.append(add_types(partition, block, len(blocks) == 1))
        released += _set_values(partition, rows, len(positions), number, block)
    for _, chunk, at, _ in rows:
        partition.field_ranks.add(chunk, at)
    partition.forget_gone_ranks()
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))
    if partition.ready:
        names = partition.names_of(schemas)
        for key, chunk, where, _ in rows:
            partition.unseen.add_rows(names, key, chunk, where)
        partition.update_awaited_sets(names)


def _set_values(
    partition: Partition,
    rows: Sequence[tuple[int, Chunk, Any, Any]],
    count: int,
    number: int,
    block: NewBlock,
) -> list[np.ndarray]:
    """Set the values of the `count` rows of a put to a block. Return their former blocks.

    rows: The rows as `RowTable.split` returns them.
    """
    slots = slot_column(block, 0, count)
    released: list[np.ndarray] = []
    losses = partition.losses if partition.losses.counts else None
    for _, chunk, at, where in rows:
        within = slots[where]
        if block.slots is not None and (within < 0).any():  # `share_values` has set the others
            at, within = at[within >= 0], within[within >= 0]
        if losses is not None:
            for spec in block.schema:
                losses.forget(chunk, spec.name, at)
        for spec in block.schema:
            field = partition.fields[spec.name]
            column, slot = chunk.field_columns(spec.name)
            old = column[at]
            held = int(np.count_nonzero(old))
            if held:
                released.append(old)
            field.live += len(at) - held
            field.ever += len(at) - held
            column[at] = number
            slot[at] = within
    return released


def _count_slots(packed: bytes) -> int:
    """Return the number of slots that are not -1."""
    return int(np.count_nonzero(np.frombuffer(packed, "<i4") >= 0))


def share_values(partition: Partition, shared: ValuesShared) -> None:
    """Apply a `records.ValuesShared`."""
    positions = partition.rows.positions_of(np.frombuffer(shared.rows, "<i8"))
    for field in shared.fields:
        partition.blocks.retain(np.frombuffer(field.blocks, "<i8"))
    rows = list(partition.rows.split(positions))
    for _, chunk, at, _ in rows:
        partition.field_ranks.remove(chunk, at)
    released = [old for field in shared.fields for old in _set_shared(partition, positions, field)]
    for _, chunk, at, _ in rows:
        partition.field_ranks.add(chunk, at)
    partition.forget_gone_ranks()
    partition.nbytes -= partition.blocks.release(np.concatenate(released))
    if partition.ready:
        names = frozenset(field.name for field in shared.fields)
        for key, chunk, at, _ in rows:
            partition.unseen.add_rows(names, key, chunk, at)
        partition.update_awaited_sets(names)
    partition.changes.mark_changed(partition.version, positions)


def _set_shared(partition: Partition, positions: np.ndarray, field: SharedField) -> list[np.ndarray]:
    """Set the values of a field that are in earlier blocks. Return the former blocks of the rows."""
    blocks, slots = np.frombuffer(field.blocks, "<i8"), np.frombuffer(field.slots, "<i4")
    stats, losses = partition.fields[field.name], partition.losses
    released = []
    for _, chunk, at, where in partition.rows.split(positions[np.frombuffer(field.targets, "<i4")]):
        column, slot = chunk.field_columns(field.name)
        old = column[at]
        added = len(old) - int(np.count_nonzero(old))
        stats.live += added
        stats.ever += added
        if losses.counts:
            losses.forget(chunk, field.name, at)
        column[at], slot[at] = blocks[where], slots[where]
        released.append(old)
    return released


def lose_values(partition: Partition, found: list[Found], number: int, loss: LossEvent) -> None:
    """Record that these values are lost by event `number`, so that their rows do not have them any more."""
    partition.losses.events[number] = loss
    released: list[np.ndarray] = []
    touched: dict[int, list[np.ndarray]] = {}
    for key, chunk, name, columns, at in found:
        released.append(columns[0][at])
        partition.field_ranks.remove(chunk, at)
        columns[0][at] = 0
        partition.field_ranks.add(chunk, at)
        partition.losses.mark(chunk, name, at, number)
        partition.remove_values(name, len(at))
        touched.setdefault(key, []).append(at)
    partition.forget_gone_ranks()
    partition.nbytes -= partition.blocks.release(np.concatenate(released))
    for key, parts in touched.items():
        at = np.unique(np.concatenate(parts))
        partition.changes.mark_changed(partition.version, at + (key << CHUNK_BITS))
        for ready in partition.ready.values():
            ready.update(key, partition.rows.chunks[key], at, partition.groups)


def apply_repacked(partition: Partition, repacked: RowsRepacked, writer: str) -> None:
    """Apply a `records.RowsRepacked`."""
    blocks, first = repacked.blocks, repacked.first_block
    rows, sources, slots = (
        np.frombuffer(column, kind)
        for column, kind in ((repacked.rows, "<i8"), (repacked.sources, "<i8"), (repacked.slots, "<i4"))
    )
    taken = [slot_column(block, 0, block.rows if block.slots is None else len(block.slots) // 4) for block in blocks]
    counts, fresh = [len(each) for each in taken], np.concatenate(taken)
    numbers = np.repeat(np.arange(first, first + len(blocks)), counts)
    positions = partition.rows.positions_of(rows)
    values = np.zeros(len(blocks), "i8")
    found: list[tuple[str, ValueColumns, np.ndarray, np.ndarray]] = []
    names = [{spec.name for spec in block.schema} for block in blocks]
    for name in sorted(set().union(*names)):
        having = np.repeat([name in each for each in names], counts)
        there = np.flatnonzero((positions >= 0) & having)
        for _, chunk, at, where in partition.rows.split(positions[there]):
            columns = chunk.field.get(name)
            if columns is None:
                continue
            chosen = there[where]
            same = (columns[0][at] == sources[chosen]) & (columns[1][at] == slots[chosen])
            found.append((name, columns, np.asarray(at)[same], chosen[same]))
            values += np.bincount(numbers[chosen[same]] - first, minlength=len(blocks))
    for number, block, needed in zip(range(first, first + len(blocks)), blocks, values.tolist(), strict=True):
        if needed:
            partition.blocks.add(number, writer, block, needed, partition.number)
            partition.nbytes += block.nbytes
    released: list[np.ndarray] = []
    for name, columns, at, chosen in found:
        columns[0][at], columns[1][at] = numbers[chosen], fresh[chosen]
        if partition.blocks.equal.of_block:
            old, new = (sources[chosen], slots[chosen]), (numbers[chosen], fresh[chosen])
            places = (zip(*(column.tolist() for column in pair), strict=True) for pair in (old, new))
            partition.blocks.equal.move(partition.number, name, dict(zip(*places, strict=True)))
        released.append(sources[chosen])
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))


def add_types(partition: Partition, block: NewBlock, alone: bool) -> Sequence[FieldSpec]:
    """Add the row shapes of a block to the types of its fields. alone: whether its put has no other block.

    Returns the schema, as the same object for equal blocks one after the other.
    """
    known = shape_of(block)
    if known == partition.learnt:
        return partition.learnt[-1]  # equal shapes change nothing; usual for a writer that puts in a loop
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
    partition.learnt = known if alone and not several else None
    return block.schema
