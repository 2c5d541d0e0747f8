"""The controller's whole state, and `apply`: the only function that changes it, live and on replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from transfer_queue.core.columns.intervals import Intervals
from transfer_queue.core.columns.schema import (
    Column,
    Count,
    Persisted,
    counter,
    map_of,
    of_kind,
    part,
    parts_of,
    scalar,
    set_of,
    value_of,
)
from transfer_queue.core.events import records as r
from transfer_queue.core.state import apply_leases, apply_puts
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import Waiting, WaitingRoom
from transfer_queue.core.tables.block_table import BlockTable
from transfer_queue.core.tables.lease_table import Lease
from transfer_queue.core.tables.lost_values import Loss, holding
from transfer_queue.messages.descriptors import DISK, MOVER, Place, UnitInfo
from transfer_queue.messages.envelopes import AnyReply

if TYPE_CHECKING:
    from transfer_queue.core.state.partition import Partition


MAX_RUNS = 4096  # of finished sequences that are remembered of one client
MAX_FENCED = 4096  # writers proven dead that are remembered; their connections ended long before


_encode = msgspec.msgpack.Encoder().encode
_decode_replies = msgspec.msgpack.Decoder(dict[int, AnyReply]).decode


class Kept(Persisted, array_like=True):
    """Replies of one client, kept for retries. acknowledged: up to here it needs none again.

    finished: of the sequences above `acknowledged`, those that it needs no reply to either. An old request that
    comes late, out of a connection given up, is known by these two; else it would have its effect twice.
    """

    acknowledged: int = scalar(int, 0)
    finished: Intervals = part(Intervals)
    replies: dict[int, AnyReply] = value_of(bytes, dict, _encode, _decode_replies)

    def __init__(self) -> None:
        super().__init__()
        self.finished = Intervals()

    def over(self, sequence: int) -> bool:
        """Whether the client waits for this reply no more."""
        return sequence <= self.acknowledged or sequence in self.finished

    def advance(self, acknowledged: int, finished: list[tuple[int, int]]) -> None:
        """Drop the replies that the client does not need any more. The cost depends on these, not on those kept."""
        if acknowledged > self.acknowledged:
            self._drop(self.acknowledged + 1, acknowledged)
            self.acknowledged = acknowledged
        for first, last in finished:
            if len(self.finished.starts) < MAX_RUNS:  # an honest client has far fewer
                first = max(first, self.acknowledged + 1)
                for gap in self.finished.gaps(first, last):
                    self._drop(*gap)
                self.finished.add(first, last)
        if self.finished.starts:
            self.finished.drop_up_to(self.acknowledged)

    def _drop(self, first: int, last: int) -> None:
        if last - first < len(self.replies):
            for sequence in range(first, last + 1):
                self.replies.pop(sequence, None)
        else:
            for sequence in [s for s in self.replies if first <= s <= last]:
                del self.replies[sequence]


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
    clients: dict[str, Kept] = parts_of(str, Kept)
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
        self.waiting = WaitingRoom()
        self.disks: set[int] = set()

    @property
    def row_count(self) -> int:
        """Rows of all partitions that count towards the capacity."""
        return self.counted.of(self.partitions)

    def units_of(self, tier: str) -> set[int]:
        """The storage units of a tier (`messages.MEMORY`, `messages.DISK`)."""
        return self.disks if tier == DISK else self.units.keys() - self.disks

    def apply(self, record: r.AnyRecord) -> None:
        """Takes one record in."""
        _APPLY[type(record)](self, record)

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

    def _changed(self, name: str) -> Partition:
        """The partition, under a new version."""
        partition = self.partitions[name]
        self.changes += 1
        partition.version = self.changes
        self.counted.changed(name)
        return partition

    def _partition_made(self, record: r.PartitionMade) -> None:
        self.enter(Partition(record.partition, record.options, self.blocks, self.waiting.awaited, self.epoch))
        partition = self._changed(record.partition)
        partition.number = partition.changes.made = partition.version
        for tag in self.watched:
            partition.rows.watch(tag)

    def _rows_reserved(self, record: r.RowsReserved) -> None:
        self._changed(record.partition).reserve(
            record.first_index, record.count, record.taken, record.keys, record.groups, record.pre_allocated,
            record.client,
        )  # fmt: skip
        self.next_index = max(self.next_index, record.first_index + record.count)

    def _published(self, record: r.Published) -> None:
        partition = self._changed(record.partition)
        positions = partition.rows.positions_of(np.frombuffer(record.rows, "<i8"))
        if record.groups is not None:
            partition.join(record.groups, positions.tolist())
        if record.tags is not None:
            partition.set_tags(positions, record.tags, record.replace_tags)
        if record.block is not None:
            self.next_block = max(self.next_block, record.block_number + 1)
            apply_puts.publish(partition, positions, record.block_number, record.block, record.writer)
        if record.tags is not None or record.block is not None:
            partition.changes.mark(partition.version, positions)

    def _rows_put(self, record: r.RowsPut) -> None:
        apply_puts.arrive(self._changed(record.partition), record)
        self.next_index = max(self.next_index, record.first_index + record.count)
        if record.block is not None:
            self.next_block = max(self.next_block, record.block_number + 1)

    def _extents_closed(self, record: r.ExtentsClosed) -> None:
        self.blocks.shorten(record.extents, record.lengths)
        self.blocks.close([(unit, extent) for unit, extent in record.extents])

    def _dealt(self, record: r.Dealt) -> None:
        partition = self._changed(record.partition)
        consumed: np.ndarray | None = None
        if record.batch_index is not None:
            shares = [(share.dp_rank, np.frombuffer(share.rows, "<i8")) for share in record.shares]
            positions = partition.deal(record.task, record.batch_index, record.batch_size, shares)
            if b"".join(share.rows for share in record.shares) == record.consumed:  # as all built-in samplers have it
                consumed = positions
        if consumed is None:
            consumed = partition.rows.positions_of(np.frombuffer(record.consumed, "<i8"))
        if record.claimed:
            given = np.concatenate([np.frombuffer(share.rows, "<i8") for share in record.shares])
            given = partition.rows.positions_of(given)
            apply_leases.claim(partition, record.task, consumed[np.isin(consumed, given)])
            consumed = consumed[~np.isin(consumed, given)]
        partition.consume(record.task, consumed)
        if record.lease is not None:
            self._leased(record.lease)

    def _leased(self, record: r.Leased) -> None:
        batch = None if record.batch is None else (record.task, *record.batch)
        self.partitions[record.partition].leases.add(
            Lease(
                record.token, record.task, record.client, np.frombuffer(record.rows, "<i8"), record.seconds, batch,
                record.replicas, record.unit,
            )
        )  # fmt: skip
        self.next_token = max(self.next_token, record.token + 1)

    def _lease_acked(self, record: r.LeaseAcked) -> None:
        partition = self._changed(record.partition)
        apply_leases.acknowledge(partition, record)
        self._free(partition, record.freed)

    def _lease_ended(self, record: r.LeaseEnded) -> None:
        partition = self._changed(record.partition)
        partition.leases.leave(record.token, np.frombuffer(record.rows, "<i8"))
        self._undelivered(partition, record.task, record.counted)
        returned = partition.rows.positions_of(np.frombuffer(record.returned, "<i8"))
        apply_leases.give_back(partition, record.task, returned)

    def _rank_left(self, record: r.RankLeft) -> None:
        partition = self._changed(record.partition)
        self._undelivered(partition, record.task, record.counted)
        apply_leases.rank_left(partition, record)

    def _undelivered(self, partition: Partition, task: str, counted: bytes) -> None:
        partition.leases.delivered.add(task, partition.rows.positions_of(np.frombuffer(counted, "<i8")))

    def _passed_over(self, record: r.PassedOver) -> None:
        partition = self._changed(record.partition)
        partition.pass_over(record.task, partition.rows.positions_of(np.frombuffer(record.rows, "<i8")), record.reason)
        self._free(partition, record.freed)

    def _rows_cleared(self, record: r.RowsCleared) -> None:
        partition = self._changed(record.partition)
        partition.clear(partition.rows.positions_of(np.frombuffer(record.rows, "<i8")))

    def _rows_dropped(self, record: r.RowsDropped) -> None:
        self._changed(record.partition).drop_rows(np.frombuffer(record.rows, "<i8"), record.reason, record.unborn)

    def _handed(self, record: r.Handed) -> None:
        holds = self.partitions[record.partition].holds
        holds.hand(record.task, record.client, record.dp_rank, np.frombuffer(record.rows, "<i8"))

    def _inherited(self, record: r.Inherited) -> None:
        holds = self.partitions[record.partition].holds
        holds.inherit(record.task, record.client, record.dp_rank, record.heir)

    def _state_loaded(self, record: r.StateLoaded) -> None:
        from transfer_queue.core.state.restore import take_over  # which needs this module

        take_over(self, record)

    def _finished(self, record: r.Finished) -> None:
        partition = self.partitions[record.partition]
        partition.holds.finish(record.task, record.client, np.frombuffer(record.rows, "<i8"))
        if record.freed:
            self._free(self._changed(record.partition), record.freed)

    def _free(self, partition: Partition, freed: bytes) -> None:
        rows = np.frombuffer(freed, "<i8")
        partition.clear(partition.rows.positions_of(rows))
        partition.freed += len(rows)

    def _aged(self, record: r.Aged) -> None:
        partition = self.partitions[record.partition]
        partition.births.add(record.time, partition.rows.end, partition.rows.start())

    def _policy_advanced(self, record: r.PolicyAdvanced) -> None:
        self._changed(record.partition).policy_version = record.version

    def _groups_wanted(self, record: r.GroupsWanted) -> None:
        self._changed(record.partition).wants.want(record.task, record.groups)

    def _groups_taken(self, record: r.GroupsTaken) -> None:
        self.partitions[record.partition].wants.promise(record.task, record.client, record.rows)

    def _partition_dropped(self, record: r.PartitionDropped) -> None:
        partition = self.partitions.pop(record.partition)
        partition.drop()
        self.blocks.stored.pop(partition.number, None)
        self.counted.changed(record.partition)
        self.aging.pop(record.partition, None)

    def _consumption_forgotten(self, record: r.ConsumptionForgotten) -> None:
        self._changed(record.partition).forget_consumption(record.task)

    def _seal_counted(self, record: r.SealCounted) -> None:
        self._changed(record.partition).seal()

    def _parked(self, record: r.Parked) -> None:
        self.waiting.add(Waiting(record.client, record.sequence, record.since, record.deadline, record.request))

    def _unparked(self, record: r.Unparked) -> None:
        self.waiting.remove((record.client, record.sequence))

    def _replied(self, record: r.Replied) -> None:
        kept = self.clients.get(record.client)
        if kept is None:
            kept = self.clients[record.client] = Kept()
        if record.acknowledged > kept.acknowledged or record.finished:
            kept.advance(record.acknowledged, record.finished)
        if not kept.over(record.sequence):  # else nobody asks for it again
            kept.replies[record.sequence] = record.reply

    def _answered(self, record: r.Answered) -> None:
        for client, sequence, reply in record.answers:
            kept = self.clients.get(client)
            if kept is None:
                kept = self.clients[client] = Kept()
            if not kept.over(sequence):
                kept.replies[sequence] = reply

    def _client_forgotten(self, record: r.ClientForgotten) -> None:
        self.clients.pop(record.client, None)

    def _unit_registered(self, record: r.UnitRegistered) -> None:
        info = UnitInfo(
            record.unit,
            record.address,
            record.arena,
            record.boot_id,
            record.name,
            record.node,
            record.remote,
            record.tier,
            record.capacity,
            record.store,
        )
        self.enter_unit(info)

    def _unit_lost(self, record: r.UnitLost) -> None:
        self.units.pop(record.unit)
        self.disks.discard(record.unit)
        self.draining.discard(record.unit)
        self.lost_units[record.unit] = record.when
        self._lose(lambda units, extents: units == record.unit, record.unit, record.when)
        places = [*self.blocks.extents, *self.blocks.freed]
        self.blocks.forget([place for place in places if place[0] == record.unit])

    def _extents_lost(self, record: r.ExtentsLost) -> None:
        gone = np.frombuffer(record.extents, "<i8")
        self._lose(lambda units, extents: (units == record.unit) & np.isin(extents, gone), record.unit, record.when)
        self.blocks.forget([(record.unit, extent) for extent in gone.tolist()])

    def _lose(self, gone: Callable[[np.ndarray, np.ndarray], np.ndarray], unit: int, when: str) -> None:
        """Values in blocks that have no place left are lost."""
        blocks = self.blocks.lose(gone)
        if not len(blocks):
            return
        self.losses += 1
        for name, partition in self.partitions.items():
            found = list(holding(partition.rows, blocks))
            if found:
                apply_puts.lose(self._changed(name), found, self.losses, Loss(unit, when, partition.version))

    def _extents_freed(self, record: r.ExtentsFreed) -> None:
        self.blocks.forget([(record.unit, extent) for extent in np.frombuffer(record.extents, "<i8").tolist()])

    def _moved(self, record: r.Moved) -> None:
        place = Place(record.unit, record.extent, 0, record.generation, record.length)
        closed = [(record.unit, record.extent)]
        numbers, offsets = np.frombuffer(record.blocks, "<i8"), np.frombuffer(record.offsets, "<i8")
        self.blocks.relocate(numbers, place, offsets, record.left, MOVER)
        for repacked in record.repacked:
            self.next_block = max(self.next_block, repacked.first_block + len(repacked.blocks))
            closed += [(copy.unit, copy.extent) for block in repacked.blocks for copy in block.copies]
            partition = self.partitions.get(repacked.partition)
            if partition is not None:
                apply_puts.repack(partition, repacked, MOVER)
        self.blocks.close(list(dict.fromkeys(closed)))

    def _unit_draining(self, record: r.UnitDraining) -> None:
        if record.draining:
            self.draining.add(record.unit)
        else:
            self.draining.discard(record.unit)

    def _writer_fenced(self, record: r.WriterFenced) -> None:
        self.fenced[record.writer] = None
        while len(self.fenced) > MAX_FENCED:
            del self.fenced[next(iter(self.fenced))]
        self.blocks.close([(record.unit, extent) for extent in record.extents])

    def snapshot(self) -> dict[str, object]:
        """Everything that replay must reproduce, as plain values that compare by ==."""
        return {
            "partitions": {name: partition.state() for name, partition in self.partitions.items()},
            "next_index": self.next_index,
            "next_block": self.next_block,
            "epoch": self.epoch,
            "next_token": self.next_token,
            "changes": self.changes,
            "blocks": self.blocks.state(),
            "waiting": self.waiting.state(),
            "clients": {
                client: (
                    kept.acknowledged,
                    kept.finished.state(),
                    {s: repr(reply) for s, reply in kept.replies.items()},
                )
                for client, kept in self.clients.items()
            },
            "fenced": list(self.fenced),
            "units": dict(self.units),
            "lost": (dict(self.lost_units), self.losses),
            "draining": sorted(self.draining),
            "origins": dict(self.origins),
        }


_APPLY: dict[type, Any] = {
    r.PartitionMade: State._partition_made,
    r.RowsReserved: State._rows_reserved,
    r.Published: State._published,
    r.RowsPut: State._rows_put,
    r.ExtentsClosed: State._extents_closed,
    r.Dealt: State._dealt,
    r.PassedOver: State._passed_over,
    r.RowsCleared: State._rows_cleared,
    r.PartitionDropped: State._partition_dropped,
    r.ConsumptionForgotten: State._consumption_forgotten,
    r.SealCounted: State._seal_counted,
    r.Parked: State._parked,
    r.Unparked: State._unparked,
    r.Replied: State._replied,
    r.ClientForgotten: State._client_forgotten,
    r.UnitRegistered: State._unit_registered,
    r.WriterFenced: State._writer_fenced,
    r.RowsDropped: State._rows_dropped,
    r.Handed: State._handed,
    r.Finished: State._finished,
    r.Aged: State._aged,
    r.PolicyAdvanced: State._policy_advanced,
    r.GroupsWanted: State._groups_wanted,
    r.GroupsTaken: State._groups_taken,
    r.UnitLost: State._unit_lost,
    r.ExtentsLost: State._extents_lost,
    r.ExtentsFreed: State._extents_freed,
    r.Inherited: State._inherited,
    r.StateLoaded: State._state_loaded,
    r.Leased: State._leased,
    r.LeaseAcked: State._lease_acked,
    r.LeaseEnded: State._lease_ended,
    r.RankLeft: State._rank_left,
    r.Moved: State._moved,
    r.UnitDraining: State._unit_draining,
    r.Answered: State._answered,
}


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
