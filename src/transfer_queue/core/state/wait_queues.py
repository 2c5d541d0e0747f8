"""The waiting requests: claims for rows, puts for capacity, producers for group demand, watches, and locks of keys.

Clients that wait until all rows of a partition are done are among the producers.

Each queue is in order of arrival, and each request has a deadline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from transfer_queue.core.events.records import Parkable
from transfer_queue.core.tables.changes import is_first_watch
from transfer_queue.core.tables.leases import remove_member
from transfer_queue.errors import CapacityError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import AwaitDone, TakeGroupDemand
from transfer_queue.messages.queries import Watch

MAX_WAITING = 4096  # requests of one client that may wait at the same time
MAX_WAITING_BYTES = 64 << 20  # the sum of their sizes as messages; a larger request may wait by itself

RequestKey = tuple[str, int]  # client, sequence
ShareKey = tuple[int, int]  # dp_rank, batch_index
WatchKey = tuple[bytes, bool]

_encode = msgspec.msgpack.Encoder().encode


def size_of(request: Parkable) -> int:
    """Return the number of bytes of a request as a message."""
    return len(_encode(request))


class ParkedRequest(msgspec.Struct, frozen=True):
    """A request that waits."""

    client: str
    sequence: int
    since: float
    """When it began to wait, by the controller's clock."""
    deadline: float
    """By the controller's clock."""
    request: Parkable

    @property
    def waiter(self) -> RequestKey:
        """The client and the sequence number of the request."""
        return self.client, self.sequence

    @property
    def claim(self) -> Claim:
        """The request, which must be a claim."""
        assert isinstance(self.request, Claim)
        return self.request

    @property
    def lock(self) -> TakeLock:
        """The request, which must be one for a lock."""
        assert isinstance(self.request, TakeLock)
        return self.request

    @property
    def watch(self) -> Watch:
        """The request, which must be a watch."""
        assert isinstance(self.request, Watch)
        return self.request


class ClaimQueue:
    """The waiting claims of one task in one partition."""

    def __init__(self) -> None:
        self.claims: dict[RequestKey, ParkedRequest] = {}
        """The claims in order of arrival."""
        self.shares: dict[ShareKey, dict[RequestKey, None]] = {}
        """The same claims by the dealt batch that they may ask for (see `share_key`)."""
        self.wanted: dict[tuple[str, ...], tuple[int, int]] = {}
        """Fields -> (number of claims with these fields, a lower bound of their counts)."""
        self.watchers: dict[RequestKey, None] = {}
        """The claims that any change of the partition may answer (`Claim.since`)."""
        self.finite: dict[RequestKey, None] = {}
        """The claims that end when the task has consumed the whole partition."""

    def add(self, waiting: ParkedRequest) -> None:
        """Add a claim."""
        claim = waiting.claim
        self.claims[waiting.waiter] = waiting
        fields = tuple(claim.fields)
        number, least = self.wanted.get(fields, (0, least_count(claim)))
        self.wanted[fields] = number + 1, min(least, least_count(claim))
        if claim.finite:
            self.finite[waiting.waiter] = None
        if claim.since is not None:
            self.watchers[waiting.waiter] = None
        key = share_key(claim.sampling)
        if key is not None:
            self.shares.setdefault(key, {})[waiting.waiter] = None

    def remove(self, waiter: RequestKey) -> None:
        """Remove a claim."""
        claim = self.claims.pop(waiter).claim
        self.watchers.pop(waiter, None)
        self.finite.pop(waiter, None)
        fields = tuple(claim.fields)
        number, least = self.wanted.pop(fields)
        if number > 1:
            self.wanted[fields] = number - 1, least
        key = share_key(claim.sampling)
        if key is not None:
            remove_member(self.shares, key, waiter)

    def claims_for_batch(self, key: ShareKey) -> list[ParkedRequest]:
        """Return the claims that may ask for this dealt batch."""
        return [self.claims[waiter] for waiter in self.shares.get(key, ())]

    def tighten_bounds(self) -> None:
        """Make the lower bounds in `wanted` exact, because the claim with the lowest count may have been removed."""
        least: dict[tuple[str, ...], int] = {}
        for waiting in self.claims.values():
            fields = tuple(waiting.claim.fields)
            count = least_count(waiting.claim)
            least[fields] = min(count, least.get(fields, count))
        self.wanted = {fields: (self.wanted[fields][0], count) for fields, count in least.items()}


def least_count(claim: Claim) -> int:
    """Return the number of ready rows from which on a claim can be met."""
    return claim.count if claim.least is None else claim.least


def share_key(sampling: dict[str, Any]) -> ShareKey | None:
    """Return the key of the dealt batch that a claim may ask for. Its sampler may be one that keeps no batches."""
    rank, batch = sampling.get("dp_rank") or 0, sampling.get("batch_index")
    return (rank, batch) if isinstance(rank, int) and isinstance(batch, int) else None


class WatchQueue:
    """The waiting watches of one partition."""

    def __init__(self) -> None:
        self.groups: dict[WatchKey, dict[RequestKey, ParkedRequest]] = {}
        """(where, whether they begin) -> the watches that get equal replies; no group is empty."""
        self.looked = -1
        """The version up to which nothing is new to any watch that has a connection; -1: there was no partition.

        The controller uses it. It is not part of the state.
        """

    @staticmethod
    def key(watch: Watch) -> WatchKey:
        """Return the key of a watch. Watches with equal keys get equal replies to later changes."""
        return _encode(watch.where), is_first_watch(watch)

    def add(self, waiting: ParkedRequest, watch: Watch) -> None:
        """Add a watch."""
        self.groups.setdefault(self.key(watch), {})[waiting.waiter] = waiting

    def remove(self, waiter: RequestKey, watch: Watch) -> None:
        """Remove a watch."""
        remove_member(self.groups, self.key(watch), waiter)


