"""The controller's whole state. Only `core.state.apply` changes it, live and on replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transfer_queue.core.columns.schema import (
    Column,
    Count,
    Persisted,
    counter,
    map_of,
    of_kind,
    part,
    parts_of,
    set_of,
    value_of,
)
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.reply_cache import ReplyCache
from transfer_queue.core.state.wait_queues import WaitQueues
from transfer_queue.core.tables.block_table import BlockTable
from transfer_queue.messages.descriptors import DISK, UnitInfo


class _Partitions(Column):
    """The partitions by name, which need the options to be made, and the state to enter them."""

    def forms(self) -> list[tuple[str, Any, Any]]:
        """See `Column`."""
        return [(self.key, dict[str, Partition.form()], self.missing)]  # type: ignore[misc]

    def save(self, table: State, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = {name: partition.saved() for name, partition in table.partitions.items()}

    def load(self, table: State, loaded: Any) -> None:
        """See `Column`."""
        for name, partition in loaded.partitions.items():
            made = Partition(name, partition.options, table.blocks, table.waiting.awaited, table.epoch)
            table.enter(made)
            made.load(partition)

    def comparable(self, table: State) -> Any:
        """See `Column`."""
        return {name: partition.comparable() for name, partition in table.partitions.items()}


class _Units(Column):
    """The units by number, saved as a list."""

    def save(self, table: State, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = msgspec.to_builtins(list(table.units.values()))

    def load(self, table: State, loaded: Any) -> None:
        """See `Column`."""
        for unit in loaded.units:
            table.enter_unit(unit)


class State(Persisted):
    """The state of the controller.

    partitions: by name, in order of creation. next_index: the next global index, next_block: block number, next_token:
    a lease's token.

    epoch: how many checkpoints were loaded; what clients know of rows is of one epoch.

    changes: how often any partition was changed. It gives the versions of partitions, so that one made anew under an
    old name never shows a version that the old one had.

    clients: kept replies by client id. fenced: writers proven dead, oldest first. units: storage units by number.
    lost_units: number -> when, of those that will not come back. losses: how often values were lost. disks: those on
    disk (derived). draining: those that everything is to be moved off. aging: the partitions that drop rows by their
    age (derived). counted: how many rows there are (derived). origins: of checkpoints that were loaded -> blocks with
    numbers below this one are the same here and there. capacity: most rows at a time, None without limit
    (configuration, not replayed). prepared: a `StateLoaded` record that is about to be applied, what was saved with its
    state, and the state itself, if it was built already (the same). watched: tags that partitions keep as columns from
    their beginning, for samplers (the same).
    """

    next_index: int = counter()
    next_block: int = counter(1)
    epoch: int = counter()
    next_token: int = counter(1)
    changes: int = counter()
    blocks: BlockTable = part(BlockTable)
    partitions: dict[str, Partition] = of_kind(_Partitions(Partition, dict))
    clients: dict[str, ReplyCache] = parts_of(str, ReplyCache)
    fenced: dict[str, None] = value_of(list[str], dict, list, dict.fromkeys)
    draining: set[int] = set_of(Count)
    origins: dict[str, int] = map_of(str, Count)
    units: dict[int, UnitInfo] = of_kind(_Units(list[UnitInfo], dict))
    lost_units: dict[int, str] = map_of(Count, str)
    losses: int = counter()

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.watched: list[str] = []
        self.prepared: tuple[r.StateLoaded, dict[str, Any], State] | None = None
        self.aging: dict[str, Partition] = {}
        self.counted = RowCount()
        self.blocks = BlockTable()
        self.waiting = WaitQueues()
        self.disks: set[int] = set()

    @property
    def row_count(self) -> int:
        """Rows of all partitions that count towards the capacity."""
        return self.counted.of(self.partitions)

    def units_of(self, tier: str) -> set[int]:
        """The storage units of a tier (`messages.MEMORY`, `messages.DISK`)."""
        return self.disks if tier == DISK else self.units.keys() - self.disks

    def enter(self, partition: Partition) -> None:
        """Adds a partition. Called when it is made or restored."""
        self.partitions[partition.name] = partition
        self.counted.changed(partition.name)
        if partition.options.keep_seconds is not None:
            self.aging[partition.name] = partition

    def enter_unit(self, unit: UnitInfo) -> None:
        """Adds a storage unit, or what is new of it."""
        self.units[unit.unit] = unit
        (self.disks.add if unit.tier == DISK else self.disks.discard)(unit.unit)

    def new_version(self, name: str) -> Partition:
        """Return the partition, after it was given a new version."""
        partition = self.partitions[name]
        self.changes += 1
        partition.version = self.changes
        self.counted.changed(name)
        return partition

    def snapshot(self) -> dict[str, object]:
        """Everything that replay must reproduce, as plain values that compare by ==."""
        return {**self.comparable(), "waiting": self.waiting.state()}


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
