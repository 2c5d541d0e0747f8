"""Requests that wait: claims for rows, puts for capacity. First come, first served; a deadline each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from transfer_queue.messages import Claim, Publish, Reserve

Waiter = tuple[str, int]  # client, sequence


class Waiting(msgspec.Struct, frozen=True):
    """A parked request. since, deadline: on the controller's clock."""

    client: str
    sequence: int
    since: float
    deadline: float
    request: Claim | Publish | Reserve


class WaitingRoom:
    """by_waiter: everything that waits. claims: (partition, task) -> its claims, in order of arrival.

    space: puts and reservations that wait for capacity, in order of arrival.
    """

    def __init__(self) -> None:
        self.by_waiter: dict[Waiter, Waiting] = {}
        self.claims: dict[tuple[str, str], dict[Waiter, Waiting]] = {}
        self.space: dict[Waiter, Waiting] = {}
        self._deadlines: list[tuple[float, str, int]] = []

    def add(self, waiting: Waiting) -> None:
        """Somebody begins to wait, behind those who wait already."""
        waiter = (waiting.client, waiting.sequence)
        self.by_waiter[waiter] = waiting
        if isinstance(waiting.request, Claim):
            queue = self.claims.setdefault((waiting.request.partition, waiting.request.task), {})
            queue[waiter] = waiting
        else:
            self.space[waiter] = waiting
        heapq.heappush(self._deadlines, (waiting.deadline, *waiter))

    def remove(self, waiter: Waiter) -> None:
        """Somebody waits no longer."""
        waiting = self.by_waiter.pop(waiter)
        if isinstance(waiting.request, Claim):
            key = (waiting.request.partition, waiting.request.task)
            del self.claims[key][waiter]
            if not self.claims[key]:
                del self.claims[key]
        else:
            del self.space[waiter]

    def _trim(self) -> None:
        while self._deadlines and self._deadlines[0][1:] not in self.by_waiter:
            heapq.heappop(self._deadlines)

    def next_deadline(self) -> float | None:
        """When the next wait ends, None where nobody waits."""
        self._trim()
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> Iterator[Waiting]:
        """Those whose deadline has come, in order of deadline; each must be removed before the next is taken."""
        while True:
            self._trim()
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            yield self.by_waiter[self._deadlines[0][1:]]

    def of_partition(self, partition: str) -> list[tuple[str, dict[Waiter, Waiting]]]:
        """(task, its claims) of one partition."""
        return [(task, queue) for (name, task), queue in self.claims.items() if name == partition]

    def state(self) -> list[object]:
        """For comparison after replay."""
        return [(w, v.since, v.deadline, repr(v.request)) for w, v in self.by_waiter.items()]
