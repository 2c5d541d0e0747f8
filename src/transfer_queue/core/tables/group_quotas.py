"""The group demand of tasks, and the promises of producers to make some of these groups.

Filtering makes batches too small: dynamic sampling, as in DAPO, drops groups whose rewards are all equal. Producers
ask how many groups are missing and make that many. What one producer has promised is not offered to another one.
"""

from __future__ import annotations

from transfer_queue.core.columns.schema import Count, Persisted, map_of, map_of_tuples


class GroupQuotas(Persisted):
    """Group demand and promises of one partition."""

    groups: dict[str, int] = map_of(str, Count)
    """Task -> the number of groups that it wants to exist or to be in production."""
    promised: dict[tuple[str, str], int] = map_of_tuples((str, str), Count)
    """(task, client) -> rows of new groups that the client has promised and not yet begun."""

    def want(self, task: str, groups: int) -> None:
        """Set the number of groups that a task wants; 0 removes its demand."""
        if groups:
            self.groups[task] = groups
        else:
            self.groups.pop(task, None)

    def promise(self, task: str, client: str, rows: int) -> None:
        """Add this number of rows to what a producer has promised a task; 0 withdraws its promise."""
        if rows:
            self.promised[task, client] = self.promised.get((task, client), 0) + rows
        else:
            self.promised.pop((task, client), None)

    def arrived(self, client: str, rows: int) -> None:
        """Record that a producer has begun new rows, which fulfil its promises."""
        for key in [key for key in self.promised if key[1] == client]:
            self.promised[key] -= rows
            if self.promised[key] <= 0:
                del self.promised[key]

    def promised_rows(self, task: str) -> int:
        """Return the rows that producers have promised a task."""
        return sum(rows for (name, _), rows in self.promised.items() if name == task)
