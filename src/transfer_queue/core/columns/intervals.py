"""A set of integers, stored as disjoint intervals, so that a mostly contiguous set of any size takes little memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from transfer_queue.core.columns.schema import Persisted, list_of, require


class IntervalSet(Persisted, array_like=True):
    """A set of integers, stored as sorted, disjoint, non-adjacent closed intervals."""

    starts: list[int] = list_of(int)
    ends: list[int] = list_of(int)

    def check_columns(self, where: str) -> None:
        """Raise BrokenInvariant unless the intervals are disjoint, ascending and not adjacent."""
        fine = len(self.starts) == len(self.ends) and all(a <= b for a, b in zip(self.starts, self.ends, strict=True))
        fine = fine and all(b + 1 < a for a, b in zip(self.starts[1:], self.ends, strict=False))
        require(fine, f"the intervals {where} are not in order")

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value) - 1
        return at >= 0 and value <= self.ends[at]

    def add(self, first: int, last: int | None = None) -> None:
        """Add the integers from `first` to `last`, which is included (None: only `first`)."""
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

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts (first, last) of first..last that are not in the set, ascending."""
        found = []
        for at in range(bisect_left(self.ends, first), bisect_right(self.starts, last)):
            if first < self.starts[at]:
                found.append((first, self.starts[at] - 1))
            first = self.ends[at] + 1
        if first <= last:
            found.append((first, last))
        return found

    def difference(self, other: IntervalSet | None) -> Iterator[int]:
        """Iterate over the integers that are in this set and not in the other, ascending."""
        if other is None or not other.starts:
            for start, end in zip(self.starts, self.ends, strict=True):
                yield from range(start, end + 1)
            return
        for start, end in zip(self.starts, self.ends, strict=True):
            at = bisect_left(other.ends, start)
            while start <= end:
                if at == len(other.starts) or other.starts[at] > end:
                    yield from range(start, end + 1)
                    break
                yield from range(start, other.starts[at])
                start = other.ends[at] + 1
                at += 1

    def drop_up_to(self, value: int) -> None:
        """Remove all integers up to this one, which is included."""
        gone = bisect_right(self.ends, value)
        del self.starts[:gone], self.ends[:gone]
        if self.starts and self.starts[0] <= value:
            self.starts[0] = value + 1
