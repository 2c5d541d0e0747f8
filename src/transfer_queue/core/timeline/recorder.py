"""Writes the events of the timeline. The controller calls it where something happens; nothing here is part of the state.

An event takes about a microsecond, of which the ring takes a third: `python -m benchmarks timeline` compares puts and
claims with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.row_table import CHUNK_BITS, MASK, Chunk
from transfer_queue.core.timeline.event_ring import EventRing
from transfer_queue.core.timeline.number_tables import MAX_NAMES, FieldTable, LaneEntry, LaneTable, PartitionTable
from transfer_queue.core.timeline.publication_times import PolicyHistory, PublicationTimes
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.timeline.events import AHEAD, TIMED_OUT, EventKind

LOOKED_AT = 64
"""Fields of a claim among which the block that was put last is searched."""
POLICY_TAG = "policy_version"
"""The tag entry with the policy version of a sample. Without it, a sample has the version at its first put."""

_WAIT, _CLAIM, _END, _PUT, _HOLD, _ACK, _POLICY, _GONE = (int(kind) for kind in EventKind)
_U4, _I4 = (1 << 32) - 1, (1 << 31) - 1  # the largest numbers of these columns


class Clock(Protocol):
    """Knows the time of the current event."""

    now: float


class TimelineRecorder:
    """Writes events, and numbers the names in them.

    Args:
        clock: The time of the current event.
        state: The state, which is only read.
        capacity: The number of events that are kept; 0: no events are written.
    """

    def __init__(self, clock: Clock, state: State, capacity: int) -> None:
        self._clock = clock
        self._state = state
        self.ring = EventRing(capacity)
        self.lanes = LaneTable(self.ring, state.clients)
        self.partitions = PartitionTable(self.ring)
        self.fields = FieldTable(self.ring)
        self.wall = 0.0
        """Unix seconds minus the controller's time. The server sets it."""
        self.arrived: float | None = None
        """When the request of the current event arrived, if that was before the event."""
        self._times = PublicationTimes()
        self._policies = PolicyHistory()

    def observe(self, observe: Callable[[Iterable[type], Callable[[Any], None]], None]) -> None:
        """Observe the records of puts and clients. `observe` is `RecordLog.observe`."""
        observe([r.ClientIntroduced], lambda record: self.lanes.introduce(record.client))
        observe([r.ClientForgotten], lambda record: self.lanes.forget(record.client))
        if self.ring.capacity:
            observe([r.RowsPut], self.note_rows_put)
            observe([r.Published], self.note_published)
            observe([r.BlocksMoved], self.note_moved)
            observe([r.PartitionDropped], lambda record: self._policies.forget(record.partition))
            observe([r.StateLoaded], lambda record: self.forget_blocks())

    # ------------------------------------------------------------ puts

    def note_rows_put(self, record: r.RowsPut) -> None:
        """Note a put of new rows, which was applied."""
        self._note_put(record.client, record.partition, record.count, record.block_number, record.block)

    def note_published(self, record: r.Published) -> None:
        """Note a put of existing rows, which was applied."""
        self._note_put(record.writer, record.partition, len(record.rows) // 8, record.block_number, record.block)

    def _note_put(self, client: str, partition: str, rows: int, number: int, block: NewBlock | None) -> None:
        now, end, lanes = self._clock.now, self.ring.end, self.lanes
        lane = lanes.current.get(client) or lanes.of_client(client)
        place = self.partitions.by_key.get(partition) or self.partitions.of(partition)
        if block is None:
            names, nbytes = self.fields.none, 0
        else:
            schema = block.schema or self._state.blocks.complete_schema(block).schema
            key = tuple([spec.name for spec in (schema if len(schema) <= MAX_NAMES else schema[: MAX_NAMES + 1])])
            names, nbytes = self.fields.by_key.get(key) or self.fields.of(key), block.nbytes
            if now >= self._times.due:
                self._times.note(number, now)
        lane.used = place.used = names.used = end
        since = now if self.arrived is None else self.arrived
        self.ring.append(now, since, _PUT, 0, lane.number, place.number, names.number, rows, nbytes, number)

    def note_moved(self, record: r.BlocksMoved) -> None:
        """Note that blocks were moved. Repacked rows are in new blocks, which do not say when they were put."""
        for repacked in record.repacked:
            self._times.note_copies(repacked.first_block)

    # ------------------------------------------------------------ claims

    def note_claim(
        self, client: str, claim: Claim, since: float, partition: Partition, rows: int, positions: np.ndarray
    ) -> None:
        """Note that a claim was answered with rows. positions: those of the rows; -1 for cleared rows.

        The last row describes all of them: of rows in order, it is the one that was put last.
        """
        if not self.ring.capacity:
            return
        position = positions.item(-1) if rows else -1
        now = self._clock.now
        block, age, staleness = 0, -1.0, -1
        chunk = partition.rows.chunks.get(position >> CHUNK_BITS)
        if chunk is not None and position >= 0:
            block, first = _newest_and_oldest(chunk.field, claim.fields, position & MASK)
            age = now - self._times.time_of(block)
            if not age >= 0:
                age = -1.0
            if partition.policy_version:
                staleness = self._staleness(partition, chunk, position & MASK, first)
        self._write_claim(client, claim, _CLAIM, since, 0, rows, block, age, staleness)

    def note_end(self, client: str, claim: Claim, since: float) -> None:
        """Note that a claim was answered with the end of its partition."""
        if self.ring.capacity:
            self._write_claim(client, claim, _END, since, 0, 0)

    def _write_claim(
        self,
        client: str,
        claim: Claim,
        kind: int,
        since: float,
        flags: int,
        rows: int,
        block: int = 0,
        age: float = -1.0,
        staleness: int = -1,
    ) -> None:
        end, lanes = self.ring.end, self.lanes
        lane = lanes.by_key.get((client, claim.task))
        if lane is None or lanes.current.get(client) is not lane:
            lane = lanes.of_claim(client, claim.task, claim.sampling)
        place = self.partitions.by_key.get(claim.partition) or self.partitions.of(claim.partition)
        key = tuple(claim.fields)
        names = self.fields.by_key.get(key) or self.fields.of(key)
        lane.used = place.used = names.used = end
        if claim.ahead:
            flags |= AHEAD
        self.ring.append(
            self._clock.now, since, kind, flags, lane.number, place.number, names.number, rows, 0, block, age, staleness
        )

    def _staleness(self, partition: Partition, chunk: Chunk, at: int, block: int) -> int:
        """Return by how many policy versions a row is old; -1 if it is not known. block: the first one of the row."""
        tags = chunk.tags
        tag = tags[at] if tags is not None else None
        version = tag.get(POLICY_TAG) if tag else None
        if type(version) is float and abs(version) < _I4:
            version = int(version)
        if type(version) is not int:
            known = not math.isnan(self._times.time_of(block))
            version = self._policies.version_at(partition.name, block) if known else None
        return -1 if version is None else min(max(partition.policy_version - version, 0), _I4)

    # ------------------------------------------------------------ waits

    def note_wait(self, waiting: ParkedRequest, met: bool) -> None:
        """Note that a request does not wait any more. met: whether it got what it waited for."""
        if not self.ring.capacity:
            return
        request, flags = waiting.request, 0 if met else TIMED_OUT
        if isinstance(request, Claim):
            rows = min(request.count, _U4)
            self._write_claim(waiting.client, request, _WAIT, waiting.since, flags, rows)
        elif isinstance(request, (Publish, Reserve)):
            rows = min(request.count, _U4)
            self._write(waiting.client, request.partition, _HOLD, waiting.since, flags, rows)

    # ------------------------------------------------------------ other events

    def note_ack(self, client: str, partition: str, task: str, rows: int) -> None:
        """Note that rows of a lease of this task were acknowledged."""
        if self.ring.capacity:
            self._write_lane(self.lanes.of_task(client, task, {}), partition, _ACK, self._clock.now, 0, rows)

    def note_policy(self, client: str, partition: str, before: int, version: int) -> None:
        """Note that the policy version of a partition was set. before: the former version."""
        if self.ring.capacity:
            self._policies.note(partition, before, version, self._state.next_block)
            self._write(client, partition, _POLICY, self._clock.now, 0, min(version, _U4))

    def note_gone(self, client: str) -> None:
        """Note that the last connection of a client has ended, in each of its lanes."""
        if self.ring.capacity:
            for lane in self.lanes.all_of(client):
                self._write_lane(lane, "", _GONE, self._clock.now, 0, 0)

    def forget_blocks(self) -> None:
        """Forget the times of blocks, because a loaded state has others."""
        self._times.forget()
        self._policies.forget()

    def _write(self, client: str, partition: str, kind: int, since: float, flags: int, rows: int) -> None:
        self._write_lane(self.lanes.of_client(client), partition, kind, since, flags, rows)

    def _write_lane(self, lane: LaneEntry, partition: str, kind: int, since: float, flags: int, rows: int) -> None:
        place = self.partitions.of(partition)
        lane.used = place.used = self.ring.end
        self.ring.append(
            self._clock.now, since, kind, flags, lane.number, place.number, self.fields.none.number, rows
        )


def _newest_and_oldest(columns: Mapping[str, Any], fields: Sequence[str], at: int) -> tuple[int, int]:
    """Return the highest and the lowest block number of these fields of a row; 0 if it has none of them."""
    newest, oldest = 0, _U4 << 31
    for name in fields if len(fields) <= LOOKED_AT else fields[:LOOKED_AT]:
        found = columns.get(name)
        if found is not None:
            number = found[0].item(at)
            if number > newest:
                newest = number
            if 0 < number < oldest:
                oldest = number
    return newest, oldest if newest else 0
