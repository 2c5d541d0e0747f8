"""Requests that wait: claims for rows, puts for capacity, producers for work, watches for changes.

First come, first served; a deadline each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any, Union

import msgspec

from transfer_queue.core.tables.change_feed import begins
from transfer_queue.errors import CapacityError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import Watch

MAX_WAITING = 4096  # requests of one client that wait at a time
MAX_WAITING_BYTES = 64 << 20  # of them together, as messages; one that is larger may wait alone

RequestKey = tuple[str, int]  # client, sequence
ShareKey = tuple[int, int]  # dp_rank, batch_index
WatchKey = tuple[bytes, bool]

Parkable = Union[Claim, Publish, Reserve, TakeGroupDemand, Watch]

_encode = msgspec.msgpack.Encoder().encode


def size_of(request: Parkable) -> int:
    """Bytes of a request as a message."""
    return len(_encode(request))


class ParkedRequest(msgspec.Struct, frozen=True):
    """A parked request. since, deadline: on the controller's clock."""

    client: str
    sequence: int
    since: float
    deadline: float
    request: Parkable

    @property
    def waiter(self) -> RequestKey:
        """Who waits."""
        return self.client, self.sequence

    @property
    def claim(self) -> Claim:
        """The request of one who waits for rows."""
        assert isinstance(self.request, Claim)
        return self.request

    @property
    def watch(self) -> Watch:
        """The request of one who waits for changes."""
        assert isinstance(self.request, Watch)
        return self.request


class ClaimQueue:
    """The parked claims of one task in one partition.

    claims: in order of arrival. shares: the same by the dealt batch that they may ask for (see `share_key`).
    wanted: fields -> (claims with these fields, a count that none of them is below). watchers: the probes that any
    change of the partition may answer. finite: those for whom a wholly consumed partition is the end.
    """

    def __init__(self) -> None:
        self.claims: dict[RequestKey, ParkedRequest] = {}
        self.shares: dict[ShareKey, dict[RequestKey, None]] = {}
        self.wanted: dict[tuple[str, ...], tuple[int, int]] = {}
        self.watchers: dict[RequestKey, None] = {}
        self.finite: dict[RequestKey, None] = {}

    def add(self, waiting: ParkedRequest) -> None:
        """A claim begins to wait."""
        claim = waiting.claim
        self.claims[waiting.waiter] = waiting
        fields = tuple(claim.fields)
        number, least = self.wanted.get(fields, (0, claim.count))
        self.wanted[fields] = number + 1, min(least, claim.count)
        if claim.finite:
            self.finite[waiting.waiter] = None
        if claim.since is not None:
            self.watchers[waiting.waiter] = None
        key = share_key(claim.sampling)
        if key is not None:
            self.shares.setdefault(key, {})[waiting.waiter] = None

    def remove(self, waiter: RequestKey) -> None:
        """A claim waits no longer."""
        claim = self.claims.pop(waiter).claim
        self.watchers.pop(waiter, None)
        self.finite.pop(waiter, None)
        fields = tuple(claim.fields)
        number, least = self.wanted.pop(fields)
        if number > 1:
            self.wanted[fields] = number - 1, least
        key = share_key(claim.sampling)
        if key is not None:
            del self.shares[key][waiter]
            if not self.shares[key]:
                del self.shares[key]

    def of_share(self, key: ShareKey) -> list[ParkedRequest]:
        """Those who may ask for this dealt batch."""
        return [self.claims[waiter] for waiter in self.shares.get(key, ())]

    def recount(self) -> None:
        """Makes the counts in `wanted` exact: who wanted least may have left."""
        least: dict[tuple[str, ...], int] = {}
        for waiting in self.claims.values():
            fields = tuple(waiting.claim.fields)
            least[fields] = min(waiting.claim.count, least.get(fields, waiting.claim.count))
        self.wanted = {fields: (self.wanted[fields][0], count) for fields, count in least.items()}


def share_key(sampling: dict[str, Any]) -> ShareKey | None:
    """The key of the dealt batch that a claim may ask for; whether its sampler keeps batches is not known here."""
    rank, batch = sampling.get("dp_rank") or 0, sampling.get("batch_index")
    return (rank, batch) if isinstance(rank, int) and isinstance(batch, int) else None


class WatchQueue:
    """The parked watches of one partition.

    groups: (where, whether they begin) -> those who are to be answered alike, none of them empty. looked: the version
    up to which nothing is new to any of them who has a connection; -1: there was no partition. It is the controller's,
    and not part of the state.
    """

    def __init__(self) -> None:
        self.groups: dict[WatchKey, dict[RequestKey, ParkedRequest]] = {}
        self.looked = -1

    @staticmethod
    def key(watch: Watch) -> WatchKey:
        """Watches with equal keys get equal answers to what is new from now on."""
        return _encode(watch.where), begins(watch)

    def add(self, waiting: ParkedRequest, watch: Watch) -> None:
        """A watch begins to wait."""
        self.groups.setdefault(self.key(watch), {})[waiting.waiter] = waiting

    def remove(self, waiter: RequestKey, watch: Watch) -> None:
        """A watch waits no longer."""
        key = self.key(watch)
        del self.groups[key][waiter]
        if not self.groups[key]:
            del self.groups[key]


