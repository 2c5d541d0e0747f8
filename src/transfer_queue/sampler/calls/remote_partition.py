"""A partition and its ready rows for a user's sampler in a process of its own.

A call contains the first ready rows. The sampler process requests further rows, tags and groups when the sampler reads
them. The controller replies from its state at that time, and also checks the result of the sampler against it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from transfer_queue.sampler.calls.call_messages import Question, Shown, ViewReply
from transfer_queue.sampler.calls.sampler_calls import NotTheSamplers
from transfer_queue.sampler.numeric_tags import PartitionTags
from transfer_queue.sampler.ready_views import ListedRows, RankKey

PAGE = 8192  # rows in one message
FIRST_GROUPS = 256  # groups in the first request; each further one has 8 times as many


Asks = Callable[[Question], ViewReply]


class RowsChanged(NotTheSamplers):
    """Rows that the sampler was offered are not ready any more, so its call is repeated."""


class RemotePartition(PartitionTags):
    """The `partition` argument of a sampler. values: decodes a value of a message to the value that was put."""

    def __init__(self, shown: Shown, asks: Asks, values: Callable[[Any], Any]) -> None:
        self.partition_id = shown.partition
        self.group_size = shown.group_size
        self.policy_version = shown.policy_version
        self._asks = asks
        self._values = values

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """See `PartitionTags`."""
        wanted = np.asarray(indexes, "i8")
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(wanted), PAGE):
            reply = self._asks(Question("tags", wanted[start : start + PAGE].tobytes()))
            found.update((row, self._values(tag)) for row, tag in reply.tags.items())
        return found

    def entries_of(self, rows: np.ndarray, name: str) -> list[Any]:
        """See `PartitionTags`."""
        found = self.get_custom_meta(rows.tolist())
        return [found.get(row, {}).get(name) for row in rows.tolist()]


class RemoteReady(Sequence[int]):
    """The ready rows, ascending, which are read in pages."""

    def __init__(self, shown: Shown, asks: Asks, partition: RemotePartition) -> None:
        self._total = shown.total
        self._pages = [np.frombuffer(shown.rows, "<i8")]
        self._known = len(self._pages[0])
        self._after = shown.after
        self._asks = asks
        self._partition = partition

    def __len__(self) -> int:
        return self._total

    def _read(self, count: int) -> np.ndarray:
        """Return the first `count` rows."""
        while self._known < count:
            if self._after < 0:
                raise RowsChanged
            reply = self._asks(Question("rows", after=self._after))
            self._after = reply.after
            self._pages.append(np.frombuffer(reply.rows, "<i8")[: self._total - self._known])
            self._known += len(self._pages[-1])
        if len(self._pages) > 1:
            self._pages = [np.concatenate(self._pages)]
        return self._pages[0][:count]

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._total)
            if step < 0 or start >= stop:
                return self._read(self._total)[at].tolist()  # type: ignore[no-any-return]
            return self._read(stop)[start:stop:step].tolist()  # type: ignore[no-any-return]
        place = at + self._total if at < 0 else at
        if not 0 <= place < self._total:
            raise IndexError(f"ready row {at} of {self._total}")
        return int(self._read(place + 1)[place])

    def __iter__(self) -> Iterator[int]:
        done = 0
        while done < self._total:
            rows = self._read(max(done + 1, min(self._known, self._total)))
            yield from rows[done:].tolist()
            done = len(rows)

    def __contains__(self, row: object) -> bool:
        rows = self._read(self._total)
        at = bisect_left(rows, row) if isinstance(row, int) else len(rows)
        return at < len(rows) and bool(rows[at] == row)

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """See `sampler.base.ReadyIndexes`."""
        seen: set[int] = set()
        count = FIRST_GROUPS
        while True:
            reply = self._asks(Question("groups", count=count, size=size))
            groups = np.frombuffer(reply.rows, "<i8").reshape(-1, size).tolist()
            for group in groups:
                if group[0] not in seen:
                    seen.add(group[0])
                    yield group
            if len(groups) < count:
                return
            count *= 8

    def ranked(self, key: RankKey) -> Iterator[int]:
        """See `ready_views.TaggedIndexes`."""
        return ListedRows(self, self._partition).ranked(key)

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """See `ready_views.TaggedIndexes`."""
        return ListedRows(self, self._partition).ranked_groups(key, size)

    def above(self, key: RankKey, bound: float) -> list[int]:
        """See `ready_views.TaggedIndexes`."""
        return ListedRows(self, self._partition).above(key, bound)

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """See `ready_views.TaggedIndexes`."""
        return self._ask_rows(
            Question("spoiled", size=size, key=(key.tag, key.sign, key.missing, key.aging), bound=bound)
        )

    def orphans(self, size: int) -> list[int]:
        """See `ready_views.TaggedIndexes`."""
        return self._ask_rows(Question("orphans", size=size))

    def _ask_rows(self, question: Question) -> list[int]:
        return np.frombuffer(self._asks(question).rows, "<i8").tolist()  # type: ignore[no-any-return]
