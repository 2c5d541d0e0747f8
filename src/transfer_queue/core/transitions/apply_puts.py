"""How puts, losses and repacked blocks change the values of a partition. Called only by `transitions.apply`.

`apply_rows_put` is the short path of most rows: they are new and consecutive, so that there is nothing to look up, to
merge or to release. `partition.Partition.reserve` and `publish` are the general path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transfer_queue.core.blocks.block_table import Released
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
from transfer_queue.core.tables.field_groups import Parts
from transfer_queue.core.tables.field_types import FieldStats, dims_parts, shape_of
from transfer_queue.core.tables.lost_values import Found, LossEvent
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk
from transfer_queue.messages.descriptors import FieldSpec, NewBlock


def apply_rows_put(partition: Partition, put: RowsPut) -> None:
    """Apply a `records.RowsPut`."""
    count = put.count
    blocks = partition.blocks.complete_schemas(put.block, put.further)
    start = partition.rows.end
    runs = partition.rows.append(put.first_index, count, owner=partition.owner_number(put.client))
    partition.count_new_rows(put.client, count)
    if put.keys is not None:
        partition.keys.update(zip(put.keys, range(start, start + count), strict=True))
    values: list[tuple[int, NewBlock, Parts]] = []
    for number, block in enumerate(blocks, put.block_number):
        partition.blocks.add(number, put.client, block, count * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        values.append((number, block, _count_new(partition, add_types(partition, block, len(blocks) == 1), count)))
    done = 0
    for key, chunk, at, first, last in runs:
        before, done = done, done + last - first
        if put.keys is not None:
            chunk.key_list()[first:last] = put.keys[before:done]
        if put.tags is not None:
            partition.put_tags(key, chunk, slice(first, last), put.tags, slice(before, done))
        for number, block, parts in values:
            slots: Any = before  # the usual put of one row
            if done - before > 1:
                slots = slot_column(block, before, done)
            elif block.slots is not None:
                slots = slot_column(block, before, done)[0]
            _set_new_values(chunk, at, parts, number, slots)
        if partition.field_ranks.names:
            partition.field_ranks.add(chunk, at)
        if values or put.keys is not None or put.tags is not None:
            chunk.changed[at] = partition.version
            partition.changes.mark_chunk_changed(partition.version, key)
    partition.forget_gone_ranks()
    if put.groups is not None:
        partition.join(put.groups, range(start, start + count))
    if blocks and partition.ready:
        fields = _names_of(partition, blocks)
        for key, chunk, _, first, last in runs:
            partition.unseen.add_run(fields, key, chunk, first, last)
        partition.update_awaited_sets(fields)


def apply_rows_put_together(partition: Partition, put: RowsPutTogether) -> None:
    """Apply a `records.RowsPutTogether`."""
    clients, blocks = [each.client for each in put.puts], put.blocks
    counts = [block.rows for block in blocks]
    count, start, schema = sum(counts), partition.rows.end, put.block.schema
    partition.blocks.add_alike(put.block_number, clients, blocks, partition.number)
    for client, block in zip(clients, blocks, strict=True):
        partition.count_new_rows(client, block.rows)
        partition.nbytes += block.nbytes
        known = add_types(partition, block, True)
    parts = _count_new(partition, known, count)
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
            chunk, slice(first, last), parts, numbers[mine], slots if isinstance(slots, int) else slots[mine]
        )
        if partition.field_ranks.names:
            partition.field_ranks.add(chunk, at)
        chunk.changed[at] = partition.version
        partition.changes.mark_chunk_changed(partition.version, key)
    partition.forget_gone_ranks()
    if partition.ready:
        fields = partition.names_of(schema)
        for key, chunk, _, first, last in runs:
            partition.unseen.add_run(fields, key, chunk, first, last)
        partition.update_awaited_sets(fields)


def _count_new(partition: Partition, schema: Sequence[FieldSpec], count: int) -> Parts:
    """Count the values of new rows. Return the fields."""
    parts = singles, groups = partition.field_groups.parts_of(schema)
    for field in singles:
        field.own_live += count
        field.own_ever += count
    for group in groups:
        group.live += count
        group.ever += count
    return parts


def _set_new_values(chunk: Chunk, at: Any, parts: Parts, number: Any, slots: Any) -> None:
    """Set the values of new rows of a chunk: the numbers of their blocks, and their rows in the blocks."""
    singles, groups = parts
    for field in singles:
        column, slot = chunk.field.get(field.name) or chunk.field_columns(field.name)
        column[at] = number
        slot[at] = slots
    for group in groups:
        column, slot = chunk.group_columns(group.number)
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
    rows = list(partition.rows.split(positions))
    released: list[Released] = []
    for _, chunk, at, _ in rows:
        partition.field_ranks.remove(chunk, at)
    for number, block in enumerate(blocks, put.block_number):
        values = len(positions) if block.slots is None else _count_slots(block.slots)
        partition.blocks.add(number, put.writer, block, values * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        schema = add_types(partition, block, len(blocks) == 1)
        released += _set_values(partition, rows, len(positions), number, block, schema)
    for _, chunk, at, _ in rows:
        partition.field_ranks.add(chunk, at)
    partition.forget_gone_ranks()
    if released:
        partition.nbytes -= partition.blocks.release_values(released)
    if partition.ready:
        fields = _names_of(partition, blocks)
        for key, chunk, where, _ in rows:
            partition.unseen.add_rows(fields, key, chunk, where)
        partition.update_awaited_sets(fields)


def _set_values(
    partition: Partition,
    rows: Sequence[tuple[int, Chunk, Any, Any]],
    count: int,
    number: int,
    block: NewBlock,
    schema: Sequence[FieldSpec],
) -> list[Released]:
    """Set the values of the `count` rows of a put to a block. Return their former blocks.

    rows: The rows as `RowTable.split` returns them.
    """
    slots = slot_column(block, 0, count)
    released: list[Released] = []
    singles, groups = partition.field_groups.parts_of(schema)
    losses = partition.losses if partition.losses.counts else None
    for _, chunk, at, where in rows:
        within = slots[where]
        if block.slots is not None and (within < 0).any():  # `share_values` has set the others
            at, within = at[within >= 0], within[within >= 0]
        if losses is not None:
            names = partition.names_of(schema)
            for name in [name for name in losses.counts if name in names]:
                losses.forget(chunk, name, at)
        for field in singles:
            column, slot = chunk.field_columns(field.name)
            old = column[at]
            held = int(np.count_nonzero(old))
            if held:
                released.append((old, 1))
            field.own_live += len(at) - held
            field.own_ever += len(at) - held
            column[at] = number
            slot[at] = within
        for group in groups:
            column, slot = chunk.group_columns(group.number)
            old = column[at]
            held = int(np.count_nonzero(old))
            if held:
                released.append((old, group.width))
            group.live += len(at) - held
            group.ever += len(at) - held
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
    partition.field_groups.leave(field.name for field in shared.fields)
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
        stats.own_live += added
        stats.own_ever += added
        if losses.counts:
            losses.forget(chunk, field.name, at)
        column[at], slot[at] = blocks[where], slots[where]
        released.append(old)
    return released


def lose_values(partition: Partition, found: list[Found], number: int, loss: LossEvent) -> None:
    """Record that these values are lost by event `number`, so that their rows do not have them any more."""
    partition.losses.events[number] = loss
    released: list[Released] = []
    touched: dict[int, list[np.ndarray]] = {}
    for key, chunk, names, columns, at in found:
        released.append((columns[0][at], len(names)))
        partition.field_ranks.remove(chunk, at)
        columns[0][at] = 0
        partition.field_ranks.add(chunk, at)
        for name in names:
            partition.losses.mark(chunk, name, at, number)
        group = partition.fields[names[0]].group
        if group is None:
            partition.remove_values(names[0], len(at))
        else:
            partition.remove_group_values(group, len(at))
        touched.setdefault(key, []).append(at)
    partition.forget_gone_ranks()
    partition.nbytes -= partition.blocks.release_values(released)
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
    found: list[tuple[list[str], tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]] = []
    names = [{spec.name for spec in block.schema} for block in blocks]
    for some in _alike(partition, names):
        having = np.repeat([some[0] in each for each in names], counts)
        there = np.flatnonzero((positions >= 0) & having)
        for _, chunk, at, where in partition.rows.split(positions[there]):
            columns = chunk.columns_of(some[0])
            if columns is None:
                continue
            chosen = there[where]
            same = (columns[0][at] == sources[chosen]) & (columns[1][at] == slots[chosen])
            found.append((some, columns, np.asarray(at)[same], chosen[same]))
            values += len(some) * np.bincount(numbers[chosen[same]] - first, minlength=len(blocks))
    for number, block, needed in zip(range(first, first + len(blocks)), blocks, values.tolist(), strict=True):
        if needed:
            partition.blocks.add(number, writer, block, needed, partition.number)
            partition.nbytes += block.nbytes
    released: list[Released] = []
    for some, columns, at, chosen in found:
        columns[0][at], columns[1][at] = numbers[chosen], fresh[chosen]
        if partition.blocks.equal.of_block:
            old, new = (sources[chosen], slots[chosen]), (numbers[chosen], fresh[chosen])
            places = (zip(*(column.tolist() for column in pair), strict=True) for pair in (old, new))
            moved = dict(zip(*places, strict=True))
            for name in some:
                partition.blocks.equal.move(partition.number, name, moved)
        released.append((sources[chosen], len(some)))
    if released:
        partition.nbytes -= partition.blocks.release_values(released)


def _alike(partition: Partition, names: Sequence[set[str]]) -> Iterator[list[str]]:
    """Iterate over the fields that are in any of these sets, with those together that have the same columns and sets.

    Fields of a group are always in the same blocks.
    """
    alike: dict[object, list[str]] = {}
    for name in sorted(set().union(*names)):
        field = partition.fields.get(name)
        key = name if field is None or field.group is None else (field.group, *[name in some for some in names])
        alike.setdefault(key, []).append(name)
    for some in alike.values():
        group = partition.fields[some[0]].group if len(some) > 1 else None
        if group is not None:
            partition.field_groups.divide(group, [partition.fields[name] for name in some])
        elif len(some) == 1:
            partition.field_groups.leave(some)
        yield some


def add_types(partition: Partition, block: NewBlock, alone: bool) -> Sequence[FieldSpec]:
    """Add the row shapes of a block to the types of its fields. alone: whether its put has no other block.

    Returns the schema, as the same object for equal blocks one after the other.
    """
    known = shape_of(block)
    if known == partition.learnt:
        return partition.learnt[-1]  # equal shapes change nothing; usual for a writer that puts in a loop
    prepared = partition.blocks.prepared
    types = None if prepared is None or not prepared.has(block) else prepared.types
    current = types is not None and types.is_current(partition.fields, partition.typed)
    if prepared is not None and types is not None and current and not types.installed:
        partition.install_types(types, [each.schema for each in prepared.blocks])
    if types is not None and types.installed:
        partition.learnt = known if alone and not types.several else None
        return block.schema
    dims = np.frombuffer(block.dims, "<i8")
    news = several = False
    for spec, part in zip(block.schema, dims_parts(block.schema, dims, block.rows)):
        field = partition.fields.get(spec.name)
        if field is None:
            field = partition.fields[spec.name] = FieldStats(spec.name)
        elif field.group is not None and not field.group.live:
            partition.field_groups.leave([spec.name])
        news |= field.add(spec, part)
        several |= bool(field.others)
        if field.further:
            partition.field_ranks.names.add(spec.name)
    partition.field_groups.changes += news
    # every put into a field of several dtypes is checked, so that each client can warn once
    partition.learnt = known if alone and not several else None
    return block.schema
