"""Values of fields arrive, are lost, and move into other blocks. Called by `State.apply` alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np

from transfer_queue.core.fields import Field, Prepared, dims_parts, shape_of
from transfer_queue.core.losses import Found, Loss
from transfer_queue.core.partition import Partition
from transfer_queue.core.records import Repacked
from transfer_queue.core.rows import CHUNK_BITS, Chunk
from transfer_queue.core.wide_columns import MANY_FIELDS, WideColumns
from transfer_queue.messages import FieldSpec, NewBlock

NONE: Set[str] = frozenset()


def publish(partition: Partition, positions: np.ndarray, number: int, block: NewBlock, writer: str) -> None:
    """Values of these rows are in block `number`, row by row."""
    partition.blocks.add(number, writer, block, len(positions) * len(block.schema), partition.number)
    partition.nbytes += block.nbytes
    slots = np.arange(len(positions), dtype="i4")
    released = []
    parts = [(key, chunk, at, slots[where]) for key, chunk, at, where in partition.rows.split(positions)]
    losses = partition.losses if partition.losses.counts else None
    ready = learn(partition, block)
    counted = NONE if ready is None else ready.names
    fresh = [first_values(chunk, at, block, number, within, ready) for _, chunk, at, within in parts]
    left = left_of(block, ready, fresh)
    settled = NONE if ready is None or left is block.schema else ready.names  # `left` has none of them
    if losses is None and all(added is NONE or added is settled for added in fresh):
        wide = made_together(left, [chunk for _, chunk, _, _ in parts])
        if wide:
            fields_of_left = partition.fields_of(left)
            for columns, (_, _, at, within) in zip(wide, parts):
                released += put_together(fields_of_left, columns, at, number, within)
            left = []
    for spec in left:
        field = partition.fields[spec.name]
        for (_, chunk, at, within), added in zip(parts, fresh):
            if spec.name not in counted:
                field.live += len(at)
                field.ever += len(at)
            if spec.name in added:
                continue
            column, slot = chunk.field_columns(spec.name)
            old = column[at]
            held = int(np.count_nonzero(old))
            if held:
                released.append(old)
            if losses is not None:
                losses.forget(chunk, spec.name, at)
            field.live -= held
            field.ever -= held
            column[at] = number
            slot[at] = within
    if released:
        partition.nbytes -= partition.blocks.release(released[0] if len(released) == 1 else np.concatenate(released))
    if partition.ready:
        fields = frozenset(spec.name for spec in block.schema)
        for key, chunk, at, _ in parts:
            partition.unseen.rows(fields, key, chunk, at)
        partition.published(fields)


def first_values(
    chunk: Chunk, at: np.ndarray | slice, block: NewBlock, number: int, within: Any, ready: Prepared | None
) -> Set[str]:
    """Set the fields of a block that no row of the chunk has had yet, all at once. Returns their names.

    Does so only for many fields: columns that were made together are kept until all of these fields are dropped.
    """
    if len(block.schema) < MANY_FIELDS:
        return NONE
    if chunk.wide_columns(block.schema) is not None:
        return NONE
    looked_at, added = block.schema, NONE
    made = None if ready is None else ready.take_columns(chunk.capacity)
    if made is not None:
        assert ready is not None
        wide, columns = made
        wide.put(at, number, within)
        chunk.wide.append(wide)
        if chunk.field:
            chunk.field.update(columns)
        else:
            chunk.field = columns
        looked_at, added = ready.known, ready.names
    names = [spec.name for spec in looked_at if spec.name not in chunk.field]
    if not names:
        return added
    wide = WideColumns(names, chunk.capacity)
    wide.put(at, number, within)
    chunk.wide.append(wide)
    chunk.field.update(wide.columns())
    return {*added, *names}


def left_of(block: NewBlock, ready: Prepared | None, fresh: Sequence[Set[str]]) -> list[FieldSpec]:
    """Return the fields of a block that are not counted yet, or not set in all of its chunks (`first_values`)."""
    if ready is not None and all(added is ready.names or ready.names <= added for added in fresh):
        return ready.known
    return block.schema


def made_together(specs: Sequence[FieldSpec], chunks: Sequence[Chunk]) -> list[WideColumns]:
    """Return the columns of these fields in each chunk; empty unless they were made together in all chunks."""
    if len(specs) < MANY_FIELDS:
        return []
    found = [chunk.wide_columns(specs) for chunk in chunks]
    return [wide for wide in found if wide is not None] if None not in found else []


def put_together(
    fields: Sequence[Field], columns: WideColumns, at: np.ndarray, number: int, within: np.ndarray
) -> list[np.ndarray]:
    """Set the values of rows of one chunk to block `number`, for fields made together. Returns their former blocks."""
    old = columns.blocks[:, at]
    held = np.count_nonzero(old, axis=1)
    columns.put(at, number, within)
    gained = len(at) - held
    if gained.any():
        for field, count in zip(fields, gained.tolist()):
            field.live += count
            field.ever += count
    return [old.ravel()] if held.any() else []


def lose(partition: Partition, found: list[Found], number: int, loss: Loss) -> None:
    """These values are lost, by event `number`: their rows do not have them any more."""
    partition.losses.events[number] = loss
    released = []
    touched: dict[int, list[np.ndarray]] = {}
    for key, chunk, name, at in found:
        column = chunk.field[name][0]
        released.append(column[at])
        column[at] = 0
        partition.losses.mark(chunk, name, at, number)
        partition.fewer(name, len(at))
        touched.setdefault(key, []).append(at)
    partition.nbytes -= partition.blocks.release(np.concatenate(released))
    for key, parts in touched.items():
        at = np.unique(np.concatenate(parts))
        partition.changes.mark(partition.version, at + (key << CHUNK_BITS))
        for ready in partition.ready.values():
            ready.update(key, partition.rows.chunks[key], at, partition.groups)


def repack(partition: Partition, repacked: Repacked, writer: str) -> None:
    """See `records.Repacked`."""
    blocks, first = repacked.blocks, repacked.first_block
    rows, sources, slots = (
        np.frombuffer(column, kind)
        for column, kind in ((repacked.rows, "<i8"), (repacked.sources, "<i8"), (repacked.slots, "<i4"))
    )
    counts = [block.rows for block in blocks]
    numbers = np.repeat(np.arange(first, first + len(blocks)), counts)
    fresh = np.concatenate([np.arange(count, dtype="i4") for count in counts])
    positions = partition.rows.positions_of(rows)
    values = np.zeros(len(blocks), "i8")
    found: list[tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]] = []
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
            found.append((columns, np.asarray(at)[same], chosen[same]))
            values += np.bincount(numbers[chosen[same]] - first, minlength=len(blocks))
    for number, block, needed in zip(range(first, first + len(blocks)), blocks, values.tolist(), strict=True):
        if needed:
            partition.blocks.add(number, writer, block, needed, partition.number)
            partition.nbytes += block.nbytes
    for columns, at, chosen in found:
        columns[0][at], columns[1][at] = numbers[chosen], fresh[chosen]
        partition.nbytes -= partition.blocks.release(sources[chosen])


def learn(partition: Partition, block: NewBlock) -> Prepared | None:
    """Add the row shapes of a block to the types of its fields.

    Returns the prepared parts of the block if they could be used, which also count the rows of its fresh fields.
    """
    known = shape_of(block)
    if known == partition.learnt:
        return None  # the same shapes as before, for example in the loop of one writer, change nothing
    prepared = partition.blocks.prepared
    if prepared is not None and prepared.holds_for(block, partition.fields):
        partition.fields.update(prepared.fresh)
        parts: Iterable[tuple[FieldSpec, np.ndarray]] = prepared.others
    else:
        dims = np.frombuffer(block.dims, "<i8")
        parts = zip(block.schema, dims_parts(block.schema, dims, block.rows))
        prepared = None
    for spec, part in parts:
        field = partition.fields.get(spec.name)
        if field is None:
            field = partition.fields[spec.name] = Field(spec.name)
        field.add(spec, part)
    # every put into a field of several dtypes is checked, so that each client can warn once
    looked_at = block.schema if prepared is None else prepared.known  # a fresh field has one dtype
    partition.learnt = None if any(partition.fields[spec.name].others for spec in looked_at) else known
    return prepared
