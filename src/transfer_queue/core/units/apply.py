"""Applies the records of storage units: registrations, extents, losses and moves of blocks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.changes import LossEvent, ValuesOfChunk, values_in_blocks
from transfer_queue.core.tables.rows import CHUNK_BITS, ValueColumns
from transfer_queue.messages.descriptors import MOVER, BlockLocation, UnitInfo

MAX_FENCED = 4096  # writers proven dead that are remembered; connections of earlier ones ended long ago


@applies(r.ExtentsClosed)
def _apply_extents_closed(state: State, record: r.ExtentsClosed) -> None:
    state.blocks.shorten(record.extents, record.lengths)
    state.blocks.close([(unit, extent) for unit, extent in record.extents])


@applies(r.UnitRegistered)
def _apply_unit_registered(state: State, record: r.UnitRegistered) -> None:
    state.add_unit(UnitInfo(*msgspec.structs.astuple(record)))  # with the same columns


@applies(r.UnitLost)
def _apply_unit_lost(state: State, record: r.UnitLost) -> None:
    state.units.pop(record.unit)
    for units in (state.disks, state.stores, state.mirrors, state.draining):
        units.discard(record.unit)
    state.lost_units[record.unit] = record.when
    _lose(state, lambda units, extents: units == record.unit, record.unit, record.when)
    places = [*state.blocks.extents, *state.blocks.freed]
    state.blocks.forget([place for place in places if place[0] == record.unit])


@applies(r.ExtentsLost)
def _apply_extents_lost(state: State, record: r.ExtentsLost) -> None:
    lost = np.frombuffer(record.extents, "<i8")
    _lose(state, lambda units, extents: (units == record.unit) & np.isin(extents, lost), record.unit, record.when)
    state.blocks.forget([(record.unit, extent) for extent in lost.tolist()])


@applies(r.ExtentsFreed)
def _apply_extents_freed(state: State, record: r.ExtentsFreed) -> None:
    state.blocks.forget([(record.unit, extent) for extent in np.frombuffer(record.extents, "<i8").tolist()])


@applies(r.BlocksMoved)
def _apply_moved(state: State, record: r.BlocksMoved) -> None:
    place = BlockLocation(record.unit, record.extent, 0, record.generation, record.length)
    closed = [(record.unit, record.extent)]
    numbers, offsets = np.frombuffer(record.blocks, "<i8"), np.frombuffer(record.offsets, "<i8")
    state.blocks.relocate(numbers, place, offsets, record.left, MOVER, state.mirrors)
    for repacked in record.repacked:
        state.next_block = max(state.next_block, repacked.first_block + len(repacked.blocks))
        closed += [(copy.unit, copy.extent) for block in repacked.blocks for copy in block.copies]
        partition = state.partitions.get(repacked.partition)
        if partition is not None:
            _apply_repacked(partition, repacked, MOVER)
    state.blocks.close(list(dict.fromkeys(closed)))


@applies(r.UnitDraining)
def _apply_unit_draining(state: State, record: r.UnitDraining) -> None:
    (state.draining.add if record.draining else state.draining.discard)(record.unit)


@applies(r.WriterFenced)
def _apply_writer_fenced(state: State, record: r.WriterFenced) -> None:
    state.fenced[record.writer] = None
    while len(state.fenced) > MAX_FENCED:
        del state.fenced[next(iter(state.fenced))]
    state.blocks.close([(record.unit, extent) for extent in record.extents])


def _lose(state: State, is_lost: Callable[[np.ndarray, np.ndarray], np.ndarray], unit: int, when: str) -> None:
    """Record that values are lost whose blocks have no location left."""
    blocks = state.blocks.remove_lost_locations(is_lost)
    if not len(blocks):
        return
    state.losses += 1
    for name, partition in state.partitions.items():
        values = list(values_in_blocks(partition.rows, blocks))
        if values:
            _lose_values(state.new_version(name), values, state.losses, LossEvent(unit, when, partition.version))


def _lose_values(partition: Partition, values: list[ValuesOfChunk], number: int, loss: LossEvent) -> None:
    """Record that these values are lost by event `number`, so that their rows do not have them any more."""
    partition.losses.events[number] = loss
    released: list[np.ndarray] = []
    touched: dict[int, list[np.ndarray]] = {}
    for key, chunk, name, columns, at in values:
        released.append(columns[0][at])
        partition.field_ranks.remove(chunk, at)
        columns[0][at] = 0
        partition.field_ranks.add(chunk, at)
        partition.losses.mark(chunk, name, at, number)
        partition.remove_values(name, len(at))
        touched.setdefault(key, []).append(at)
    partition.forget_empty_ranks()
    partition.nbytes -= partition.blocks.release(np.concatenate(released))
    for key, parts in touched.items():
        at = np.unique(np.concatenate(parts))
        partition.changes.mark_changed(partition.version, at + (key << CHUNK_BITS))
        for ready in partition.ready.values():
            ready.update(key, partition.rows.chunks[key], at, partition.groups)


def _apply_repacked(partition: Partition, repacked: r.RowsRepacked, writer: str) -> None:
    """Apply a `records.RowsRepacked`."""
    blocks, first = repacked.blocks, repacked.first_block
    rows, sources, slots = (
        np.frombuffer(column, kind)
        for column, kind in ((repacked.rows, "<i8"), (repacked.sources, "<i8"), (repacked.slots, "<i4"))
    )
    taken = [
        np.arange(block.rows, dtype="i4") if block.slots is None else np.frombuffer(block.slots, "<i4")
        for block in blocks
    ]
    counts, fresh = [len(each) for each in taken], np.concatenate(taken)
    numbers = np.repeat(np.arange(first, first + len(blocks)), counts)
    positions = partition.rows.positions_of(rows)
    values = np.zeros(len(blocks), "i8")
    moved: list[tuple[str, ValueColumns, np.ndarray, np.ndarray]] = []
    names = [{spec.name for spec in block.schema} for block in blocks]
    for name in sorted(set().union(*names)):
        having = np.repeat([name in each for each in names], counts)
        current = np.flatnonzero((positions >= 0) & having)
        for _, chunk, at, where in partition.rows.split(positions[current]):
            columns = chunk.field.get(name)
            if columns is None:
                continue
            chosen = current[where]
            same = (columns[0][at] == sources[chosen]) & (columns[1][at] == slots[chosen])
            moved.append((name, columns, np.asarray(at)[same], chosen[same]))
            values += np.bincount(numbers[chosen[same]] - first, minlength=len(blocks))
    for number, block, needed in zip(range(first, first + len(blocks)), blocks, values.tolist(), strict=True):
        if needed:
            partition.blocks.add(number, writer, block, needed, partition.number)
            partition.nbytes += block.nbytes
    released: list[np.ndarray] = []
    for name, columns, at, chosen in moved:
        columns[0][at], columns[1][at] = numbers[chosen], fresh[chosen]
        if partition.blocks.equal.of_block:
            old, new = (sources[chosen], slots[chosen]), (numbers[chosen], fresh[chosen])
            places = (zip(*(column.tolist() for column in pair), strict=True) for pair in (old, new))
            partition.blocks.equal.move(partition.number, name, dict(zip(*places, strict=True)))
        released.append(sources[chosen])
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))
