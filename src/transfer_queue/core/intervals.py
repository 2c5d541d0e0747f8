"""A set of integers kept as disjoint intervals: which batch indexes were ever issued, in bounded space."""

from __future__ import annotations

from bisect import bisect_right


class Intervals:
    """Integers as sorted, disjoint, non-adjacent closed intervals."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value) - 1
        return at >= 0 and value <= self.ends[at]

    def add(self, value: int) -> None:
        """Adds one integer, joining its neighbours."""
        at = bisect_right(self.starts, value) - 1
        if at >= 0 and value <= self.ends[at]:
            return
        joins_left = at >= 0 and self.ends[at] == value - 1
        joins_right = at + 1 < len(self.starts) and self.starts[at + 1] == value + 1
        if joins_left and joins_right:
            self.ends[at] = self.ends[at + 1]
            del self.starts[at + 1], self.ends[at + 1]
        elif joins_left:
            self.ends[at] = value
        elif joins_right:
            self.starts[at + 1] = value
        else:
            self.starts.insert(at + 1, value)
            self.ends.insert(at + 1, value)

    def state(self) -> list[tuple[int, int]]:
        """The intervals, for comparison and snapshots."""
        return list(zip(self.starts, self.ends))
