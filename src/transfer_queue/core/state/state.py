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
    """The partitions by name. They are made with their options and added to the state."""

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
    """The units by number, which are saved as a list."""

    def save(self, table: State, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = msgspec.to_builtins(list(table.units.values()))

    def load(self, table: State, loaded: Any) -> None:
        """See `Column`."""
        for unit in loaded.units:
            table.enter_unit(unit)


class State(Persisted):
    """The state of the controller."""

    next_index: int = counter()
    """The next global index."""
    next_block: int = counter(1)
    """The next block number."""
    epoch: int = counter()
    """How many checkpoints were loaded. What clients know of rows belongs to one epoch."""
    next_token: int = counter(1)
    """The next token of a lease."""
    changes: int = counter()
    """How often any partition was changed. It gives the versions of partitions.

    Therefore a new partition never has a version that an older one of the same name had.
    """
    blocks: BlockTable = part(BlockTable)
    partitions: dict[str, Partition] = of_kind(_Partitions(Partition, dict))
    """The partitions by name, in order of creation."""
    clients: dict[str, ReplyCache] = parts_of(str, ReplyCache)
    """Client -> its cached replies."""
    fenced: dict[str, None] = value_of(list[str], dict, list, dict.fromkeys)
    """The writers that are proven dead, the oldest first."""
    draining: set[int] = set_of(Count)
    """The units that are being drained."""
    origins: dict[str, int] = map_of(str, Count)
    """Loaded checkpoint -> the block number below which blocks are the same in the state and the checkpoint."""
    units: dict[int, UnitInfo] = of_kind(_Units(list[UnitInfo], dict))
    """The storage units by number."""
    lost_units: dict[int, str] = map_of(Count, str)
    """Number of a unit that does not come back -> the time, as text."""
    losses: int = counter()
    """How often values were lost."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        """The most rows at a time; None without a limit. Configuration, and not part of the tree."""
        self.watched: list[str] = []
        """The tags that new partitions keep as columns, for samplers. Configuration, and not part of the tree."""
        self.prepared: tuple[r.StateLoaded, dict[str, Any], State] | None = None
        """A `StateLoaded` record that is about to be applied, its tree, and the state built from it."""
        self.aging: dict[str, Partition] = {}
        """The partitions that drop rows by their age. Derived."""
        self.counted = RowCount()
        """The number of rows. Derived."""
        self.blocks = BlockTable()
        self.waiting = WaitQueues()
        self.disks: set[int] = set()
        """The units on disk. Derived."""

    @property
    def row_count(self) -> int:
        """The rows of all partitions, which count towards the capacity."""
        return self.counted.of(self.partitions)

    def units_of(self, tier: str) -> set[int]:
        """Return the storage units of a tier (`MEMORY` or `DISK`)."""
        return self.disks if tier == DISK else self.units.keys() - self.disks

    def enter(self, partition: Partition) -> None:
        """Add a partition that is made or restored."""
        self.partitions[partition.name] = partition
        self.counted.changed(partition.name)
        if partition.options.keep_seconds is not None:
            self.aging[partition.name] = partition

    def enter_unit(self, unit: UnitInfo) -> None:
        """Add a storage unit, or replace its description."""
        self.units[unit.unit] = unit
        (self.disks.add if unit.tier == DISK else self.disks.discard)(unit.unit)

    def new_version(self, name: str) -> Partition:
        """Give a partition a new version, and return the partition."""
        partition = self.partitions[name]
        self.changes += 1
        partition.version = self.changes
        self.counted.changed(name)
        return partition

    def snapshot(self) -> dict[str, object]:
        """Return everything that a replay must reproduce, as plain values that can be compared with ==."""
        return {**self.comparable(), "waiting": self.waiting.state()}


class RowCount:
    """The number of rows of all partitions, counted again only in partitions that have changed. Derived."""

    def __init__(self) -> None:
        self._changed: set[str] = set()  # since the last count
        self._found: dict[str, int] = {}
        self._sum = 0

    def changed(self, name: str) -> None:
        """Record that a partition was made, changed or removed."""
        self._changed.add(name)

    def of(self, partitions: Mapping[str, Partition]) -> int:
        """Return the number of rows of these partitions, which must always be all partitions."""
        for name in self._changed:
            partition = partitions.get(name)
            now = 0 if partition is None else partition.row_count
            self._sum += now - self._found.pop(name, 0)
            if now:
                self._found[name] = now
        self._changed.clear()
        return self._sum
