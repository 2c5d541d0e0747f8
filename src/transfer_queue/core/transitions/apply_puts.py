"""How puts, losses and repacked blocks change the values of a partition. Called only by `transitions.apply`.

`apply_rows_put` is the short path of most rows: they are new and consecutive, so that there is nothing to look up, to
merge or to release. `partition.Partition.reserve` and `publish` are the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.core.columns.wide_columns import MANY_FIELDS, WideColumns
from transfer_queue.core.events.records import (
    Published,
    RowsPut,
    RowsPutTogether,
    RowsRepacked,
    SharedField,
    ValuesShared,
)
from transfer_queue.core.ready.deferred_updates import Fields
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.field_types import FieldStats, dims_parts, shape_of
from transfer_queue.core.tables.lost_values import Found, LossEvent
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk
from transfer_queue.messages.descriptors import NewBlock


def apply_rows_put(partition: Partition, put: RowsPut) -> None:
    """Apply a `records.RowsPut`."""
    count = put.count
    blocks = partition.blocks.complete_schemas(put.block, put.further)
    start = partition.rows.end
    runs = partition.rows.append(put.first_index, count, owner=partition.owner_number(put.client))
    partition.count_new_rows(put.client, count)
    if put.keys is not None:
        partition.keys.update(zip(put.keys, range(start, start + count), strict=True))
    for number, block in enumerate(blocks, put.block_number):
        partition.blocks.add(number, put.client, block, count * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        add_types(partition, block, len(blocks) == 1)
        for field in partition.fields_of(block.schema):
            field.live += count
            field.ever += count
    prepared = partition.blocks.prepared
    told = bool(blocks) or put.keys is not None or put.tags is not None
    done = 0
    for key, chunk, at, first, last in runs:
        before, done = done, done + last - first
        if put.keys is not None:
            chunk.key_list()[first:last] = put.keys[before:done]
        if put.tags is not None:
            partition.put_tags(key, slice(first, last), put.tags, slice(before, done))
        if prepared is not None and prepared.columns is not None:
            prepared.columns.install(chunk, chunk.capacity)
        for number, block in enumerate(blocks, put.block_number):
            _set_new_values(partition, chunk, at, number, block, before, done)
        if told:
            chunk.changed[at] = partition.version
            partition.changes.mark_chunk_changed(partition.version, key)
    if put.groups is not None:
        partition.join(put.groups, range(start, start + count))
    if blocks and partition.ready:
        fields = _names_of(partition, blocks)
        for key, chunk, _, first, last in runs:
            partition.unseen.add_run(fields, key, chunk, first, last)
        partition.update_awaited_sets(fields)


def apply_rows_put_together(partition: Partition, put: RowsPutTogether) -> None:
    """Apply a `records.RowsPutTogether`."""
    counts = [each.block.rows for each in put.puts]
    count, start, schema = sum(counts), partition.rows.end, put.block.schema
    for number, each in enumerate(put.puts, put.block_number):
        block = each.block
        partition.count_new_rows(each.client, block.rows)
        partition.blocks.add(number, each.client, block, block.rows * len(schema), partition.number)
        partition.nbytes += block.nbytes
        add_types(partition, block, True)
    for field in partition.fields_of(schema):
        field.live += count
        field.ever += count
    if put.keys is not None:
        partition.keys.update(zip(put.keys, range(start, start + count), strict=True))
    numbers = np.repeat(np.arange(put.block_number, put.block_number + len(counts)), counts)
    slots = np.concatenate([np.arange(rows, dtype="i4") for rows in counts]) if count > len(counts) else 0
    owners = np.repeat([partition.owner_number(each.client) for each in put.puts], counts)
    runs = partition.rows.append(put.first_index, count)
    done = 0
    for key, chunk, at, first, last in runs:
        before, done = done, done + last - first
        mine = slice(before, done)
        chunk.owner[first:last] = owners[mine]
        if put.keys is not None:
            chunk.key_list()[first:last] = put.keys[mine]
        if put.tags is not None:
            partition.put_tags(key, slice(first, last), put.tags, mine)
        for spec in schema:
            column, slot = chunk.field_columns(spec.name)
            column[first:last] = numbers[mine]
            slot[first:last] = slots if isinstance(slots, int) else slots[mine]
        chunk.changed[at] = partition.version
        partition.changes.mark_chunk_changed(partition.version, key)
    if partition.ready:
        fields = partition.names_of(schema)
        for key, chunk, _, first, last in runs:
            partition.unseen.add_run(fields, key, chunk, first, last)
        partition.update_awaited_sets(fields)


def _set_new_values(
    partition: Partition, chunk: Chunk, at: Any, number: int, block: NewBlock, first: int, last: int
) -> None:
    """Set the values of new rows of a chunk, which are the targets of the put from `first` to before `last`."""
    slots: Any = first  # the usual put of one row
    if last - first > 1:
        slots = slot_column(block, first, last)
    elif block.slots is not None:
        slots = slot_column(block, first, last)[0]
    wide = wide_columns_of(partition, chunk, block) if len(block.schema) >= MANY_FIELDS else None
    if wide is not None:
        wide.put(at, number, slots)
        return
    for spec in block.schema:
        column, slot = chunk.field.get(spec.name) or chunk.field_columns(spec.name)
        column[at] = number
        slot[at] = slots


def slot_column(block: NewBlock, first: int, last: int) -> np.ndarray:
    """Return the row of a block that has the value of each target from `first` to before `last`, i4."""
    if block.slots is None:
        return np.arange(first, last, dtype="i4")
    return np.frombuffer(block.slots, "<i4")[first:last]


def _names_of(partition: Partition, blocks: Sequence[NewBlock]) -> Fields:
    """Return the names of the fields of blocks with their whole schemas."""
    prepared = partition.blocks.prepared
    if prepared is not None and prepared.names is not None and prepared.has(blocks[0]):
        return prepared.names
    first = partition.names_of(blocks[0].schema)
    return first if len(blocks) == 1 else first.union(spec.name for block in blocks[1:] for spec in block.schema)


def publish(partition: Partition, positions: np.ndarray, put: Published) -> None:
    """Record that the values of these rows are in the blocks of a put, which has at least one."""
    blocks = partition.blocks.complete_schemas(put.block, put.further)
    parts = list(partition.rows.split(positions))
    released: list[np.ndarray] = []
    prepared = partition.blocks.prepared
    if prepared is not None and prepared.columns is not None:
        for _, chunk, _, _ in parts:
            prepared.columns.install(chunk, chunk.capacity)
    for number, block in enumerate(blocks, put.block_number):
        values = len(positions) if block.slots is None else _count_slots(block.slots)
        partition.blocks.add(number, put.writer, block, values * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        add_types(partition, block, len(blocks) == 1)
        released += _set_values(partition, parts, len(positions), number, block)
    if released:
        partition.nbytes -= partition.blocks.release(released[0] if len(released) == 1 else np.concatenate(released))
    if partition.ready:
        fields = _names_of(partition, blocks)
        for key, chunk, where, _ in parts:
            partition.unseen.add_rows(fields, key, chunk, where)
        partition.update_awaited_sets(fields)


def _set_values(
    partition: Partition, parts: Sequence[tuple[int, Chunk, Any, Any]], count: int, number: int, block: NewBlock
) -> list[np.ndarray]:
    """Set the values of the `count` rows of a put to a block. Return their former blocks.

    parts: The rows as `RowTable.split` returns them.
    """
    schema = block.schema
    slots = slot_column(block, 0, count)
    released: list[np.ndarray] = []
    losses = partition.losses if partition.losses.counts else None
    for _, chunk, at, where in parts:
        within = slots[where]
        if block.slots is not None and (within < 0).any():  # `share_values` has set the others
            at, within = at[within >= 0], within[within >= 0]
        wide = wide_columns_of(partition, chunk, block) if len(schema) >= MANY_FIELDS else None
        if wide is not None and losses is None:
            released += set_wide_values(partition.fields_of(schema), wide, at, number, within)
            continue
        for spec in schema:
            field = partition.fields[spec.name]
            column, slot = chunk.field_columns(spec.name)
            old = column[at]
            held = int(np.count_nonzero(old))
            if held:
                released.append(old)
            if losses is not None:
                losses.forget(chunk, spec.name, at)
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
    released = [old for field in shared.fields for old in _set_shared(partition, positions, field)]
    partition.nbytes -= partition.blocks.release(np.concatenate(released))
    if partition.ready:
        names = frozenset(field.name for field in shared.fields)
        for key, chunk, at, _ in partition.rows.split(positions):
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


def wide_columns_of(partition: Partition, chunk: Chunk, block: NewBlock) -> WideColumns | None:
    """Return the columns of the many fields of a block if they were made together, otherwise None.

    Makes the columns that the chunk does not have.
    """
    found = chunk.wide_columns(block.schema)
    if found is not None:
        return found
    names = [spec.name for spec in block.schema if spec.name not in chunk.field]
    if names:
        made = WideColumns(names, chunk.capacity)
        chunk.wide.append(made)
        chunk.field.update(made.columns())
    return chunk.wide_columns(block.schema) if len(names) == len(block.schema) else None


def set_wide_values(
    fields: Sequence[FieldStats], columns: WideColumns, at: np.ndarray, number: int, within: np.ndarray
) -> list[np.ndarray]:
    """Set the values of rows of one chunk to block `number`, for fields made together. Return their former blocks."""
    old = columns.blocks[:, at]
    columns.put(at, number, within)
    if not old.any():
        for field in fields:
            field.live += len(at)
            field.ever += len(at)
        return []
    held = np.count_nonzero(old, axis=1)
    if not (held == len(at)).all():
        for field, count in zip(fields, (len(at) - held).tolist()):
            field.live += count
            field.ever += count
    return [old.ravel()]


def lose_values(partition: Partition, found: list[Found], number: int, loss: LossEvent) -> None:
    """Record that these values are lost by event `number`, so that their rows do not have them any more."""
    partition.losses.events[number] = loss
    released = []
    touched: dict[int, list[np.ndarray]] = {}
    for key, chunk, name, at in found:
        column = chunk.field[name][0]
        released.append(column[at])
        column[at] = 0
        partition.losses.mark(chunk, name, at, number)
        partition.remove_values(name, len(at))
        touched.setdefault(key, []).append(at)
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
    found: list[tuple[str, tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]] = []
    names = [{spec.name for spec in block.schema} for block in blocks]
    for name in sorted(set().union(*names)):
        having = np.repeat([name in some for some in names], counts)
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
    for name, columns, at, chosen in found:
        columns[0][at], columns[1][at] = numbers[chosen], fresh[chosen]
        if partition.blocks.equal.of_block:
            old, new = (sources[chosen], slots[chosen]), (numbers[chosen], fresh[chosen])
            places = (zip(*(column.tolist() for column in pair), strict=True) for pair in (old, new))
            partition.blocks.equal.move(partition.number, name, dict(zip(*places, strict=True)))
        partition.nbytes -= partition.blocks.release(sources[chosen])


def add_types(partition: Partition, block: NewBlock, alone: bool) -> None:
    """Add the row shapes of a block to the types of its fields. alone: whether its put has no other block."""
    known = shape_of(block)
    if known == partition.learnt:
        return  # equal shapes change nothing; usual for a writer that puts in a loop
    prepared = partition.blocks.prepared
    types = None if prepared is None or not prepared.has(block) else prepared.types
    if types is not None and not types.installed and types.is_current(partition.fields, partition.typed):
        partition.replace_types(types.install())
    if prepared is not None and types is not None and types.installed:
        partition.list_fields(block.schema, prepared.fields_of(block))
        partition.learnt = known if alone and not types.several else None
        return
    dims = np.frombuffer(block.dims, "<i8")
    news = several = False
    for spec, part in zip(block.schema, dims_parts(block.schema, dims, block.rows)):
        field = partition.fields.get(spec.name)
        if field is None:
            field = partition.fields[spec.name] = FieldStats(spec.name)
        news |= field.add(spec, part)
        several |= bool(field.others)
    partition.typed += news
    # every put into a field of several dtypes is checked, so that each client can warn once
    partition.learnt = known if alone and not several else None
