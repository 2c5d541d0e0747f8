"""The deadlines of leases. They are not part of the state: after a restart each lease has its full time again."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.lease_table import RowLease

Entry = tuple[float, str, int]  # time, partition, token
LEAST = 1024  # entries of the heap before ended leases are removed from it


class LeaseDeadlines:
    """The deadlines of all leases of a state, on the controller's clock. Leases of a restored state start again."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._ends: dict[int, float] = {}  # token -> time; a renewal moves it
        self._heap: list[Entry] = []  # at least one entry for each lease, none later than its deadline
        self._most = LEAST  # entries at which those of ended leases are removed
        self._restored = any(partition.leases.by_token for partition in state.partitions.values())

    def begin(self, partition: str, lease: RowLease, now: float) -> None:
        """Set the deadline of a new lease, or of a lease whose time starts again."""
        self._ends[lease.token] = now + lease.seconds
        heapq.heappush(self._heap, (now + lease.seconds, partition, lease.token))
        if len(self._heap) > self._most:
            live = {token: name for _, name, token in self._heap if self._lease(name, token) is not None}
            self._ends = {token: self._ends[token] for token in live}
            self._heap = [(self._ends[token], name, token) for token, name in live.items()]
            heapq.heapify(self._heap)
            self._most = max(LEAST, 2 * len(self._heap))

    def renew(self, name: str, token: int, now: float) -> bool:
        """Restart the time of a lease. Returns whether it is still in force."""
        partition = self._state.partitions.get(name)
        lease = None if partition is None else partition.leases.by_token.get(token)
        if partition is None or lease is None or not len(partition.leases.live_rows(lease)):
            return False
        if token in self._ends:
            self._ends[token] = now + lease.seconds
        else:
            self.begin(name, lease, now)
        return True

    def age_of(self, lease: RowLease, now: float) -> float | None:
        """Return the seconds since a lease began or was renewed; None if this is not known."""
        end = self._ends.get(lease.token)
        return None if end is None else max(now - end + lease.seconds, 0.0)

    def next_deadline(self) -> float | None:
        """Return the time at which the next lease may end; None if there is no lease."""
        if self._restored:
            return -math.inf  # restored leases have no deadline yet
        while self._heap:
            when, name, token = self._heap[0]
            end = self._ends[token] if self._lease(name, token) is not None else None
            if end == when:
                return when
            heapq.heappop(self._heap)
            if end is None:
                self._ends.pop(token, None)
            elif end > when:
                heapq.heappush(self._heap, (end, name, token))
        return None

    def expired(self, now: float) -> Iterator[tuple[Partition, RowLease]]:
        """Iterate over the leases whose deadline has passed. The caller ends each one before it takes the next."""
        if self._restored:
            self._restored = False
            for partition in self._state.partitions.values():
                for lease in partition.leases.by_token.values():
                    self.begin(partition.name, lease, now)
        while (when := self.next_deadline()) is not None and when <= now:
            _, name, token = self._heap[0]
            yield self._state.partitions[name], self._state.partitions[name].leases.by_token[token]

    def _lease(self, name: str, token: int) -> RowLease | None:
        partition = self._state.partitions.get(name)
        return None if partition is None else partition.leases.by_token.get(token)
