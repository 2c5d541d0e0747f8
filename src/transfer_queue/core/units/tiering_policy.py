"""What of the units in memory is to be moved to those on disk.

A unit of which more than a fraction `high` is in extents that hold needed values gives up its oldest extents until the
fraction is `low`; where its writers wait for space it gives up some in any case. The age of an extent is that of the
oldest block in it: blocks are numbered as they are published. Only closed extents count, as others take more blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transfer_queue.core.state.state import State
from transfer_queue.core.tables.block_table import BlockTable
from transfer_queue.messages.descriptors import DISK, MEMORY

Place = tuple[int, int]  # unit, extent


@dataclass(frozen=True)
class Watermarks:
    """Fractions of a unit's bytes."""

    high: float = 0.8
    low: float = 0.6


DEFAULTS = Watermarks()


def bytes_to_offload(state: State, marks: Watermarks, short: Collection[int]) -> dict[int, float]:
    """Unit in memory -> bytes that are to be moved off it. short: units whose writers wait."""
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
    """The extents to be moved to disk. wanted: see `bytes_to_offload`. ages: the oldest block of each extent."""
    left = dict(wanted)
    chosen = set()
    for place in sorted(ages, key=lambda place: ages[place]):
        extent = blocks.extents.get(place)
        if extent is not None and extent.closed and left.get(place[0], 0.0) > 0:
            left[place[0]] -= extent.length
            chosen.add(place)
    return chosen
