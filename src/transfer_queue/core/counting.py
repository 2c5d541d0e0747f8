"""How many rows there are in all partitions, without looking at each of them at every put."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_queue.core.partition import Partition


class RowCount:
    """The rows of all partitions together, looked up again only in those that have changed. Derived."""

    def __init__(self) -> None:
        self._changed: set[str] = set()  # since they were looked up
        self._found: dict[str, int] = {}
        self._sum = 0

    def changed(self, name: str) -> None:
        """A partition has been made, changed or dropped."""
        self._changed.add(name)

    def of(self, partitions: Mapping[str, Partition]) -> int:
        """Rows of these partitions, which are always all there are."""
        for name in self._changed:
            partition = partitions.get(name)
            now = 0 if partition is None else partition.row_count
            self._sum += now - self._found.pop(name, 0)
            if now:
                self._found[name] = now
        self._changed.clear()
        return self._sum
