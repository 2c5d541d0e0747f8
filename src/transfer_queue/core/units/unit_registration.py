"""Compares a storage unit with the state when it registers: for the first time, again, or as a replacement.

A unit is identified by its arena's boot id and path; a mirror, which may be moved with its folder, by the boot id. It
reports its leased extents. The state knows which extents it needs, and which ones it has freed before the unit
confirmed it. This module reads the state without changing it, and returns records.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.records import LARGEST
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.core.units.store_servers import backend_of
from transfer_queue.messages.descriptors import MIRROR, UnitInfo
from transfer_queue.messages.reports.unit_reports import RegisterUnit


def register(state: State, request: RegisterUnit) -> tuple[list[r.AnyRecord], int]:
    """Return the records, and the number of the unit: that of its arena if it is known, otherwise a new one.

    Raises:
        ProtocolError: The address of its store cannot be read.
    """
    if request.store:
        backend_of(request.store)
    records: list[r.AnyRecord] = []
    number = next((known.unit for known in state.units.values() if _is_of(known, request)), -1)
    if number < 0:
        number = 1 + max([*state.units, *state.lost_units], default=-1)
        records += [r.UnitLost(known.unit, request.when) for known in _replaced_units(state, request)]
    its = request.boot_id, request.name, request.node, request.remote, request.tier, request.capacity, request.store
    records.append(r.UnitRegistered(number, request.address, request.arena, *its))
    if request.retired and number not in state.draining:
        records.append(r.UnitDraining(number, True))
    if request.extents is not None:
        newer = LARGEST if request.next_extent is None else request.next_extent
        records += _compare_extents(state, number, indexes_in(request.extents), newer, request.when)
    return records, number


def _is_of(known: UnitInfo, request: RegisterUnit) -> bool:
    """Whether a unit that registers has the arena of a known one."""
    if known.boot_id != request.boot_id:
        return False
    return known.arena == request.arena or (known.tier == request.tier == MIRROR and bool(known.boot_id))


def _replaced_units(state: State, request: RegisterUnit) -> list[UnitInfo]:
    """Return the units that this one replaces."""
    return [unit for unit in state.units.values() if unit.name and unit.name == request.name]


def _compare_extents(state: State, number: int, leased: np.ndarray, newer: int, when: str) -> list[r.AnyRecord]:
    """Return the records of needed extents that the unit has lost, and of freed ones that it has not confirmed.

    The report does not cover extents from number `newer` on, which were leased after it.
    """
    there = set(leased.tolist())
    table = state.blocks
    needed = [extent for (unit, extent), e in table.extents.items() if unit == number and e.blocks and extent < newer]
    lost = sorted(extent for extent in needed if extent not in there)
    freed = sorted(e for unit, e in table.freed if unit == number and e not in there and e < newer)
    records: list[r.AnyRecord] = []
    if lost:
        records.append(r.ExtentsLost(number, np.array(lost, "i8").tobytes(), when))
    if freed:
        records.append(r.ExtentsFreed(number, np.array(freed, "i8").tobytes()))
    return records
