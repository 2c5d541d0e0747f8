"""What clients hold under a token until a deadline: the leases of the rows of a partition, and the locks of keys.

A claim with a lease takes rows out of the ready sets as *claimed*. An acknowledgement of its token makes them consumed.
If the lease ends without one, they are delivered again: to any client, or, for rows of a dealt batch, to the client
that asks for that batch. The table also counts how often rows were delivered without an acknowledgement, and has the
batches that were not handed over yet.

The locks of keys belong to the system and not to a partition: a key is locked before it exists. A put with the token of
a lock that has ended is refused.

Tokens fence: they come from one counter that never decreases, and a token has no effect on rows that are not in its
lease any more. The deadlines of leases and locks belong to the controller (`core.claims.row_leases`) and are not
part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.columns.kinds import rows_of
from transfer_queue.core.columns.schema import Count, Persisted, array_of, linked_part, map_of, unique_dict, value_of
from transfer_queue.core.events.records import UnseenBatch
from transfer_queue.core.tables.rows import CHUNK, RowTable

BatchKey = tuple[str, int, int]  # task, dp_rank, batch_index
MOST = int(np.iinfo("u2").max)


def remove_member(groups: dict[Any, dict[Any, Any]], key: Any, member: Any) -> None:
    """Remove a member from one of these groups. A group is removed with its last member."""
    del groups[key][member]
    if not groups[key]:
        del groups[key]


class RowNumbers(Persisted, bare=True):
    """A small number for each (task, row), mostly 0, in u2 columns for the chunks in which any number is not 0."""

    _columns: dict[str, dict[int, np.ndarray]] = map_of(str, map_of(Count, array_of("<u2", length=CHUNK)))
    """Task -> chunk number -> the numbers of its rows."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def numbers_of(self, task: str, positions: np.ndarray) -> np.ndarray:
        """Return the number of each row (i8); 0 for position -1."""
        out = np.zeros(len(positions), "i8")
        columns = self._columns.get(task)
        if columns:
            for key, _, at, where in self._rows.split(positions):
                if key in columns:
                    out[where] = columns[key][at]
        return out

    def any_of(self, positions: np.ndarray) -> np.ndarray:
        """Return which of these rows have a number other than 0 for any task, bool [rows]."""
        out = np.zeros(len(positions), bool)
        for task in self._columns:
            out |= self.numbers_of(task, positions) != 0
        return out

    def column_of(self, task: str, key: int) -> np.ndarray | None:
        """Return the numbers of the rows of a chunk; None if all of them are 0."""
        return self._columns.get(task, {}).get(key)

    def columns(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Iterate over (task, chunk number, the numbers of its rows)."""
        for task, columns in self._columns.items():
            for key, column in columns.items():
                yield task, key, column

    def add_one(self, task: str, positions: np.ndarray) -> None:
        """Add one to the numbers of these rows, up to the largest u2."""
        self.set(task, positions, np.minimum(self.numbers_of(task, positions) + 1, MOST))

    def set(self, task: str, positions: np.ndarray, numbers: np.ndarray | int) -> None:
        """Set the numbers of these rows."""
        columns = self._columns.setdefault(task, {})
        numbers = np.broadcast_to(np.asarray(numbers, "u2"), len(positions))
        for key, _, at, where in self._rows.split(positions):
            if key not in columns:
                columns[key] = np.zeros(CHUNK, "u2")
            columns[key][at] = numbers[where]

    def reset(self, task: str, positions: np.ndarray) -> None:
        """Set the numbers of these rows to 0."""
        for key, _, at, _ in self._rows.split(positions):
            self._reset_rows(self._columns.get(task, {}), key, at)

    def clear_rows(self, key: int, at: np.ndarray) -> None:
        """Record that rows of a chunk are cleared."""
        for columns in self._columns.values():
            self._reset_rows(columns, key, at)

    @staticmethod
    def _reset_rows(columns: dict[int, np.ndarray], key: int, at: np.ndarray) -> None:
        column = columns.get(key)
        if column is not None:
            column[at] = 0
            if not column.any():
                del columns[key]

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset."""
        self._columns.pop(task, None)


class RowLease(msgspec.Struct, eq=False):
    """The rows that one claim got for a limited time."""

    token: Count
    task: str
    client: str
    """The client that claimed the rows."""
    rows: np.ndarray
    """Global indexes of rows that are neither acknowledged nor returned, ascending."""
    seconds: float
    """The duration of the lease, and of each renewal."""
    batch: BatchKey | None
    """The key of the dealt batch to which the rows belong; None if they belong to no kept batch."""
    replicas: Count
    """A row is consumed after acknowledgements by this number of tokens."""
    unit: Count
    """The samples of a group, which must be acknowledged together; 0 if each row is acknowledged by itself."""


class UnseenBatches(Persisted, bare=True):
    """The batches of one partition that were dealt and that no consumer has seen.

    A claim without a rank-consistent key consumes its rows when it is answered. Its client holds them until it has
    handed them over: until the call has returned, or until a loader has yielded the first item. If this never happens,
    the rows become ready again, as if they had not been dealt. Tokens come from the counter of the leases, so a late
    notice names a token that has ended.
    """

    by_token: dict[int, UnseenBatch] = value_of(
        list[UnseenBatch],
        dict,
        lambda batches: msgspec.to_builtins(list(batches.values()), builtin_types=(bytes,)),
        lambda batches: unique_dict([(batch.token, batch) for batch in batches]),
    )
    """The batches by token, in the order in which they were dealt."""

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset. Its tokens are fenced."""
        for token in [token for token, batch in self.by_token.items() if batch.task == task]:
            del self.by_token[token]


class LeaseTable(Persisted):
    """The leases of one partition."""

    by_token: dict[int, RowLease] = rows_of(RowLease, key="leases", array="rows", by="token")
    """The leases that have not ended, by token."""
    delivered: RowNumbers = linked_part(RowNumbers)
    """(task, row) -> number of deliveries that ended without an acknowledgement."""
    acked: RowNumbers = linked_part(RowNumbers)
    """(task, row) -> number of acknowledgements of a row that needs more of them."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self.delivered = RowNumbers(rows)
        self.acked = RowNumbers(rows)
        self._rows = rows
        self._of_batch: dict[BatchKey, dict[int, None]] = {}

    def leases_of_batch(self, batch: BatchKey) -> list[RowLease]:
        """Return the leases of a dealt batch."""
        return [self.by_token[token] for token in self._of_batch.get(batch, ())]

    def leases_of_rank(self, task: str, dp_rank: int) -> list[RowLease]:
        """Return the leases of all dealt batches of a rank, the oldest first."""
        leases = self.by_token.values()
        return [lease for lease in leases if lease.batch is not None and lease.batch[:2] == (task, dp_rank)]

    def live_rows(self, lease: RowLease) -> np.ndarray:
        """Return the rows of a lease that are not cleared."""
        live: np.ndarray = lease.rows[self._rows.positions_of(lease.rows) >= 0]
        return live

    def add(self, lease: RowLease) -> None:
        """Add a lease."""
        self.by_token[lease.token] = lease
        if lease.batch is not None:
            self._of_batch.setdefault(lease.batch, {})[lease.token] = None

    def remove_rows(self, token: int, rows: np.ndarray) -> None:
        """Remove these rows from a lease. It ends with its last live row."""
        lease = self.by_token.get(token)
        if lease is not None:
            lease.rows = np.setdiff1d(self.live_rows(lease), rows, assume_unique=True)
            if not len(lease.rows):
                self.remove(token)

    def remove_consumed(self, batch: BatchKey, rows: np.ndarray) -> None:
        """Remove these rows, which are consumed, from all leases of a batch."""
        for lease in self.leases_of_batch(batch):
            self.remove_rows(lease.token, rows)

    def remove(self, token: int) -> None:
        """Remove a lease."""
        lease = self.by_token.pop(token, None)
        if lease is not None and lease.batch is not None:
            remove_member(self._of_batch, lease.batch, token)

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset. Its leases are fenced."""
        for token in [token for token, lease in self.by_token.items() if lease.task == task]:
            self.remove(token)
        self.delivered.forget(task)
        self.acked.forget(task)

    def clear_rows(self, key: int, at: np.ndarray) -> None:
        """Record that rows of a chunk are cleared."""
        self.delivered.clear_rows(key, at)
        self.acked.clear_rows(key, at)

    def derive(self) -> None:
        """Compute the lists of leases by batch."""
        for lease in self.by_token.values():
            if lease.batch is not None:
                self._of_batch.setdefault(lease.batch, {})[lease.token] = None


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

    def is_any_held(self, partition: str, keys: Iterable[str]) -> bool:
        """Return whether one of these keys is locked."""
        return any((partition, key) in self.of_key for key in keys)

    def locks_of(self, client: str) -> list[KeyLock]:
        """Return the locks of a client, in the order in which they were granted."""
        return [lock for lock in self.by_token.values() if lock.client == client]

    def holders(self) -> dict[str, None]:
        """Return the clients that have locks, that with the first lock first."""
        return dict.fromkeys(lock.client for lock in self.by_token.values())

    def add(self, lock: KeyLock) -> None:
        """Add a lock."""
        self.by_token[lock.token] = lock
        self._derive(lock)

    def remove(self, token: int) -> None:
        """Remove a lock."""
        lock = self.by_token.pop(token)
        for key in lock.keys:
            del self.of_key[lock.partition, key]

    def clear(self) -> None:
        """Remove all locks."""
        for token in list(self.by_token):
            self.remove(token)

    def shift(self, seconds: float) -> None:
        """Change the times of the locks by this number of seconds, from the former clock to the present one."""
        for token, lock in self.by_token.items():
            self.by_token[token] = msgspec.structs.replace(lock, since=lock.since + seconds)

    def derive(self) -> None:
        """Compute the locks by key."""
        for lock in self.by_token.values():
            self._derive(lock)

    def _derive(self, lock: KeyLock) -> None:
        self.of_key.update(((lock.partition, key), lock.token) for key in lock.keys)