class WaitQueues:
    """All waiting requests."""

    def __init__(self) -> None:
        self.by_waiter: dict[RequestKey, ParkedRequest] = {}
        """Every waiting request."""
        self.of_client: dict[str, dict[RequestKey, int]] = {}
        """Client -> its waiting requests and their sizes as messages; no entry if there are none."""
        self.claims: dict[str, dict[str, ClaimQueue]] = {}
        """Partition -> task -> its waiting claims; no queue is empty."""
        self.space: dict[RequestKey, ParkedRequest] = {}
        """Puts and reservations that wait for capacity, in order of arrival."""
        self.work: dict[str, dict[RequestKey, ParkedRequest]] = {}
        """Partition -> producers that wait for group demand, and clients that wait until all rows are done."""
        self.watches: dict[str, WatchQueue] = {}
        """Partition -> its waiting watches; no queue is empty."""
        self.locks: dict[str, dict[RequestKey, ParkedRequest]] = {}
        """Partition -> the requests that wait for a lock, in order of arrival; no queue is empty."""
        self._deadlines: list[tuple[float, str, int]] = []

    def add(self, waiting: ParkedRequest) -> None:
        """Add a request behind those that wait already."""
        request = waiting.request
        self.by_waiter[waiting.waiter] = waiting
        self.of_client.setdefault(waiting.client, {})[waiting.waiter] = size_of(request)
        if isinstance(request, Claim):
            self.claims.setdefault(request.partition, {}).setdefault(request.task, ClaimQueue()).add(waiting)
        elif isinstance(request, Watch):
            self.watches.setdefault(request.partition, WatchQueue()).add(waiting, request)
        elif isinstance(request, (TakeGroupDemand, AwaitDone, TakeLock)):
            self._lines_for(request).setdefault(request.partition, {})[waiting.waiter] = waiting
        else:
            self.space[waiting.waiter] = waiting
        heapq.heappush(self._deadlines, (waiting.deadline, *waiting.waiter))

    def remove(self, waiter: RequestKey) -> None:
        """Remove a request."""
        request = self.by_waiter.pop(waiter).request
        remove_member(self.of_client, waiter[0], waiter)
        if len(self._deadlines) > 2 * len(self.by_waiter) + 64:
            # most requests are answered long before their deadline; the entries that they leave must not accumulate
            self._deadlines = [(w.deadline, *w.waiter) for w in self.by_waiter.values()]
            heapq.heapify(self._deadlines)
        if isinstance(request, Claim):
            queue = self.claims[request.partition][request.task]
            queue.remove(waiter)
            if not queue.claims:
                remove_member(self.claims, request.partition, request.task)
        elif isinstance(request, Watch):
            watches = self.watches[request.partition]
            watches.remove(waiter, request)
            if not watches.groups:
                del self.watches[request.partition]
        elif isinstance(request, (TakeGroupDemand, AwaitDone, TakeLock)):
            remove_member(self._lines_for(request), request.partition, waiter)
        else:
            del self.space[waiter]

    def _lines_for(self, request: TakeGroupDemand | AwaitDone | TakeLock) -> dict[str, dict[RequestKey, ParkedRequest]]:
        """Return the lines, by partition, in one of which such a request waits."""
        return self.locks if isinstance(request, TakeLock) else self.work

    def check_limits(self, client: str, request: Parkable) -> None:
        """Raise CapacityError if a client has as many waiting requests, or bytes of them, as it may have."""
        sizes = self.of_client.get(client, {})
        if len(sizes) >= MAX_WAITING:
            raise CapacityError(
                f"too many waiting requests: {MAX_WAITING} of this client wait already, which is the limit for one "
                "client. Make fewer calls at a time, or use several clients"
            )
        held_bytes = sum(sizes.values())
        if held_bytes and held_bytes + size_of(request) > MAX_WAITING_BYTES:
            raise CapacityError(
                f"too many waiting requests: those of this client have {held_bytes} bytes already, this one would add "
                f"{size_of(request)}, and the limit for one client is {MAX_WAITING_BYTES}. Use fewer rows in each "
                "request, or several clients"
            )

    def claim_queues(self, partition: str) -> dict[str, ClaimQueue]:
        """Return task -> queue of one partition."""
        return self.claims.get(partition, {})

    def awaited(self, partition: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return the (task, fields) of a partition for which claims wait."""
        queues = self.claims.get(partition)
        return [(task, fields) for task, queue in queues.items() for fields in queue.wanted] if queues else []

    def _trim(self) -> None:
        while self._deadlines:
            waiting = self.by_waiter.get(self._deadlines[0][1:])
            if waiting is not None and waiting.deadline == self._deadlines[0][0]:
                return
            heapq.heappop(self._deadlines)  # answered, or parked again with another deadline

    def next_deadline(self) -> float | None:
        """Return the next deadline; None if no request has one."""
        if not self._deadlines:  # usually nothing waits, and this is determined after every event
            return None
        self._trim()
        first = self._deadlines[0][0] if self._deadlines else math.inf
        return first if first < math.inf else None

    def expired(self, now: float) -> Iterator[ParkedRequest]:
        """Iterate over the requests whose deadline is reached, by deadline. Remove each before taking the next one."""
        while True:
            self._trim()
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            yield self.by_waiter[self._deadlines[0][1:]]

    def to_comparable(self) -> list[object]:
        """Return all waiting requests in a form that can be compared after a replay."""
        return [(w, v.since, v.deadline, repr(v.request)) for w, v in self.by_waiter.items()]
