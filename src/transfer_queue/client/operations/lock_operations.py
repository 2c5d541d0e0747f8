"""Defines the operations on locks of keys, as generators of calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from transfer_queue.client.conversion import arguments
from transfer_queue.client.data.data_path import DataPath, Operation
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages import locks
from transfer_queue.messages.base import Done
from transfer_queue.messages.locks import LockEntry


class LockLease(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """The lease of a lock, which is renewed while an object refers to it."""

    partition: str
    token: int
    seconds: float


class LockOperations(DataPath):
    """The operations of one client on locks of keys."""

    def kv_lock_list(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> Operation[list[LockEntry]]:
        """Return the locks of keys, and the requests that wait for a lock.

        Each entry names the client, and how long it has held the lock or waited. A long list is fetched in pages; locks
        that are taken or released meanwhile may or may not be in it.

        Args:
            partition_id: The partition. Default: all partitions.
            timeout: See `TransferQueueClient`.

        Returns:
            First the locks, in the order in which they were granted, then the requests that wait for one, in the order
            in which they arrived (`LockEntry.held` is False).

        Example:
            >>> client.kv_lock_list()
            []
        """
        if partition_id is not None:
            arguments.check_partition_id(partition_id)
        named = None if partition_id is None else [partition_id]
        listed: list[LockEntry] = []
        start: int | None = 0
        while start is not None:
            page = yield from self._ask(locks.ListLocks(named, start), locks.LocksReply, timeout)
            listed += page.locks
            start = page.following
        return listed

    def _take_lock(
        self, keys: Sequence[str], partition_id: str, timeout: float | None, lease: float
    ) -> Operation[LockLease]:
        """Lock these keys, and renew the lock while the result is referred to."""
        yield from self._state.learn()
        wait = self._state.settings.call_timeout if timeout is None else timeout
        request = locks.TakeLock(partition_id, list(keys), lease, wait)
        reply = yield from self._ask(request, locks.LockReply, None, wait)
        held = LockLease(partition_id, reply.token, lease)
        self._state.renewals.add(held)
        return held

    def _release_lock(self, held: LockLease) -> Operation[bool]:
        """Release a lock. Returns whether it was in force."""
        self._state.renewals.forget(held.token)  # if the request fails, the lock ends with its lease
        return bool((yield from self._ask(locks.ReleaseLock(held.partition, held.token), Done, None)).value)


def validated_lock_keys(keys: Sequence[str] | str) -> tuple[str, ...]:
    """Return the keys of a lock without repetitions. There must be at least one."""
    named = tuple(dict.fromkeys(arguments.validated_keys(keys)))
    if not named:
        raise InvalidArgumentError("keys must name at least one key to lock, got none")
    return named
