"""The controller's whole state. Only `core.appliers` changes it, live and on replay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from transfer_queue.core.columns.kinds import IntervalSet
from transfer_queue.core.columns.schema import (
    Column,
    Count,
    Persisted,
    counter,
    custom_column,
    dict_form,
    map_of,
    part,
    parts_of,
    scalar,
    set_of,
    value_of,
)
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import WaitQueues
from transfer_queue.core.tables.blocks import BlockTable
from transfer_queue.core.tables.leases import LockTable
from transfer_queue.display import worker_text
from transfer_queue.errors import StaleMetadataError, UnknownPartitionError
from transfer_queue.messages.descriptors import DISK, MIRROR, PartitionOptions, UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.names import nearest

MAX_RUNS = 4096  # ranges of finished sequence numbers that are remembered of one client

_encode = msgspec.msgpack.Encoder().encode
_decode_replies = msgspec.msgpack.Decoder(dict[int, AnyReply]).decode


class ReplyCache(Persisted, array_like=True):
    """The replies to the mutations of one client, kept for retries."""

    acknowledged: int = scalar(int, 0)
    """The client needs no reply up to this sequence number."""
    finished: IntervalSet = part(IntervalSet)
    """The later sequence numbers to which it needs no reply either.

    An old request that arrives late on an abandoned connection is recognized by these two. Otherwise it would have its
    effect twice.
    """
    replies: dict[int, AnyReply] = value_of(bytes, dict, _encode, _decode_replies)

    def is_finished(self, sequence: int) -> bool:
        """Return whether the client does not need the reply to this request any more."""
        return sequence <= self.acknowledged or (bool(self.finished.starts) and sequence in self.finished)

    def advance(self, acknowledged: int, finished: list[tuple[int, int]]) -> None:
        """Remove the replies that the client does not need any more, at a cost that depends on their number only."""
        dropped = []
        if acknowledged > self.acknowledged:
            dropped.append(range(self.acknowledged + 1, acknowledged + 1))
            self.acknowledged = acknowledged
        for first, last in finished:
            if len(self.finished.starts) < MAX_RUNS:  # a correct client has far fewer
                first = max(first, self.acknowledged + 1)
                dropped += [range(start, end + 1) for start, end in self.finished.gaps(first, last)]
                self.finished.add(first, last)
        if self.finished.starts:
            self.finished.drop_up_to(self.acknowledged)
        replies = self.replies
        for span in dropped:
            for sequence in span if len(span) <= len(replies) else list(filter(span.__contains__, replies)):
                replies.pop(sequence, None)


class _Partitions(Column):
    """The partitions by name. They are made with their options and added to the state."""

    def forms(self) -> list[tuple[str, Any, Any]]:
        """See `Column`."""
        return [(self.key, dict[str, Partition.form()], self.missing)]  # type: ignore[misc]

    def save(self, table: State, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = {name: partition.to_tree() for name, partition in table.partitions.items()}

    def load(self, table: State, loaded: Any) -> None:
        """See `Column`."""
        for name, partition in loaded.partitions.items():
            made = Partition(name, partition.options, table.blocks, table.waiting.awaited, table.epoch)
            table.add_partition(made)
            made.load(partition)

    def to_comparable(self, table: State) -> Any:
        """See `Column`."""
        return {name: partition.to_comparable() for name, partition in table.partitions.items()}


class _Units(Column):
    """The units by number, which are saved as a list."""

    def save(self, table: State, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = msgspec.to_builtins(list(table.units.values()))

    def load(self, table: State, loaded: Any) -> None:
        """See `Column`."""
        for unit in loaded.units:
            table.add_unit(unit)


class State(Persisted):
    """The state of the controller."""

    next_index: int = counter()
    """The next global index."""
    next_block: int = counter(1)
    """The next block number."""
    epoch: int = counter()
    """How many checkpoints were loaded. What clients know of rows belongs to one epoch."""
    next_token: int = counter(1)
    """The next token of a lease or of a lock."""
    locks: LockTable = part(LockTable, missing=[])
    """The locks of keys."""
    changes: int = counter()
    """How often any partition was changed. It gives the versions of partitions.

    Therefore a new partition never has a version that an older one of the same name had.
    """
    blocks: BlockTable = part(BlockTable)
    partitions: dict[str, Partition] = custom_column(_Partitions(Partition, dict))
    """The partitions by name, in order of creation."""
    clients: dict[str, ReplyCache] = parts_of(str, ReplyCache)
    """Client -> its cached replies."""
    introductions: dict[str, Introduce] = custom_column(
        Column(dict_form(str, Introduce), dict, save=msgspec.to_builtins, missing={})
    )
    """Client -> its task and rank, if it has reported them. They are forgotten with its replies."""
    samplers: dict[str, tuple[str, str]] = map_of(str, tuple[str, str], missing={})
    """Task -> the sampler that a dataset has registered for it (`sampler.sampler_spec`)."""
    fenced: dict[str, None] = value_of(list[str], dict, list, dict.fromkeys)
    """The writers that are proven dead, the oldest first."""
    draining: set[int] = set_of(Count)
    """The units that are being drained."""
    origins: dict[str, int] = map_of(str, Count)
    """Loaded checkpoint -> the block number below which blocks are the same in the state and the checkpoint."""
    units: dict[int, UnitInfo] = custom_column(_Units(list[UnitInfo], dict))
    """The storage units by number."""
    lost_units: dict[int, str] = map_of(Count, str)
    """Number of a unit that does not come back -> the time, as text."""
    losses: int = counter()
    """How often values were lost."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        """The most rows at a time; None without a limit. Configuration, and not part of the tree."""
        self.lease_key: bytes | None = None
        """The key of `lease_proof`; None: proofs are not checked. Configuration, and not part of the tree."""
        self.watched: list[str] = []
        """The tags that new partitions keep as columns, for samplers. Configuration, and not part of the tree."""
        self.prepared: tuple[r.StateLoaded, dict[str, Any], State] | None = None
        """A `StateLoaded` record that is about to be applied, its tree, and the state built from it."""
        self.aging: dict[str, Partition] = {}
        """The partitions that drop rows by their age. Derived."""
        self.counted = RowCount()
        """The number of rows. Derived."""
        self.waiting = WaitQueues()
        self.disks: set[int] = set()
        """The units on disk to which blocks are offloaded. Derived."""
        self.mirrors: set[int] = set()
        """The units on disk that have a copy of every block. Derived."""
        self.stores: set[int] = set()
        """The units of external stores. Derived."""

    def derive(self) -> None:
        """Count what a state of an older release has not counted."""
        for partition in self.partitions.values():
            partition.field_ranks.count_old()

    @property
    def row_count(self) -> int:
        """The rows of all partitions, which count towards the capacity."""
        return self.counted.count(self.partitions)

    def describe_client(self, client: str) -> str:
        """Return who a client is, for people, as `train rank 0, pid 123, node-7`."""
        introduction = self.introductions.get(client)
        if introduction is None:
            return worker_text(client=client)
        return worker_text(introduction.task, introduction.rank, introduction.pid, introduction.host, client)

    def units_of(self, tier: str) -> set[int]:
        """Return the storage units with arenas of a tier (`MEMORY`, `DISK` or `MIRROR`)."""
        if tier == MIRROR:
            return self.mirrors
        return self.disks if tier == DISK else self.units.keys() - self.disks - self.mirrors - self.stores

    def add_partition(self, partition: Partition) -> None:
        """Add a partition that is made or restored."""
        self.partitions[partition.name] = partition
        self.counted.mark_changed(partition.name)
        if partition.options.keep_seconds is not None:
            self.aging[partition.name] = partition

    def make_partition(self, name: str, options: PartitionOptions) -> Partition:
        """Add a new partition without rows, and return it."""
        made = Partition(name, options, self.blocks, self.waiting.awaited, self.epoch)
        self.add_partition(made)
        made.number = made.changes.made = self.new_version(name).version
        for tag in self.watched:
            made.rows.watch(tag)
        return made

    def watch(self, tags: Iterable[str]) -> None:
        """Keep these tags as columns, in the partitions that exist and in new ones."""
        self.watched = list(tags)
        for partition in self.partitions.values():
            for tag in self.watched:
                partition.rows.watch(tag)

    def add_unit(self, unit: UnitInfo) -> None:
        """Add a storage unit, or replace its description."""
        self.units[unit.unit] = unit
        for tier, numbers in ((DISK, self.disks), (MIRROR, self.mirrors)):
            (numbers.add if unit.tier == tier else numbers.discard)(unit.unit)
        (self.stores.add if unit.store else self.stores.discard)(unit.unit)

    def check_epoch(self, request: Any) -> None:
        """Raise StaleMetadataError if a request names rows by metadata of another epoch.

        Loading a checkpoint begins a new epoch, in which the metadata that clients have is not valid any more.
        """
        epoch = getattr(request, "epoch", None)
        if epoch is not None and epoch != self.epoch:
            when = "after this metadata was fetched" if epoch < self.epoch else "that this metadata does not belong to"
            raise StaleMetadataError(
                f"a checkpoint was loaded {when}, so the samples of partition {request.partition!r} are others now; "
                f"fetch their metadata again"
            )

    def new_version(self, name: str) -> Partition:
        """Give a partition a new version, and return the partition."""
        partition = self.partitions[name]
        self.changes += 1
        partition.version = self.changes
        self.counted.mark_changed(name)
        return partition

    def snapshot(self) -> dict[str, object]:
        """Return everything that a replay must reproduce, as plain values that can be compared with ==."""
        return {**self.to_comparable(), "waiting": self.waiting.to_comparable()}


class RowCount:
    """The number of rows of all partitions, counted again only in partitions that have changed. Derived."""

    def __init__(self) -> None:
        self._changed: set[str] = set()  # since the last count
        self._counts: dict[str, int] = {}
        self._sum = 0

    def mark_changed(self, name: str) -> None:
        """Record that a partition was made, changed or removed."""
        self._changed.add(name)

    def count(self, partitions: Mapping[str, Partition]) -> int:
        """Return the number of rows of these partitions, which must always be all partitions."""
        for name in self._changed:
            partition = partitions.get(name)
            now = 0 if partition is None else partition.row_count
            self._sum += now - self._counts.pop(name, 0)
            if now:
                self._counts[name] = now
        self._changed.clear()
        return self._sum


PartitionType = TypeVar("PartitionType")


def require_partition(
    partitions: Mapping[str, PartitionType],
    name: str,
    advice: str = "Pass the name of a partition that exists, or create this one first with create_partition",
) -> PartitionType:
    """Return the partition with this name.

    Args:
        partitions: The partitions by name.
        name: The name to look up.
        advice: The end of the message of the error, which says what to do.

    Raises:
        UnknownPartitionError: There is no such partition. The message suggests similar names.
    """
    partition = partitions.get(name)
    if partition is None:
        raise UnknownPartitionError(f"{no_partition_text(name, partitions)}. {advice}")
    return partition


def no_partition_text(name: str, partitions: Iterable[str]) -> str:
    """Return "partition 'x' does not exist", with the nearest names that exist, otherwise the first ones."""
    return f"partition {name!r} does not exist ({suggestion(name, partitions)})"


def unknown_partition_warning(partitions: Collection[str], name: str, effect: str) -> str | None:
    """Return a warning about a partition that does not exist; None if it exists. effect: what the request then does."""
    return None if name in partitions else f"{no_partition_text(name, partitions)}: {effect}"


def suggestion(name: str, partitions: Iterable[str]) -> str:
    """Return "did you mean 'x'?" with the nearest partitions, otherwise the first ones, or that none exists."""
    names = list(partitions)
    meant = nearest(name, names, most=3)
    if meant:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    if not names:
        return "no partition exists"
    return f"the partitions are: {', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
