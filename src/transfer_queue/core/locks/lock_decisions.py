"""Decides which client gets a lock of keys, and how locks end. Reads the state and returns records.

A request gets all of its keys at once or none, so two clients never wait for each other. Requests are served in the
order in which they arrived: a request waits while one of its keys is locked, or an earlier request waits for it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from transfer_queue.core.events import records as r
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.tables.leases import KeyLock
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.locks import LockEntry, LockReply, LockSummary, TakeLock

RELEASED, EXPIRED, GONE = "released", "expired", "client gone"
SHOWN = 3  # keys that a message names
WAIT_ADVICE = "Pass a longer timeout= to wait for the lock, or end the block that holds it."


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
    found, wanted = [], set[str]()
    for waiter, waiting in state.waiting.locks.get(partition, {}).items():
        keys = waiting.lock.keys
        if waiter not in connected:
            continue
        if wanted.isdisjoint(keys) and not state.locks.is_any_held(partition, keys):
            found.append(waiting)
        wanted.update(keys)
    return found


def grant(state: State, client: str, request: TakeLock, now: float) -> r.LockGranted:
    """Return the record of a lock."""
    return r.LockGranted(request.partition, state.next_token, request.keys, client, request.lease, now)


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


def expire(lock: KeyLock) -> r.LockEnded:
    """Return the record that ends a lock whose lease has ended."""
    return _end(lock, EXPIRED)


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
    said = state.introductions.get(client)
    about = ("", -1, "", 0) if said is None else (said.task, said.rank, said.host, said.pid)
    return LockEntry(partition, keys, token, client, max(now - since, 0.0), lease, *about)


def summarize(state: State, now: float) -> LockSummary:
    """Return the numbers of locks and waiting requests, and a sentence about the request that waits longest."""
    queues = state.waiting.locks.values()
    first = min((waiting for queue in queues for waiting in queue.values()), key=lambda w: w.since, default=None)
    words = "" if first is None else describe_wait(state, first.waiter, first.lock, now - first.since, now)
    return LockSummary(len(state.locks.by_token), sum(map(len, queues)), words)


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
        f"a request of {state.describe_client(waiter[0])} waited {waited:.3g} s for a lock of {_keys_words(keys)} of "
        f"partition {partition!r}: {'; '.join([*held, *ahead, *same]) or 'none of these keys is locked now'}"
    )


def describe_lock(state: State, lock: KeyLock, now: float, keys: set[str] | None = None) -> str:
    """Return a clause that names the holder of a lock, and since when. keys: those to name. Default: all its keys."""
    named = lock.keys if keys is None else [key for key in lock.keys if key in keys]
    return (
        f"{_keys_words(named)} {'is' if len(named) == 1 else 'are'} locked for {max(now - lock.since, 0.0):.3g} s "
        f"by {state.describe_client(lock.client)} (token {lock.token})"
    )


def _keys_words(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more keys" if len(keys) > SHOWN else ""
    return ", ".join(map(repr, keys[:SHOWN])) + more
