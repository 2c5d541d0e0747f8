"""The deadlines of leases and locks. They are not part of the state: after a restart each has its full time again."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from transfer_queue.core.tables.leases import KeyLock, RowLease

Entry = tuple[float, str, int]  # time, partition, token
LEAST = 1024  # entries of the heap before ended leases are removed from it


LeasedT = TypeVar("LeasedT", RowLease, KeyLock)


class Deadlines(Generic[LeasedT]):
    """The deadlines of all leases of a kind, on the controller's clock. Those of a restored state start again.

    Args:
        leases: All leases of the state, each with the name of its partition.
        find: Returns a lease of the state by its partition and token; None if it has ended.
        now: The time on the controller's clock.
    """

    def __init__(
        self,
        leases: Iterable[tuple[str, LeasedT]],
        find: Callable[[str, int], LeasedT | None],
        now: float,
    ) -> None:
        self._find: Callable[[str, int], LeasedT | None] = find
        self._ends: dict[int, float] = {}  # token -> time; a renewal moves it
        self._heap: list[Entry] = []  # at least one entry for each lease, none later than its deadline
        self._most = LEAST  # entries at which those of ended leases are removed
        for name, lease in leases:
            self.begin(name, lease, now)

    def begin(self, partition: str, lease: LeasedT, now: float) -> None:
        """Set the deadline of a new lease, or of a lease whose time starts again."""
        self._ends[lease.token] = now + lease.seconds
        heapq.heappush(self._heap, (now + lease.seconds, partition, lease.token))
        if len(self._heap) > self._most:
            live = {token: name for _, name, token in self._heap if self._find(name, token) is not None}
            self._ends = {token: self._ends[token] for token in live}
            self._heap = [(self._ends[token], name, token) for token, name in live.items()]
            heapq.heapify(self._heap)
            self._most = max(LEAST, 2 * len(self._heap))

    def renew(self, name: str, token: int, now: float) -> bool:
        """Restart the time of a lease. Returns whether it is still in force."""
        lease = self._find(name, token)
        if lease is None:
            return False
        if token in self._ends:
            self._ends[token] = now + lease.seconds
        else:
            self.begin(name, lease, now)
        return True

    def age_of(self, lease: LeasedT, now: float) -> float | None:
        """Return the seconds since a lease began or was renewed; None if this is not known."""
        end = self._ends.get(lease.token)
        return None if end is None else max(now - end + lease.seconds, 0.0)

    def next_deadline(self) -> float | None:
        """Return the time at which the next lease may end; None if there is no lease."""
        while self._heap:
            when, name, token = self._heap[0]
            end = self._ends[token] if self._find(name, token) is not None else None
            if end == when:
                return when
            heapq.heappop(self._heap)
            if end is None:
                self._ends.pop(token, None)
            elif end > when:
                heapq.heappush(self._heap, (end, name, token))
        return None

    def expired(self, now: float) -> Iterator[tuple[str, LeasedT]]:
        """Iterate over (partition, lease) whose deadline has passed. The caller ends each one before the next."""
        while (when := self.next_deadline()) is not None and when <= now:
            _, name, token = self._heap[0]
            lease = self._find(name, token)
            assert lease is not None  # `next_deadline` has removed the entries of ended leases
            yield name, lease
