"""Locks of keys: which client gets one, how they end, and how they are described.

A request gets all of its keys at once or none, so two clients never wait for each other. Requests are served in the
order in which they arrived: a request waits while one of its keys is locked, or an earlier request waits for it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import islice

from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.deadlines import Deadlines
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.tables.leases import KeyLock
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.messages.base import Done
from transfer_queue.messages.locks import (
    ListLocks,
    LockEntry,
    LockReply,
    LocksReply,
    LockSummary,
    ReleaseLock,
    TakeLock,
)

RELEASED, EXPIRED, GONE = "released", "expired", "client gone"
SHOWN = 3  # keys that a message names
PAGE = 256  # locks and waiting requests in one page of a list
WAIT_ADVICE = "Pass a longer timeout= to wait for the lock, or end the block that holds it."


class Locks(CoreService):
    """The deadlines of the locks."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.deadlines = Deadlines(
            [(lock.partition, lock) for lock in context.state.locks.by_token.values()],
            lambda name, token: context.state.locks.by_token.get(token),
            context.now,
        )

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(context.state.locks.by_token or context.state.waiting.locks)

    @observes(r.LockGranted)
    def begin(self, record: r.LockGranted) -> None:
        """Set the deadline of a new lock."""
        self.deadlines.begin(record.partition, self.context.state.locks.by_token[record.token], self.context.now)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.deadlines.next_deadline()

    def on_due(self) -> list[Effect]:
        """End the locks whose time is over."""
        for _, lock in self.deadlines.expired(self.context.now):
            self.context.log.apply(_end(lock, EXPIRED))
        return []

    def on_wait_ended(self, waiting: ParkedRequest, met: bool) -> None:
        """See `CoreService.on_wait_ended`. The requests behind one for a lock do not wait for it any more."""
        if isinstance(waiting.request, TakeLock):
            self.context.changes.changes_of(waiting.request.partition).locks = True


# ------------------------------------------------------------ requests


@handles(TakeLock)
def handle_take_lock(context: Context, caller: Caller, request: TakeLock) -> Decision | ParkDecision:
    """Lock keys, or park the request while one of them is locked or an earlier request waits for one of them."""
    check_request(request)
    state, now = context.state, context.now
    context.services[Locks]  # also a request that waits needs it
    if must_wait(state, request, caller.waiter, context.parked.peers):
        if request.wait is not None and request.wait > 0:
            return ParkDecision(request, request.wait)
        raise WaitTimeoutError(f"Timeout: {describe_wait(state, caller.waiter, request, 0.0, now)}. {WAIT_ADVICE}")
    token = state.next_token
    granted = r.LockGranted(request.partition, token, request.keys, caller.client, request.lease, now)
    return Decision([granted], lambda: LockReply(token))


@handles(ReleaseLock)
def handle_release_lock(context: Context, caller: Caller, request: ReleaseLock) -> Decision:
    """Release a lock. The reply says whether the client held it."""
    records = release(context.state, caller.client, request.token)
    return Decision(records, lambda: Done(bool(records)))


@handles(ListLocks, reads=True)
def handle_list_locks(context: Context, caller: Caller, request: ListLocks) -> LocksReply:
    """Reply with a page of the locks and of the requests that wait for one."""
    listed = entries(context.state, context.now, request.partitions)
    page = list(islice(listed, request.start, request.start + PAGE))
    more = next(listed, None) is not None
    return LocksReply(page, request.start + len(page) if more else None)


# ------------------------------------------------------------ decisions


def check_request(request: TakeLock) -> None:
    """Raise InvalidArgumentError if a request names no key, repeats a key, or has a lease that is not positive."""
    if not request.keys or len(set(request.keys)) != len(request.keys):
        raise InvalidArgumentError(f"a lock must name at least one key, and each key once, got {request.keys[:5]}")
    if request.lease <= 0:
        raise InvalidArgumentError(f"the lease of a lock must be a positive number of seconds, got {request.lease}")


def must_wait(state: State, request: TakeLock, waiter: RequestKey, connected: Container[RequestKey]) -> bool:
    """Return whether a request cannot be granted now. `waiter` waits already, or has just arrived.

    connected: the waiting requests whose clients are connected. The others keep their place, and no request waits for
    them.
    """
    if state.locks.is_any_held(request.partition, request.keys):
        return True
    for other, waiting in state.waiting.locks.get(request.partition, {}).items():
        if other == waiter:
            return False
        if other in connected and not set(waiting.lock.keys).isdisjoint(request.keys):
            return True
    return False


