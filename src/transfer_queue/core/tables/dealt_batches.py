"""Dealt batches of one task in one partition: what a rank was given, to be given again to whoever asks alike."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from transfer_queue.core.columns.intervals import IntervalSet
from transfer_queue.core.columns.schema import (
    Count,
    Persisted,
    counter,
    map_of,
    part,
    parts_of,
    rows_of,
    set_of,
)


class DealtBatch(msgspec.Struct, eq=False):
    """rows: global indexes in the order dealt. live: how many of them are not cleared."""

    number: Count
    dp_rank: int
    batch_index: int
    batch_size: int
    live: Count
    rows: np.ndarray


class DealtBatches(Persisted):
    """by_key: (dp_rank, batch_index) -> number. batches: number -> batch, until its rows are cleared.

    issued: dp_rank -> the batch indexes ever dealt, whether or not their rows still live; counts: how many these are;
    sizes: the batch_size of the last. rounds: the batch indexes that any rank was dealt; round_count: how many.
    left: ranks that were declared gone, and were dealt nothing since.
    """

    batches: dict[int, DealtBatch] = rows_of(DealtBatch, key="batches", array="rows", by="number")
    issued: dict[int, IntervalSet] = parts_of(int, IntervalSet)
    counts: dict[int, int] = map_of(int, Count)
    sizes: dict[int, int] = map_of(int, int)
    rounds: IntervalSet = part(IntervalSet)
    round_count: int = counter()
    left: set[int] = set_of(int)
    next_number: int = counter(1)

    def __init__(self) -> None:
        super().__init__()
        self.rounds = IntervalSet()
        self.by_key: dict[tuple[int, int], int] = {}

    def add(self, dp_rank: int, batch_index: int, batch_size: int, rows: np.ndarray) -> int:
        """Keeps a batch; gives its number."""
        number = self.next_number
        self.next_number += 1
        self.left.discard(dp_rank)
        self.issued.setdefault(dp_rank, IntervalSet()).add(batch_index)
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
        """The batch dealt under this key, while any of its rows lives."""
        number = self.by_key.get((dp_rank, batch_index))
        return None if number is None else self.batches[number]

    def was(self, dp_rank: int, batch_index: int) -> bool:
        """Whether a batch was ever dealt under this key."""
        issued = self.issued.get(dp_rank)
        return issued is not None and batch_index in issued

    def gone(self, dp_rank: int, batch_index: int) -> bool:
        """Whether a batch was dealt under this key and is not kept any more: its rows are cleared, or its rank gone."""
        return (dp_rank, batch_index) not in self.by_key and self.was(dp_rank, batch_index)

    def lacks(self, dp_rank: int) -> Iterator[int]:
        """The rounds that others were dealt and this rank was not, ascending."""
        return self.rounds.without(self.issued.get(dp_rank))

    def cleared(self, number: int, count: int) -> None:
        """`count` rows of a batch were cleared; it goes with its last."""
        batch = self.batches[number]
        batch.live -= count
        if not batch.live:
            del self.batches[number]
            del self.by_key[batch.dp_rank, batch.batch_index]

    def restored(self) -> None:
        """Makes `by_key`, which follows from the batches."""
        self.by_key = {(batch.dp_rank, batch.batch_index): number for number, batch in self.batches.items()}
