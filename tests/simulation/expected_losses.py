"""Checks which values the loss of storage units removes, by a count of all values before and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import numpy as np

from transfer_queue.core.state.state import State

Value = tuple[str, int, str]  # partition, global index, field


def values(state: State) -> dict[Value, frozenset[int]]:
    """Return the units in which each value of every sample is stored."""
    found: dict[Value, frozenset[int]] = {}
    for name, partition in state.partitions.items():
        positions = partition.rows.live_positions()
        indexes = partition.rows.indexes_of(positions).tolist()
        for field in sorted(partition.fields):
            numbers = partition.blocks_of(field, positions)[0]
            for at in np.flatnonzero(numbers).tolist():
                places = state.blocks.places(int(numbers[at]))
                found[name, indexes[at], field] = frozenset(place.unit for place in places)
    return found


def lost(state: State) -> Counter[tuple[str, str]]:
    """Return how many values are reported as lost, for each (partition, field)."""
    return Counter({(p.name, field): n for p in state.partitions.values() for field, n in p.losses.counts.items()})


def check(before: dict[Value, frozenset[int]], told: Counter[tuple[str, str]], state: State, gone: Set[int]) -> int:
    """Check that exactly the values of these lost units are missing, and all others are where they were.

    Args:
        before: The values before the loss.
        told: The result of `lost` before the loss.
        state: The state after the loss.
        gone: The units that were lost.

    Returns:
        The number of values that were lost.

    Raises:
        AssertionError: Another value is missing, or a loss was not reported.
    """
    left = {value: units - gone for value, units in before.items() if units - gone}
    assert values(state) == left, f"the loss of units {sorted(gone)} took other values than those stored only there"
    taken = Counter((name, field) for name, _, field in before.keys() - left.keys())
    assert lost(state) == told + taken, "values that were lost are not reported as lost"
    return sum(taken.values())
