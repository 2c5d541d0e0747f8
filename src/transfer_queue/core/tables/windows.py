"""Which rows of a partition count for its limits, and which ones are still referred to.

- The window of admission: the rows that count for the limit of staleness, which `core.puts.limits` defines.
- The log of retention: when rows were added, and why rows were dropped, in bounded memory.
- The references of `free_when`: which clients refer to which rows, and how often each task has finished them.

A client that got rows for a task refers to them until it asks for the next batch of that (task, dp_rank), calls
`finish`, or is gone. The controller clears a row when no client refers to it and every task of `free_when` has finished
it as often as it has rank replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container

import numpy as np

from transfer_queue.core.columns.kinds import Joined, join_columns, split_columns
from transfer_queue.core.columns.schema import Count, Persisted, counter, deque_of, map_of, several
from transfer_queue.core.tables.dealt import SkippedRows
from transfer_queue.core.tables.rows import CHUNK_BITS, CONSUMED, Chunk, RowTable, rows_without
from transfer_queue.messages.descriptors import PartitionOptions


class AdmissionWindow(Persisted, bare=True):
    """The rows that count: those that are not finished, and those that were finished since the version was set."""

    finished: int = counter()
    """The number of rows that were finished since the policy version was set, cleared ones included."""

    def __init__(self, rows: RowTable, skipped: SkippedRows, options: PartitionOptions) -> None:
        super().__init__()
        self._rows = rows
        self._skipped = skipped
        self.limit: int | None = None
        """The number of rows that may count; None for no limit."""
        if options.max_staleness is not None and options.rows_per_version is not None:
            self.limit = (options.max_staleness + 1) * options.rows_per_version
        self._named = [options.trained_by] if options.trained_by else options.free_when
        self.tasks: list[str] = list(self._named)
        """The tasks that must have consumed a row, so that it is finished. Derived."""
        self.unfinished = 0
        """The number of live rows that are not finished, and that no task has skipped. 0 without a limit. Derived."""

    @property
    def counted(self) -> int:
        """The number of rows that count."""
        return self.unfinished + self.finished

    def add_task(self, tasks: Collection[str]) -> None:
        """Record that these tasks have had rows of the partition."""
        if self.limit is not None and not self._named:
            self.change_tasks(self.finished_rows(), tasks)

    def remove(self, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that these rows of a chunk are about to be cleared, dropped or skipped. They do not count any more.

        Rows that are finished already count as before.
        """
        if self.limit is not None:
            self.unfinished -= self._count(key, chunk, at)

    def consume(self, task: str, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that a task is about to consume these rows of a chunk."""
        if self.limit is None or task not in self.tasks:
            return
        others = [name for name in self.tasks if name != task]
        last = at[_consumed_by(others, chunk, at)] if others else at
        count = self._count(key, chunk, last)
        self.unfinished -= count
        self.finished += count

    def take_back(self, task: str, key: int, chunk: Chunk, at: np.ndarray, is_current: bool) -> None:
        """Record that rows of a chunk are about to be ready again. is_current: they were dealt at this version."""
        if self.limit is None or task not in self.tasks:
            return
        count = int(np.count_nonzero(self._classify(key, chunk, at)[1]))
        self.unfinished += count
        self.finished -= count if is_current else 0

    def finished_rows(self) -> dict[int, np.ndarray]:
        """Return chunk number -> which of its live rows are finished, bool [rows]; nothing without a limit."""
        if self.limit is None:
            return {}
        return {key: self._classify(key, chunk, np.arange(chunk.size))[1] for key, chunk in self._rows.chunks.items()}

    def change_tasks(self, before: dict[int, np.ndarray], tasks: Collection[str]) -> None:
        """Record that the consumption of a task was reset, or that a task had its first rows, if none is named.

        Rows that are not finished any more are taken from those that were finished since the version was set. Rows
        that the other tasks alone have finished are added to these.

        before: The result of `finished_rows` before. tasks: See `recount`.
        """
        self.recount(tasks)
        for key, done in self.finished_rows().items():
            self.finished -= min(self.finished, int(np.count_nonzero(before[key] & ~done)))
            self.finished += int(np.count_nonzero(done & ~before[key]))

    def recount(self, tasks: Collection[str]) -> None:
        """Count the rows that are not finished. tasks: those that have had rows of the partition."""
        if self.limit is not None:
            self.tasks = list(self._named or tasks)
            self.unfinished = self.count_unfinished()

    def count_unfinished(self) -> int:
        """Return the number of live rows that are not finished, and that no task has skipped."""
        return sum(self._count(key, chunk, np.arange(chunk.size)) for key, chunk in self._rows.chunks.items())

    def _count(self, key: int, chunk: Chunk, at: np.ndarray) -> int:
        return int(np.count_nonzero(self._classify(key, chunk, at)[0]))

    def _classify(self, key: int, chunk: Chunk, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of these rows of a chunk are not finished, and which are finished, bool [rows].

        Rows that are cleared, not taken or skipped are neither.
        """
        skipped = self._skipped.codes.any_of(at + (key << CHUNK_BITS))
        taken = (chunk.alive[at] == 1) & (chunk.waiting[at] == 0) & ~skipped
        done = _consumed_by(self.tasks, chunk, at) & bool(self.tasks)
        return taken & ~done, taken & done


def _consumed_by(tasks: Collection[str], chunk: Chunk, at: np.ndarray) -> np.ndarray:
    """Return which of these rows all the tasks have consumed, bool [rows]."""
    done = np.ones(len(at), bool)
    for task in tasks:
        column = chunk.consumed.get(task)
        if column is None:
            return np.zeros(len(at), bool)
        done &= column[at] == CONSUMED
    return done


MARKS = 64  # the age of a row is known to 1/MARKS of `keep_seconds`


class RowAges(Persisted):
    """The approximate age of the rows of one partition. `keep`: seconds that rows are kept, None if without limit."""

    marks: deque[tuple[float, float, int]] = deque_of(float, float, Count)
    """(began, time, end): all positions below `end` existed by `time`. The oldest mark is first."""
    end: int = counter()
    """`end` of the newest mark."""

    def __init__(self, keep: float | None) -> None:
        super().__init__()
        self.step = (keep or 0.0) / MARKS

    def add(self, time: float, end: int, start: int) -> None:
        """Record that all rows below position `end` exist at this time, and that those below `start` are gone."""
        began = time
        if self.marks and time - self.marks[-1][0] < self.step:
            began = self.marks.pop()[0]
        self.marks.append((began, time, end))
        self.end = end
        while self.marks[0][2] <= start and len(self.marks) > 1:
            self.marks.popleft()

    def first_time(self, start: int) -> float | None:
        """Return the time by which the first row from position `start` on existed; None if there is no such row."""
        return next((time for _, time, end in self.marks if end > start), None)

    def expired_end(self, now: float, keep: float) -> int:
        """Return the position below which all rows are at least `keep` seconds old, 0 if none is.

        The sum is the one that computes the deadline. `at <= now - keep` could be rounded the other way, and then the
        deadline would pass without a row that is dropped.
        """
        return max((end for _, at, end in self.marks if at + keep <= now), default=0)

    def shift(self, seconds: float) -> None:
        """Move all times by this number of seconds, to another clock."""
        self.marks = deque((began + seconds, time + seconds, end) for began, time, end in self.marks)


REMEMBERED = 1 << 16  # dropped rows whose reason is remembered


class DropLog(Persisted):
    """Why rows of one partition were dropped."""

    rows: dict[str, int] = map_of(str, Count)
    """Reason -> number of dropped rows."""
    latest: deque[tuple[np.ndarray, str]] = several(
        {"latest": Joined, "reasons": list[str]},
        deque,
        save=lambda latest: (join_columns(rows for rows, _ in latest), [reason for _, reason in latest]),
        load=lambda rows, reasons: deque(zip(split_columns(rows), reasons, strict=True)),
    )
    """(global indexes, reason) of the latest drops, the newest last."""

    def __init__(self) -> None:
        super().__init__()
        self._remembered = 0

    def add(self, rows: np.ndarray, reason: str) -> None:
        """Record that these rows (global indexes) are dropped."""
        self.rows[reason] = self.rows.get(reason, 0) + len(rows)
        self.latest.append((rows, reason))
        self._remembered += len(rows)
        while self._remembered > REMEMBERED and len(self.latest) > 1:
            self._remembered -= len(self.latest.popleft()[0])

    def reason(self, row: int) -> str | None:
        """Return why this row was dropped; None if it was not, or not recently."""
        return next((reason for rows, reason in self.latest if row in rows), None)

    def derive(self) -> None:
        """Count the rows that are remembered."""
        self._remembered = sum(len(rows) for rows, _ in self.latest)


Holder = tuple[str, str, int]  # task, client, dp_rank


class RowRefcounts(Persisted):
    """The references of clients to rows of one partition."""

    by_holder: dict[Holder, np.ndarray] = several(
        {"holders": list[Holder], "rows": Joined},
        dict,
        save=lambda held: ([list(holder) for holder in held], join_columns(held.values())),
        load=lambda holders, rows: dict(zip(holders, split_columns(rows), strict=True)),
    )
    """(task, client, dp_rank) -> the global indexes that the client refers to, ascending."""

    def __init__(self, rows: RowTable, tasks: list[str], replicas: int) -> None:
        super().__init__()
        self.rows = rows
        self.tasks = tasks
        """The tasks of `free_when`; empty if rows are cleared by hand."""
        self.replicas = replicas
        """The number of times that each task must finish a row."""

    def rows_of(self, task: str, client: str, dp_rank: int) -> np.ndarray:
        """Return the rows that this client refers to for a rank."""
        return self.by_holder.get((task, client, dp_rank), np.zeros(0, "i8"))

    def references_of(self, client: str) -> list[tuple[str, np.ndarray]]:
        """Return (task, rows) of all references of a client."""
        return [(holder[0], rows) for holder, rows in self.by_holder.items() if holder[1] == client]

    def held_among(self, task: str, client: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return those of these rows that the client refers to for the task, ascending, and for how many ranks each."""
        held = [held_rows for holder, held_rows in self.by_holder.items() if holder[:2] == (task, client)]
        if len(rows) == 1:  # for a few rows numpy is slow
            row = rows[0]
            count = sum(held_rows[0] == row if len(held_rows) == 1 else row in held_rows for held_rows in held)
            return (rows, np.array([count])) if count else (rows[:0], np.zeros(0, "i8"))
        distinct, times = np.unique(np.concatenate([np.zeros(0, "i8"), *held]), return_counts=True)
        is_listed = np.isin(distinct, rows)
        return distinct[is_listed], times[is_listed]

    def add(self, task: str, client: str, dp_rank: int, rows: np.ndarray) -> None:
        """Record that a client got rows that it does not refer to yet."""
        before = self.rows_of(task, client, dp_rank)
        if len(before):
            before = before[self.rows.positions_of(before) >= 0]
        positions = self.rows.positions_of(rows)
        if len(rows) > 1:
            rows, positions = np.sort(rows), np.sort(positions)
        if len(before):
            rows = np.concatenate((before, rows)) if before[-1] < rows[0] else np.union1d(before, rows)
        self.by_holder[task, client, dp_rank] = rows
        for _, chunk, at, _ in self.rows.split(positions):
            chunk.held_columns(task)[0][at] += 1

    def finish(self, task: str, client: str, rows: np.ndarray) -> None:
        """Record that a client has finished these rows. Rows that it does not refer to are ignored."""
        self._release([holder for holder in self.by_holder if holder[:2] == (task, client)], rows, 1)

    def drop(self, task: str, rows: np.ndarray) -> None:
        """Record that no client refers to these rows for the task any more, although none has finished them."""
        self._release([holder for holder in self.by_holder if holder[0] == task], rows, 0)

    def _release(self, holders: list[Holder], rows: np.ndarray, times: int) -> None:
        """Remove references to these rows, each of which counts as finished `times` more times."""
        for holder in holders:
            held_rows = self.by_holder[holder]
            if len(rows) == 1:  # for a few rows numpy is slow
                released = held_rows[held_rows == rows]
            else:
                released = np.intersect1d(held_rows, rows)
            if not len(released):
                continue
            if len(released) < len(held_rows):
                self.by_holder[holder] = rows_without(held_rows, released)
            else:
                del self.by_holder[holder]
            for _, chunk, at, _ in self.rows.split(self.rows.live_positions_of(released)):
                held, finished = chunk.held_columns(holder[0])
                held[at] -= 1
                finished[at] += times

    def find_disconnected(self, task: str, dp_rank: int, connected: Container[str]) -> str | None:
        """Return a client that refers to rows for this rank and is not connected, as after a state was loaded."""
        holders = (holder for holder in self.by_holder if holder[0] == task and holder[2] == dp_rank)
        return next((client for _, client, _ in holders if client not in connected), None)

    def transfer(self, task: str, client: str, dp_rank: int, heir: str) -> None:
        """Transfer the references of a client for this rank to another client, which has none for it."""
        self.by_holder[task, heir, dp_rank] = self.by_holder.pop((task, client, dp_rank))

    def skip(self, task: str, positions: np.ndarray) -> None:
        """Record that the task will never be dealt these rows, and so does not need them."""
        if task not in self.tasks:
            return
        for _, chunk, at, _ in self.rows.split(positions):
            chunk.held_columns(task)[1][at] = self.replicas

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset."""
        for holder in [holder for holder in self.by_holder if holder[0] == task]:
            del self.by_holder[holder]
        for chunk in self.rows.chunks.values():
            chunk.held.pop(task, None)
            chunk.finished.pop(task, None)

    def finished_rows(
        self, positions: np.ndarray, task: str = "", times: np.ndarray | None = None, skips: bool = False
    ) -> np.ndarray:
        """Return which rows may be freed, bool [rows].

        They may be after `task` has finished each of them `times` more times, or skips them.
        """
        out = np.full(len(positions), task in self.tasks if skips else bool(self.tasks))
        for _, chunk, at, where in self.rows.split(positions):
            for name in self.tasks:
                is_skipped = skips and name == task
                if name not in chunk.held:
                    out[where] &= is_skipped
                    continue
                more = times[where] if times is not None and name == task else 0
                enough = is_skipped or chunk.finished[name][at] + more >= self.replicas
                out[where] &= (chunk.held[name][at] == more) & enough
        return out
