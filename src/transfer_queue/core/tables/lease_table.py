"""Leases of one partition: which rows a token stands for, and how often rows were delivered and not acknowledged.

A claim with a lease takes rows out of the ready sets as *claimed*. An ack of its token makes them consumed; where the
lease ends without one, they are delivered again: to anybody, or, of a batch that is kept, to who asks for that batch.
Tokens fence: they come from a counter of the state that never goes back, and what is not in a lease's rows any more
is none of its token's business. When a lease ends by time is the controller's (`core.claims.lease_deadlines`), and not
state.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, part, per_chunk, per_task, rows_of
from transfer_queue.core.tables.row_table import CHUNK, RowTable

BatchKey = tuple[str, int, int]  # task, dp_rank, batch_index
MOST = int(np.iinfo("u2").max)


class Counts(Persisted, bare=True):
    """A small number for each (task, row), 0 for most: columns of u2 for the chunks in which any is not."""

    _columns: dict[str, dict[int, np.ndarray]] = per_task(per_chunk("u2", CHUNK))

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def of(self, task: str, positions: np.ndarray) -> np.ndarray:
        """i8 [rows]; 0 where a position is -1."""
        out = np.zeros(len(positions), "i8")
        columns = self._columns.get(task)
        if columns:
            for key, _, at, where in self._rows.split(positions):
                if key in columns:
                    out[where] = columns[key][at]
        return out

    def add(self, task: str, positions: np.ndarray) -> None:
        """One more for each of these rows, up to the most that a column can say."""
        columns = self._columns.setdefault(task, {})
        for key, _, at, _ in self._rows.split(positions):
            if key not in columns:
                columns[key] = np.zeros(CHUNK, "u2")
            columns[key][at] = np.minimum(columns[key][at].astype("i8") + 1, MOST)

    def zero(self, task: str, positions: np.ndarray) -> None:
        """None for these rows."""
        for key, _, at, _ in self._rows.split(positions):
            self._zero(self._columns.get(task, {}), key, at)

    def cleared(self, key: int, at: np.ndarray) -> None:
        """Rows of a chunk end."""
        for columns in self._columns.values():
            self._zero(columns, key, at)

    @staticmethod
    def _zero(columns: dict[int, np.ndarray], key: int, at: np.ndarray) -> None:
        column = columns.get(key)
        if column is not None:
            column[at] = 0
            if not column.any():
                del columns[key]

    def forget(self, task: str) -> None:
        """The task's consumption is reset."""
        self._columns.pop(task, None)

    def columns(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """(task, chunk number, the number of each row)."""
        for task, columns in self._columns.items():
            for key, column in columns.items():
                yield task, key, column


class RowLease(msgspec.Struct, eq=False):
    """What one claim was given for `seconds` at a time.

    client: who claimed. rows: global indexes that are neither acknowledged nor given back, ascending. batch: the key
    of the kept batch that they belong to; None where they belong to nobody. replicas: acks by so many tokens make a
    row consumed. unit: the samples of a group that is acknowledged whole; 0 where rows are acknowledged one by one.
    """

    token: Count
    task: str
    client: str
    rows: np.ndarray
    seconds: float
    batch: BatchKey | None
    replicas: Count
    unit: Count


class LeaseTable(Persisted):
    """by_token: those that are in force. delivered: (task, row) -> deliveries that ended without an ack.

    acked: (task, row) -> acks so far of a row that waits for more of them.
    """

    by_token: dict[int, RowLease] = rows_of(RowLease, key="leases", array="rows", by="token")
    delivered: Counts = part(Counts)
    acked: Counts = part(Counts)

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self.delivered = Counts(rows)
        self.acked = Counts(rows)
        self._rows = rows
        self._of_batch: dict[BatchKey, dict[int, None]] = {}

    def of_batch(self, batch: BatchKey) -> list[RowLease]:
        """The leases of a kept batch."""
        return [self.by_token[token] for token in self._of_batch.get(batch, ())]

    def of_rank(self, task: str, dp_rank: int) -> list[RowLease]:
        """The leases of all kept batches of a rank, the oldest first."""
        leases = self.by_token.values()
        return [lease for lease in leases if lease.batch is not None and lease.batch[:2] == (task, dp_rank)]

    def living(self, lease: RowLease) -> np.ndarray:
        """The rows of a lease that are not cleared."""
        live: np.ndarray = lease.rows[self._rows.positions_of(lease.rows) >= 0]
        return live

    def add(self, lease: RowLease) -> None:
        """A lease begins."""
        self.by_token[lease.token] = lease
        if lease.batch is not None:
            self._of_batch.setdefault(lease.batch, {})[lease.token] = None

    def leave(self, token: int, rows: np.ndarray) -> None:
        """These rows are no more the lease's; it ends with its last live one."""
        lease = self.by_token.get(token)
        if lease is not None:
            lease.rows = np.setdiff1d(self.living(lease), rows, assume_unique=True)
            if not len(lease.rows):
                self.end(token)

    def through(self, batch: BatchKey, rows: np.ndarray) -> None:
        """No lease of this batch has these rows any more: they are consumed."""
        for lease in self.of_batch(batch):
            self.leave(lease.token, rows)

    def end(self, token: int) -> None:
        """A lease ends."""
        lease = self.by_token.pop(token, None)
        if lease is not None and lease.batch is not None:
            others = self._of_batch[lease.batch]
            del others[token]
            if not others:
                del self._of_batch[lease.batch]

    def forget(self, task: str) -> None:
        """The task's consumption is reset: its leases are fenced."""
        for token in [token for token, lease in self.by_token.items() if lease.task == task]:
            self.end(token)
        self.delivered.forget(task)
        self.acked.forget(task)

    def cleared(self, key: int, at: np.ndarray) -> None:
        """Rows of a chunk end."""
        self.delivered.cleared(key, at)
        self.acked.cleared(key, at)

    def restored(self) -> None:
        """Makes the lists of leases by batch."""
        for lease in self.by_token.values():
            if lease.batch is not None:
                self._of_batch.setdefault(lease.batch, {})[lease.token] = None
