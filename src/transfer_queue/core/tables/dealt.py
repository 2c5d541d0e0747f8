"""What one task was dealt as a batch, and which rows it will never be dealt.

A dealt batch is returned again to every process that asks for its key. A row that the task skips counts as finished:
the table says how many there are, which ones, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from transfer_queue.core.columns.kinds import IntervalSet, rows_of
from transfer_queue.core.columns.schema import (
    Count,
    Persisted,
    counter,
    linked_part,
    list_of,
    map_of,
    map_of_tuples,
    part,
    parts_of,
    set_of,
)
from transfer_queue.core.tables.leases import RowNumbers
from transfer_queue.core.tables.rows import CHUNK_BITS, MASK, RowTable
from transfer_queue.messages.reports.progress import describe_held


class SkippedRows(Persisted):
    """The skipped rows of the tasks of one partition."""

    counts: dict[tuple[str, str], int] = map_of_tuples((str, str), Count)
    """(task, reason) -> rows skipped so far, cleared ones included, until the task's consumption is reset."""
    _reasons: list[str] = list_of(str)
    codes: RowNumbers = linked_part(RowNumbers)
    """(task, live row) -> 1 + the number of the reason, 0 if the row was not skipped."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self.codes = RowNumbers(rows)

    def add(self, task: str, positions: np.ndarray, reason: str) -> None:
        """Record that the task skips these rows."""
        self.counts[task, reason] = self.counts.get((task, reason), 0) + len(positions)
        if reason not in self._reasons:
            self._reasons.append(reason)
        self.codes.set(task, positions, 1 + self._reasons.index(reason))

    def reason(self, task: str, position: int) -> str | None:
        """Return why the task skipped a row; None if it did not."""
        column = self.codes.column_of(task, position >> CHUNK_BITS)
        code = 0 if column is None else int(column[position & MASK])
        return self._reasons[code - 1] if code else None

    @property
    def reason_count(self) -> int:
        """The number of different reasons."""
        return len(self._reasons)

    def rows_of(self, task: str) -> dict[str, np.ndarray]:
        """Return reason -> positions of the live rows that the task skipped, ascending."""
        columns = [(key, column) for name, key, column in self.codes.columns() if name == task]
        rows_by_reason: dict[str, list[np.ndarray]] = {}
        for key, column in sorted(columns, key=lambda each: each[0]):
            for code in np.unique(column[column > 0]).tolist():
                rows_by_reason.setdefault(self._reasons[code - 1], []).append(
                    np.flatnonzero(column == code) + (key << CHUNK_BITS)
                )
        return {reason: np.concatenate(parts) for reason, parts in rows_by_reason.items()}

    def counts_of(self, task: str) -> dict[str, int]:
        """Return reason -> number of rows that the task skipped."""
        return {reason: count for (name, reason), count in self.counts.items() if name == task}

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset."""
        self.codes.forget(task)
        self.counts = {key: count for key, count in self.counts.items() if key[0] != task}


class DealtBatch(msgspec.Struct, eq=False):
    """The samples of one (dp_rank, batch_index)."""

    number: Count
    dp_rank: int
    batch_index: int
    batch_size: int
    """The requested batch size."""
    live: Count
    """The number of rows that are not cleared."""
    rows: np.ndarray
    """Global indexes in the order in which they were dealt."""


class DealtBatches(Persisted):
    """Every dealt batch of which a row is left, and the batch indexes that were ever dealt."""

    batches: dict[int, DealtBatch] = rows_of(DealtBatch, key="batches", array="rows", by="number")
    """Number -> batch, until all its rows are cleared."""
    issued: dict[int, IntervalSet] = parts_of(int, IntervalSet)
    """dp_rank -> the batch indexes that were ever dealt to it, whether or not their rows still live."""
    counts: dict[int, int] = map_of(int, Count)
    """dp_rank -> how many these are."""
    sizes: dict[int, int] = map_of(int, int)
    """dp_rank -> the batch_size of its last batch."""
    rounds: IntervalSet = part(IntervalSet)
    """The batch indexes that were dealt to any rank."""
    round_count: int = counter()
    """How many these are."""
    left: set[int] = set_of(int)
    """The ranks that were declared gone and were not dealt anything since."""
    unasked: set[int] = set_of(int, missing=[])
    """The ranks that were dealt batches of rounds and have never asked for one."""
    next_number: int = counter(1)

    def __init__(self) -> None:
        super().__init__()
        self.by_key: dict[tuple[int, int], int] = {}
        """(dp_rank, batch_index) -> number. Derived."""

    def add(self, dp_rank: int, batch_index: int, batch_size: int, rows: np.ndarray) -> int:
        """Keep a batch and return its number."""
        number = self.next_number
        self.next_number += 1
        self.left.discard(dp_rank)
        issued = self.issued[dp_rank] = self.issued.get(dp_rank) or IntervalSet()
        issued.add(batch_index)
        self.counts[dp_rank] = self.counts.get(dp_rank, 0) + 1
        self.sizes[dp_rank] = batch_size
        if batch_index not in self.rounds:
            self.round_count += 1
            self.rounds.add(batch_index)
        if len(rows):
            self.by_key[dp_rank, batch_index] = number
            self.batches[number] = DealtBatch(number, dp_rank, batch_index, batch_size, len(rows), rows)
        return number

    def find(self, dp_rank: int, batch_index: int) -> DealtBatch | None:
        """Return the batch that was dealt under this key, while any of its rows lives; otherwise None."""
        number = self.by_key.get((dp_rank, batch_index))
        return None if number is None else self.batches[number]

    def was_dealt(self, dp_rank: int, batch_index: int) -> bool:
        """Return whether a batch was ever dealt under this key."""
        issued = self.issued.get(dp_rank)
        return issued is not None and batch_index in issued

    def is_removed(self, dp_rank: int, batch_index: int) -> bool:
        """Return whether a batch was dealt under this key and is gone: its rows are cleared, or its rank is gone."""
        return (dp_rank, batch_index) not in self.by_key and self.was_dealt(dp_rank, batch_index)

    def held_for_unasked(self) -> dict[int, int]:
        """Return the number of live rows in the batches of each rank that has never asked, if there are any."""
        if not self.unasked:
            return {}
        held: Counter[int] = Counter()
        for batch in self.batches.values():
            if batch.dp_rank in self.unasked:
                held[batch.dp_rank] += batch.live
        return dict(sorted(held.items()))

    def describe_held(self, task: str) -> str:
        """Return a clause about the rows that are held for ranks that have never asked; "" if there are none."""
        return describe_held(task, self.held_for_unasked(), self.rank_count)

    @property
    def rank_count(self) -> int:
        """The number of ranks that were dealt batches and have asked for one."""
        return len(self.issued.keys() - self.unasked - self.left)

    def missing_rounds(self, dp_rank: int) -> Iterator[int]:
        """Iterate over the rounds that were dealt to other ranks and not to this one, ascending."""
        return self.rounds.difference(self.issued.get(dp_rank))

    def remove_rows(self, number: int, count: int) -> None:
        """Record that `count` rows of a batch were cleared. The batch is removed with its last row."""
        batch = self.batches[number]
        batch.live -= count
        if not batch.live:
            del self.batches[number]
            del self.by_key[batch.dp_rank, batch.batch_index]

    def derive(self) -> None:
        """Compute `by_key` from the batches."""
        self.by_key = {(batch.dp_rank, batch.batch_index): number for number, batch in self.batches.items()}