class WaitQueues:
    """by_waiter: everything that waits. claims: partition -> task -> its queue, none of them empty.

    space: puts and reservations that wait for capacity, in order of arrival. work: partition -> producers that wait
    until groups are wanted of them. watches: partition -> who waits for a change of it, none empty. of_client: how
    many requests of each client wait, none of them 0. sizes: of all that wait, as messages; bytes_of_client:
    their sums.
    """

    def __init__(self) -> None:
        self.by_waiter: dict[RequestKey, ParkedRequest] = {}
        self.of_client: dict[str, int] = {}
        self.sizes: dict[RequestKey, int] = {}
        self.bytes_of_client: dict[str, int] = {}
        self.claims: dict[str, dict[str, ClaimQueue]] = {}
        self.space: dict[RequestKey, ParkedRequest] = {}
        self.work: dict[str, dict[RequestKey, ParkedRequest]] = {}
        self.watches: dict[str, WatchQueue] = {}
        self._deadlines: list[tuple[float, str, int]] = []

    def add(self, waiting: ParkedRequest) -> None:
        """Somebody begins to wait, behind those who wait already."""
        request = waiting.request
        self.by_waiter[waiting.waiter] = waiting
        size = self.sizes[waiting.waiter] = size_of(request)
        self.of_client[waiting.client] = self.of_client.get(waiting.client, 0) + 1
        self.bytes_of_client[waiting.client] = self.bytes_of_client.get(waiting.client, 0) + size
        if isinstance(request, Claim):
            tasks = self.claims.setdefault(request.partition, {})
            queue = tasks.get(request.task)
            if queue is None:
                queue = tasks[request.task] = ClaimQueue()
            queue.add(waiting)
        elif isinstance(request, TakeGroupDemand):
            self.work.setdefault(request.partition, {})[waiting.waiter] = waiting
        elif isinstance(request, Watch):
            self.watches.setdefault(request.partition, WatchQueue()).add(waiting, request)
        else:
            self.space[waiting.waiter] = waiting
        heapq.heappush(self._deadlines, (waiting.deadline, *waiting.waiter))

    def remove(self, waiter: RequestKey) -> None:
        """Somebody waits no longer."""
        request = self.by_waiter.pop(waiter).request
        left = self.of_client.pop(waiter[0]) - 1
        left_bytes = self.bytes_of_client.pop(waiter[0]) - self.sizes.pop(waiter)
        if left:
            self.of_client[waiter[0]] = left
            self.bytes_of_client[waiter[0]] = left_bytes
        if len(self._deadlines) > 2 * len(self.by_waiter) + 64:
            # most waits end long before their deadline; what they leave behind must not grow
            self._deadlines = [(w.deadline, *w.waiter) for w in self.by_waiter.values()]
            heapq.heapify(self._deadlines)
        if isinstance(request, TakeGroupDemand):
            del self.work[request.partition][waiter]
            if not self.work[request.partition]:
                del self.work[request.partition]
            return
        if isinstance(request, Watch):
            watches = self.watches[request.partition]
            watches.remove(waiter, request)
            if not watches.groups:
                del self.watches[request.partition]
            return
        if not isinstance(request, Claim):
            del self.space[waiter]
            return
        tasks = self.claims[request.partition]
        tasks[request.task].remove(waiter)
        if not tasks[request.task].claims:
            del tasks[request.task]
            if not tasks:
                del self.claims[request.partition]

    def check_room(self, client: str, request: Parkable) -> None:
        """Raises CapacityError where a client has as many waiting requests, or bytes of them, as it may."""
        if self.of_client.get(client, 0) >= MAX_WAITING:
            raise CapacityError(
                f"too many waiting requests: {MAX_WAITING} of this client wait already, the most that one may have. "
                "Ask with fewer calls at a time, or from several clients"
            )
        there = self.bytes_of_client.get(client, 0)
        if there and there + size_of(request) > MAX_WAITING_BYTES:
            raise CapacityError(
                f"too many waiting requests: those of this client take {there} bytes already, this one would take "
                f"{size_of(request)} more, and {MAX_WAITING_BYTES} are the most that one may have. Ask for fewer rows "
                "at a time, or from several clients"
            )

    def of_partition(self, partition: str) -> dict[str, ClaimQueue]:
        """Task -> queue of one partition."""
        return self.claims.get(partition, {})

    def awaited(self, partition: str) -> list[tuple[str, tuple[str, ...]]]:
        """The (task, fields) of a partition for which parked claims wait."""
        return [(task, fields) for task, queue in self.of_partition(partition).items() for fields in queue.wanted]

    def _trim(self) -> None:
        while self._deadlines:
            waiting = self.by_waiter.get(self._deadlines[0][1:])
            if waiting is not None and waiting.deadline == self._deadlines[0][0]:
                return
            heapq.heappop(self._deadlines)  # gone, or parked anew with another deadline

    def next_deadline(self) -> float | None:
        """When the next wait ends, None where nobody waits."""
        self._trim()
        first = self._deadlines[0][0] if self._deadlines else math.inf
        return first if first < math.inf else None

    def expired(self, now: float) -> Iterator[ParkedRequest]:
        """Those whose deadline has come, in order of deadline; each must be removed before the next is taken."""
        while True:
            self._trim()
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            yield self.by_waiter[self._deadlines[0][1:]]

    def state(self) -> list[object]:
        """For comparison after replay."""
        return [(w, v.since, v.deadline, repr(v.request)) for w, v in self.by_waiter.items()]
