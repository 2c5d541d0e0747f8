"""The locks of keys, which belong to the system and not to a partition: a key is locked before it exists.

A lock has a fencing token. Tokens come from the counter of the leases, so they only grow, and a put with the token of a
lock that has ended is refused. The deadlines of locks belong to the controller (`core.claims.lease_deadlines`) and are
not part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from transfer_queue.core.columns.schema import Count, Persisted, unique_dict, value_of


class KeyLock(msgspec.Struct, frozen=True):
    """The lock of one client on some keys of a partition."""

    token: Count
    partition: str
    keys: list[str]
    """Without repetitions; at least one."""
    client: str
    """The client that holds the lock."""
    seconds: float
    """The duration of the lease, and of each renewal."""
    since: float
    """When the lock was granted, by the controller's clock."""


class LockTable(Persisted, bare=True):
    """All locks that are in force."""

    by_token: dict[int, KeyLock] = value_of(
        list[KeyLock],
        dict,
        lambda locks: msgspec.to_builtins(list(locks.values())),
        lambda locks: unique_dict([(lock.token, lock) for lock in locks]),
    )
    """The locks by token, in the order in which they were granted."""

    def __init__(self) -> None:
        super().__init__()
        self.of_key: dict[tuple[str, str], int] = {}
        """(partition, key) -> the token of its lock. Derived."""
        self.of_client: dict[str, dict[int, None]] = {}
        """Client -> the tokens of its locks. Derived."""

    def is_any_held(self, partition: str, keys: Iterable[str]) -> bool:
        """Return whether one of these keys is locked."""
        return any((partition, key) in self.of_key for key in keys)

    def locks_of(self, client: str) -> list[KeyLock]:
        """Return the locks of a client."""
        return [self.by_token[token] for token in self.of_client.get(client, ())]

    def add(self, lock: KeyLock) -> None:
        """Add a lock."""
        self.by_token[lock.token] = lock
        self._derive(lock)

    def remove(self, token: int) -> None:
        """Remove a lock."""
        lock = self.by_token.pop(token)
        for key in lock.keys:
            del self.of_key[lock.partition, key]
        tokens = self.of_client[lock.client]
        del tokens[token]
        if not tokens:
            del self.of_client[lock.client]

    def clear(self) -> None:
        """Remove all locks."""
        for token in list(self.by_token):
            self.remove(token)

    def shift(self, seconds: float) -> None:
        """Change the times of the locks by this number of seconds, from the former clock to the present one."""
        for token, lock in self.by_token.items():
            self.by_token[token] = msgspec.structs.replace(lock, since=lock.since + seconds)

    def derive(self) -> None:
        """Compute the locks by key and by client."""
        for lock in self.by_token.values():
            self._derive(lock)

    def _derive(self, lock: KeyLock) -> None:
        self.of_key.update(((lock.partition, key), lock.token) for key in lock.keys)
        self.of_client.setdefault(lock.client, {})[lock.token] = None
