"""Chooses the extents that are moved from units in memory to units on disk.

If more than a fraction `high` of a unit is leased to extents with needed values, its oldest extents are moved until the
fraction is `low`. If its writers wait for space, some are moved in any case. The age of an extent is that of its oldest
block, since blocks are numbered in the order in which they are published. Only closed extents are moved, because open
extents may receive more blocks.
"""

from __future__ import annotations

from collections.abc import Collection

from transfer_queue.core.blocks.block_table import BlockTable
from transfer_queue.core.configuration import Watermarks
from transfer_queue.core.state.state import State
from transfer_queue.messages.descriptors import DISK, MEMORY

Place = tuple[int, int]  # unit, extent


def bytes_to_offload(state: State, marks: Watermarks, short: Collection[int]) -> dict[int, float]:
    """Return unit in memory -> bytes to be moved off it. short: units whose writers wait for space."""
    if not state.units_of(DISK) - state.draining:
        return {}
    found = {}
    for number in sorted(state.units_of(MEMORY) - state.draining):
        leased, capacity = state.blocks.leased_in.get(number, 0), state.units[number].capacity
        over = leased - marks.low * capacity
        if number in short and leased:
            found[number] = max(over, (marks.high - marks.low) * capacity, 1.0)
        elif capacity and leased > marks.high * capacity:
            found[number] = over
    return found


def oldest_extents(blocks: BlockTable, wanted: dict[int, float], ages: dict[Place, int]) -> set[Place]:
    """Return the extents to be moved to disk. wanted: see `bytes_to_offload`. ages: the oldest block of each extent."""
    left = dict(wanted)
    chosen = set()
    for place in sorted(ages, key=lambda place: ages[place]):
        extent = blocks.extents.get(place)
        if extent is not None and extent.closed and left.get(place[0], 0.0) > 0:
            left[place[0]] -= extent.length
            chosen.add(place)
    return chosen
