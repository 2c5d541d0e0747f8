"""How many groups tasks want to be there or on their way, and which producers have promised some of them.

Filtering leaves a batch short (dynamic sampling drops groups whose rewards are all alike, as DAPO does); producers ask
how many groups are missing and make as many. What one of them has taken upon itself is not told to the others.
"""

from __future__ import annotations

from transfer_queue.core.columns.schema import Count, Persisted, map_of, map_of_tuples


class GroupQuotas(Persisted):
    """groups: task -> how many are wanted. promised: (task, client) -> rows of new groups still to come from it."""

    groups: dict[str, int] = map_of(str, Count)
    promised: dict[tuple[str, str], int] = map_of_tuples((str, str), Count)

    def want(self, task: str, groups: int) -> None:
        """A task wants so many groups; 0: none any more."""
        if groups:
            self.groups[task] = groups
        else:
            self.groups.pop(task, None)

    def promise(self, task: str, client: str, rows: int) -> None:
        """A producer will make so many rows more; 0: none of what it has promised."""
        if rows:
            self.promised[task, client] = self.promised.get((task, client), 0) + rows
        else:
            self.promised.pop((task, client), None)

    def arrived(self, client: str, rows: int) -> None:
        """A producer has begun new rows."""
        for key in [key for key in self.promised if key[1] == client]:
            self.promised[key] -= rows
            if self.promised[key] <= 0:
                del self.promised[key]

    def promised_rows(self, task: str) -> int:
        """Rows that producers have promised a task."""
        return sum(rows for (name, _), rows in self.promised.items() if name == task)
