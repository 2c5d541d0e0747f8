"""Applies the records of storage units: registrations, extents, losses and migrations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.lost_values import LossEvent, values_in_blocks
from transfer_queue.core.transitions import apply_puts
from transfer_queue.messages.descriptors import MOVER, BlockLocation, UnitInfo

MAX_FENCED = 4096  # writers proven dead that are remembered; connections of earlier ones ended long ago


@applies(r.ExtentsClosed)
def _apply_extents_closed(state: State, record: r.ExtentsClosed) -> None:
    state.blocks.shorten(record.extents, record.lengths)
    state.blocks.close([(unit, extent) for unit, extent in record.extents])


@applies(r.UnitRegistered)
def _apply_unit_registered(state: State, record: r.UnitRegistered) -> None:
    info = UnitInfo(
        record.unit,
        record.address,
        record.arena,
        record.boot_id,
        record.name,
        record.node,
        record.remote,
        record.tier,
        record.capacity,
        record.store,
    )
    state.add_unit(info)


@applies(r.UnitLost)
def _apply_unit_lost(state: State, record: r.UnitLost) -> None:
    state.units.pop(record.unit)
    state.disks.discard(record.unit)
    state.stores.discard(record.unit)
    state.mirrors.discard(record.unit)
    state.draining.discard(record.unit)
    state.lost_units[record.unit] = record.when
    _lose(state, lambda units, extents: units == record.unit, record.unit, record.when)
    places = [*state.blocks.extents, *state.blocks.freed]
    state.blocks.forget([place for place in places if place[0] == record.unit])


@applies(r.ExtentsLost)
def _apply_extents_lost(state: State, record: r.ExtentsLost) -> None:
    gone = np.frombuffer(record.extents, "<i8")
    _lose(state, lambda units, extents: (units == record.unit) & np.isin(extents, gone), record.unit, record.when)
    state.blocks.forget([(record.unit, extent) for extent in gone.tolist()])


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
            apply_puts.apply_repacked(partition, repacked, MOVER)
    state.blocks.close(list(dict.fromkeys(closed)))


@applies(r.UnitDraining)
def _apply_unit_draining(state: State, record: r.UnitDraining) -> None:
    if record.draining:
        state.draining.add(record.unit)
    else:
        state.draining.discard(record.unit)


@applies(r.WriterFenced)
def _apply_writer_fenced(state: State, record: r.WriterFenced) -> None:
    state.fenced[record.writer] = None
    while len(state.fenced) > MAX_FENCED:
        del state.fenced[next(iter(state.fenced))]
    state.blocks.close([(record.unit, extent) for extent in record.extents])


def _lose(state: State, gone: Callable[[np.ndarray, np.ndarray], np.ndarray], unit: int, when: str) -> None:
    """Record that values are lost whose blocks have no location left."""
    blocks = state.blocks.remove_lost_locations(gone)
    if not len(blocks):
        return
    state.losses += 1
    for name, partition in state.partitions.items():
        found = list(values_in_blocks(partition.rows, blocks))
        if found:
            apply_puts.lose_values(
                state.new_version(name), found, state.losses, LossEvent(unit, when, partition.version)
            )
