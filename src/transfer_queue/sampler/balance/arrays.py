"""The arrays that all modules here work on, and the way back to lists of positions.

A division is `part_of`: the number of the part of each item. Methods that need the items by falling size name an
item by its rank in that order.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def largest_first(values: Floats) -> Ints:
    """Positions by falling value; ties go to the lower position."""
    return np.argsort(-values, kind="stable")


def by_position(part_of_rank: Ints, order: Ints) -> Ints:
    """The part of each position, given the part of each rank."""
    part_of = np.empty_like(part_of_rank)
    part_of[order] = part_of_rank
    return part_of


def members(part_of: Ints, k: int) -> list[Ints]:
    """The items of each part, ascending."""
    by_part = np.argsort(part_of, kind="stable")
    cuts = np.cumsum(np.bincount(part_of, minlength=k))[:-1]
    return np.split(by_part, cuts)


def as_lists(part_of: Ints, k: int) -> list[list[int]]:
    """The positions in each part, ascending; the lists in the order of their first positions. No part is empty."""
    return sorted(part.tolist() for part in members(part_of, k))
