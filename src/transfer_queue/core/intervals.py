"""A set of integers kept as disjoint intervals: which of an ascending series are done, in bounded space."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Intervals:
    """Integers as sorted, disjoint, non-adjacent closed intervals."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value) - 1
        return at >= 0 and value <= self.ends[at]

    def add(self, first: int, last: int | None = None) -> None:
        """Adds the integers first..last (last None: one), joining what they touch."""
        last = first if last is None else last
        if last < first:
            return
        low = bisect_left(self.ends, first - 1)
        high = bisect_right(self.starts, last + 1)
        if low < high:
            first = min(first, self.starts[low])
            last = max(last, self.ends[high - 1])
        self.starts[low:high] = [first]
        self.ends[low:high] = [last]

    def drop_up_to(self, value: int) -> None:
        """Takes out all integers up to this one."""
        gone = bisect_right(self.ends, value)
        del self.starts[:gone], self.ends[:gone]
        if self.starts and self.starts[0] <= value:
            self.starts[0] = value + 1

    def state(self) -> list[tuple[int, int]]:
        """The intervals, for comparison and snapshots."""
        return list(zip(self.starts, self.ends, strict=True))
