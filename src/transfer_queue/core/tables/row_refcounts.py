"""Which clients refer to which rows of a partition with `free_when`, and how often each task has finished them.

A client that got rows for a task refers to them until it asks for the next batch of that (task, dp_rank), calls
`finish`, or is gone. The controller clears a row when no client refers to it and every task of `free_when` has finished
it as often as it has rank replicas.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from transfer_queue.core.columns.joined_columns import Joined, join_columns, split_columns
from transfer_queue.core.columns.schema import Persisted, several
from transfer_queue.core.tables.row_table import RowTable, rows_without

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
        held = [mine for holder, mine in self.by_holder.items() if holder[:2] == (task, client)]
        if len(rows) == 1:  # for a few rows numpy is slow
            row = rows[0]
            count = sum(mine[0] == row if len(mine) == 1 else row in mine for mine in held)
            return (rows, np.array([count])) if count else (rows[:0], np.zeros(0, "i8"))
        found, times = np.unique(np.concatenate([np.zeros(0, "i8"), *held]), return_counts=True)
        asked = np.isin(found, rows)
        return found[asked], times[asked]

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
                mine = held_rows[held_rows == rows]
            else:
                mine = np.intersect1d(held_rows, rows)
            if not len(mine):
                continue
            if len(mine) < len(held_rows):
                self.by_holder[holder] = rows_without(held_rows, mine)
            else:
                del self.by_holder[holder]
            for _, chunk, at, _ in self.rows.split(self.rows.live_positions_of(mine)):
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

    def finished_rows(self, positions: np.ndarray, task: str = "", times: np.ndarray | None = None) -> np.ndarray:
        """Return which rows may be freed, bool [rows]: after `task` has finished each of them `times` more times."""
        out = np.full(len(positions), bool(self.tasks))
        for _, chunk, at, where in self.rows.split(positions):
            for name in self.tasks:
                if name not in chunk.held:
                    out[where] = False
                    continue
                more = times[where] if times is not None and name == task else 0
                out[where] &= (chunk.held[name][at] == more) & (chunk.finished[name][at] + more >= self.replicas)
        return out

    def finished_without(self, positions: np.ndarray, task: str) -> np.ndarray:
        """Return which rows may be freed after `task` skips them, bool [rows]."""
        out = np.full(len(positions), task in self.tasks)
        for _, chunk, at, where in self.rows.split(positions):
            for name in self.tasks:
                if name in chunk.held:
                    enough = chunk.finished[name][at] >= self.replicas if name != task else True
                    out[where] &= (chunk.held[name][at] == 0) & enough
                elif name != task:
                    out[where] = False
        return out
