"""Who holds which rows of a partition with `free_when`, and how often each task has finished them.

A client that was given rows for a task holds them until it asks for the next batch of that (task, dp_rank), says
`finish`, or has gone. A row that every named task has finished, as often as it has replicas, and that nobody holds
is done: the controller clears it.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from transfer_queue.core.columns.schema import Joined, Persisted, join_columns, several, split_columns
from transfer_queue.core.tables.row_table import RowTable

Holder = tuple[str, str, int]  # task, client, dp_rank


class RowRefcounts(Persisted):
    """tasks: those of `free_when`, none where rows are cleared by hand. by_holder: global indexes held, ascending."""

    by_holder: dict[Holder, np.ndarray] = several(
        {"holders": list[Holder], "rows": Joined},
        dict,
        save=lambda held: ([list(holder) for holder in held], join_columns(held.values())),
        load=lambda holders, rows: dict(zip(holders, split_columns(rows), strict=True)),
    )

    def __init__(self, rows: RowTable, tasks: list[str], replicas: int) -> None:
        super().__init__()
        self.rows = rows
        self.tasks = tasks
        self.replicas = replicas

    def of(self, task: str, client: str, dp_rank: int) -> np.ndarray:
        """The rows that this client holds for a rank."""
        return self.by_holder.get((task, client, dp_rank), np.zeros(0, "i8"))

    def of_client(self, client: str) -> list[tuple[str, np.ndarray]]:
        """(task, rows) of all that a client holds."""
        return [(holder[0], rows) for holder, rows in self.by_holder.items() if holder[1] == client]

    def held_by(self, task: str, client: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of these rows that the client holds for the task, ascending, and for how many ranks each."""
        held = [mine for holder, mine in self.by_holder.items() if holder[:2] == (task, client)]
        found, times = np.unique(np.concatenate([np.zeros(0, "i8"), *held]), return_counts=True)
        asked = np.isin(found, rows)
        return found[asked], times[asked]

    def hand(self, task: str, client: str, dp_rank: int, rows: np.ndarray) -> None:
        """A client is given rows that it does not hold yet."""
        before = self.of(task, client, dp_rank)
        before = before[self.rows.positions_of(before) >= 0]
        self.by_holder[task, client, dp_rank] = np.union1d(before, rows)
        for _, chunk, at, _ in self.rows.split(np.sort(self.rows.positions_of(rows))):
            chunk.held_columns(task)[0][at] += 1

    def finish(self, task: str, client: str, rows: np.ndarray) -> None:
        """A client is through with those of these rows that it holds."""
        for holder in [holder for holder in self.by_holder if holder[:2] == (task, client)]:
            mine = np.intersect1d(self.by_holder[holder], rows)
            if not len(mine):
                continue
            left = np.setdiff1d(self.by_holder[holder], mine)
            if len(left):
                self.by_holder[holder] = left
            else:
                del self.by_holder[holder]
            positions = self.rows.positions_of(mine)
            for _, chunk, at, _ in self.rows.split(positions[positions >= 0]):
                held, finished = chunk.held_columns(task)
                held[at] -= 1
                finished[at] += 1

    def left_by(self, task: str, dp_rank: int, connected: Container[str]) -> str | None:
        """A client that holds rows for this rank and is not there any more; such are those of a loaded state."""
        holders = (holder for holder in self.by_holder if holder[0] == task and holder[2] == dp_rank)
        return next((client for _, client, _ in holders if client not in connected), None)

    def inherit(self, task: str, client: str, dp_rank: int, heir: str) -> None:
        """Another client, which holds nothing for this rank, holds what `client` did."""
        self.by_holder[task, heir, dp_rank] = self.by_holder.pop((task, client, dp_rank))

    def pass_over(self, task: str, positions: np.ndarray) -> None:
        """The task will never be given these rows, and so needs them no more."""
        if task not in self.tasks:
            return
        for _, chunk, at, _ in self.rows.split(positions):
            chunk.held_columns(task)[1][at] = self.replicas

    def forget(self, task: str) -> None:
        """The task begins anew."""
        for holder in [holder for holder in self.by_holder if holder[0] == task]:
            del self.by_holder[holder]
        for chunk in self.rows.chunks.values():
            chunk.held.pop(task, None)
            chunk.finished.pop(task, None)

    def done(self, positions: np.ndarray, task: str = "", times: np.ndarray | None = None) -> np.ndarray:
        """Return which rows may be freed, bool [rows]: once `task` has finished each of them `times` more times."""
        out = np.full(len(positions), bool(self.tasks))
        for _, chunk, at, where in self.rows.split(positions):
            for name in self.tasks:
                if name not in chunk.held:
                    out[where] = False
                    continue
                more = times[where] if times is not None and name == task else 0
                out[where] &= (chunk.held[name][at] == more) & (chunk.finished[name][at] + more >= self.replicas)
        return out

    def done_without(self, positions: np.ndarray, task: str) -> np.ndarray:
        """Return which rows may be freed once `task` skips them, bool [rows]."""
        out = np.full(len(positions), task in self.tasks)
        for _, chunk, at, where in self.rows.split(positions):
            for name in self.tasks:
                if name in chunk.held:
                    enough = chunk.finished[name][at] >= self.replicas if name != task else True
                    out[where] &= (chunk.held[name][at] == 0) & enough
                elif name != task:
                    out[where] = False
        return out