def grantable(state: State, partition: str, connected: Container[RequestKey]) -> list[ParkedRequest]:
    """Return the waiting requests of a partition that can be granted now, all of them together."""
    granted, wanted = [], set[str]()
    for waiter, waiting in state.waiting.locks.get(partition, {}).items():
        keys = waiting.lock.keys
        if waiter not in connected:
            continue
        if wanted.isdisjoint(keys) and not state.locks.is_any_held(partition, keys):
            granted.append(waiting)
        wanted.update(keys)
    return granted


def release(state: State, client: str, token: int) -> list[r.AnyRecord]:
    """Return the record that ends a lock of this client; none if it has ended, or another client holds it."""
    lock = state.locks.by_token.get(token)
    return [] if lock is None or lock.client != client else [_end(lock, RELEASED)]


def release_unseen(state: State, client: str, sequence: int) -> list[r.AnyRecord]:
    """Return the record that ends the lock of a request that its client cancels, which has not seen the reply."""
    kept = state.clients.get(client)
    met = None if kept is None else kept.replies.get(sequence)
    return release(state, client, met.token) if isinstance(met, LockReply) else []


def release_all(state: State, client: str) -> list[r.AnyRecord]:
    """Return the records that end all locks of a client that is gone."""
    return [_end(lock, GONE) for lock in state.locks.locks_of(client)]


def _end(lock: KeyLock, reason: str) -> r.LockEnded:
    return r.LockEnded(lock.partition, lock.token, reason)


# ------------------------------------------------------------ descriptions


def entries(state: State, now: float, partitions: list[str] | None = None) -> Iterator[LockEntry]:
    """Iterate over the locks of these partitions, or of all, and then over the requests that wait for one."""
    for lock in state.locks.by_token.values():
        if partitions is None or lock.partition in partitions:
            yield _entry(state, now, lock.partition, lock.keys, lock.token, lock.client, lock.since, lock.seconds)
    for name, queue in state.waiting.locks.items():
        for waiting in queue.values() if partitions is None or name in partitions else ():
            request = waiting.lock
            yield _entry(state, now, name, request.keys, 0, waiting.client, waiting.since, request.lease)


def _entry(
    state: State, now: float, partition: str, keys: list[str], token: int, client: str, since: float, lease: float
) -> LockEntry:
    worker = state.introductions.get(client)
    about = ("", -1, "", 0) if worker is None else (worker.task, worker.rank, worker.host, worker.pid)
    return LockEntry(partition, keys, token, client, max(now - since, 0.0), lease, *about)


def summarize(state: State, now: float) -> LockSummary:
    """Return the numbers of locks and waiting requests, and a sentence about the request that waits longest."""
    queues = state.waiting.locks.values()
    first = min((waiting for queue in queues for waiting in queue.values()), key=lambda w: w.since, default=None)
    oldest_wait = "" if first is None else describe_wait(state, first.waiter, first.lock, now - first.since, now)
    return LockSummary(len(state.locks.by_token), sum(map(len, queues)), oldest_wait)


def describe_wait(state: State, waiter: RequestKey, request: TakeLock, waited: float, now: float) -> str:
    """Return what a request waits for, as a clause that begins with its client."""
    partition, keys = request.partition, request.keys
    tokens = dict.fromkeys(state.locks.of_key[partition, key] for key in keys if (partition, key) in state.locks.of_key)
    held = [describe_lock(state, state.locks.by_token[token], now, set(keys)) for token in list(tokens)[:SHOWN]]
    before = 0
    for other, waiting in state.waiting.locks.get(partition, {}).items():
        if other == waiter:
            break
        before += not set(waiting.lock.keys).isdisjoint(keys)
    ahead = [f"earlier requests for some of these keys: {before}"] if before else []
    own = any(state.locks.by_token[token].client == waiter[0] for token in tokens)
    same = ["the same client holds a lock that it waits for, and locks are not reentrant"] if own else []
    return (
        f"a request of {state.describe_client(waiter[0])} waited {waited:.3g} s for a lock of {_keys_text(keys)} of "
        f"partition {partition!r}: {'; '.join([*held, *ahead, *same]) or 'none of these keys is locked now'}"
    )


def describe_lock(state: State, lock: KeyLock, now: float, keys: set[str] | None = None) -> str:
    """Return a clause that names the holder of a lock, and since when. keys: those to name. Default: all its keys."""
    named = lock.keys if keys is None else [key for key in lock.keys if key in keys]
    return (
        f"{_keys_text(named)} {'is' if len(named) == 1 else 'are'} locked for {max(now - lock.since, 0.0):.3g} s "
        f"by {state.describe_client(lock.client)} (token {lock.token})"
    )


def _keys_text(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more keys" if len(keys) > SHOWN else ""
    return ", ".join(map(repr, keys[:SHOWN])) + more
