"""Writes the events of the timeline, and replies with pages of them. Nothing here is part of the state.

Most events are noted as tuples first, and written to the ring some hundred at a time. A loop that only writes events
takes a third of the time that each event would take alone, because its code and data are in the processor's caches.
`python -m benchmarks timeline` compares puts and claims with and without the timeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, Union

import numpy as np

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.blocks import Schema
from transfer_queue.core.tables.rows import CHUNK_BITS, MASK, Chunk
from transfer_queue.core.timeline.event_ring import (
    MAX_FIELDS,
    MAX_NAMES,
    MAX_PARTITIONS,
    PACKING,
    SIZE,
    EventRing,
    FieldTable,
    LaneTable,
    PartitionTable,
    PolicyHistory,
    PublicationTimes,
    RowHistory,
    cut_text,
)
from transfer_queue.core.timeline.task_measures import TaskMeasures
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.reports.timeline import (
    Introduce,
    Leave,
    OpenWait,
    ReadTimeline,
    TimelineReply,
    ValueRead,
)
from transfer_queue.sampler.freshness_sampler import POLICY_TAG
from transfer_queue.timeline.events import AHEAD, CLOSED, DEMAND, EVENT, NEW_ROWS, TIMED_OUT, WHOLE, EventKind

MAX_NOTES = 128
"""Notes that are kept until they are written."""
MANY_ROWS = 1 << 14
"""A note with at least this many rows is written immediately, so that notes do not keep much memory."""
MANY_RECORDED = 256
"""The same for a put, because its note keeps the record with the keys and tags of its rows."""
LOOKED_AT = 64
"""Fields of a claim in which the newest block is searched. A claim with more fields is written immediately."""
MAX_DEPARTED = 1024
"""Clients that are gone and remembered."""
LOOKUPS, LOOKUP_SECONDS = 1024, 1.0
"""The newest block is looked up for at most LOOKUPS claims in LOOKUP_SECONDS, so that frequent claims are not slowed
down. The age and staleness of these claims represent those of all claims."""

MAX_EVENTS = 4_096
"""Events of a reply to `ReadTimeline`."""
MAX_NUMBERS = 2_048
"""Lanes, partitions and tuples of fields of a reply, each."""
MAX_OPEN = 1_024
"""Waits of a reply."""
MAX_EXAMINED = 8_192
"""Waiting requests among which these are found."""
MAX_CONNECTED = 16_384
"""Clients of a reply."""

_WAIT, _CLAIM, _END, _PUT, _HOLD, _ACK, _POLICY, _GONE, _CLEAR, _RETURN, _READ = (int(kind) for kind in EventKind)
_pack = PACKING.pack_into
_U4, _I4 = (1 << 32) - 1, (1 << 31) - 1  # the largest numbers of these columns

Names = Union[Schema, list[str]]
Policy = tuple[int, Any, int]
"""The block of a row that was put first, the row's tag entry with its policy version, the version of the partition."""
Which = Union[int, bytes, None]
"""The rows of an event: the global index of the first of consecutive rows, or all global indexes (i8), or none."""
Note = tuple[int, float, float, int, str, Any, Any, Which]
"""An event: its kind, time, since, flags and client, what it is about, more about it, and which rows these are.

    - A put: its record, and the fields of its block.
    - A claim: the claim, and the newest block of its last row with the row's policy; None: it was not looked up.
    - A wait or the end of a partition: the claim, and its number of rows.
    - A read: what the client reports, and the seconds since it ended.
    - Rows that were acknowledged, cleared or returned: the partition, and the task of the lane.
"""


class TimelineRecorder(CoreService):
    """Writes events, and numbers the names in them. It runs always, as it also knows when rows were put."""

    runs_always = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._clock = context.log
        self._state = state = context.state
        capacity = context.config.timeline_events
        self.ring = EventRing(capacity)
        """The events. `flush` must have run."""
        self.rows = RowHistory(self.ring)
        """The rows of the events. `flush` must have run."""
        self.lanes = LaneTable(self.ring, state.introductions)
        self.partitions = PartitionTable(self.ring)
        self.fields = FieldTable(self.ring)
        self.tasks = TaskMeasures(self.ring, self.lanes)
        """What metrics say of each task. `flush` must have run."""
        self.wall = 0.0
        """Unix seconds minus the controller's time. The server sets it."""
        self.change_times = PublicationTimes()
        """When rows changed, by the version of their partition (`Chunk.changed`)."""
        self.reservation_times = PublicationTimes()
        """When rows were reserved, by their global index; only of rows that were reserved before they were put."""
        self.from_start = not state.next_index
        """Whether no rows existed when the events began."""
        self.known_since = context.now
        """The times of puts before this time are not known."""
        self.departed: dict[str, float] = {}
        """Client that claimed or put, and is gone -> when its last connection ended; the oldest first, at most
        `MAX_DEPARTED`. A client that has closed is not gone, nor is one whose claims were answered with the end."""
        self._ended: set[tuple[str, str]] = set()
        """(client, task) whose last claim was answered with the end of its partition."""
        self._notes: list[Note] = []
        """The events that are not written yet, in order."""
        self.block_times = PublicationTimes()
        """When blocks were published."""
        self._policies = PolicyHistory()
        self._lookups, self._more_lookups = 0, -math.inf
        """The number of claims whose blocks may still be searched, and the time at which it is reset to `LOOKUPS`."""
        self._reserved = 0, 0
        """The first global index and the number of the rows that were reserved last, until the next put."""
        self._dropped: dict[str, int] = {}
        """Partition that was dropped -> the global index below which all its rows are."""
        self._names: dict[int, tuple[Schema, tuple[str, ...]]] = {}
        """The id of a schema -> the schema and the names of its fields."""
        self._observe_records()

    def _observe_records(self) -> None:
        """Observe records. Which ones depends on whether events are kept."""
        observe = self._clock.observe
        observe([r.ClientIntroduced], lambda record: self.lanes.introduce(record.client))
        observe([r.ClientForgotten], lambda record: self.lanes.forget(record.client))
        lost = [r.UnitLost, r.ExtentsLost]
        observe(lost, lambda record: self.change_times.note(self._state.changes, self._clock.now))
        observe([r.SamplesPut], self.note_put)
        observe([r.StateLoaded], lambda record: self._forget_times())
        if self.ring.capacity:
            observe([r.BlocksMoved], self.note_moved)
            observe([r.RowsCleared, r.RowsDropped], lambda record: self._note_removal(_CLEAR, record, record.rows))
            freed = [r.RowsFinished, r.LeaseAcked, r.PassedOver]
            observe(freed, lambda record: self._note_removal(_CLEAR, record, record.freed))
            observe([r.LeaseEnded, r.RankLeft], lambda record: self._note_removal(_RETURN, record, record.rows))
            observe([r.PartitionDropped], self._note_dropped)

    # ------------------------------------------------------------ puts

    def note_put(self, record: r.SamplesPut) -> None:
        """Note a put or a reservation, which was applied."""
        now, arrived = self._clock.now, self._clock.arrived
        if now >= self.change_times.due:
            self.change_times.note(self._state.changes, now)
        first, number, which = record.first_index, record.first_block, record.rows
        if number == 0 and which is None and record.tags is None:
            if record.count and not record.pre_allocated:
                self.reservation_times.note(first, now)
                self._reserved = first, record.count
            return
        if not self.ring.capacity:
            return
        reserved, self._reserved = self._reserved, (0, 0)
        schema, since = self._state.blocks.newest_schema, now if arrived is None else arrived
        is_new = which is None or (int.from_bytes(which[:8], "little"), len(which) // 8) == reserved
        flags = NEW_ROWS if is_new else 0
        for part in record.puts:
            if len(part.blocks) > 1:
                schemas = [self._state.blocks.shape_source(number + at)[0] for at in range(len(part.blocks))]
                schema = tuple(spec for each in schemas for spec in each[: MAX_NAMES + 1])
            about = record.partition, part, number
            self._notes.append((_PUT, now, since, flags, part.client, about, schema, first if which is None else which))
            first, number = first + part.count, number + len(part.blocks)
            if len(self._notes) >= MAX_NOTES or part.count > MANY_RECORDED:
                self.flush()

    def note_moved(self, record: r.BlocksMoved) -> None:
        """Note that blocks were moved. Repacked rows are in new blocks, which do not say when they were put."""
        self.flush()
        for repacked in record.repacked:
            self.block_times.note_copies(repacked.first_block)

    # ------------------------------------------------------------ claims

    def note_claim(
        self, client: str, claim: Claim, since: float, partition: Partition, which: bytes, positions: np.ndarray
    ) -> None:
        """Note that a claim was answered with rows. which: their global indexes. positions: -1 for cleared rows.

        The last row describes all of them: of rows in order, it is the one that was put last. The staleness is that of
        the oldest sample, because `max_staleness` limits that of every sample.
        """
        if not self.ring.capacity:
            return
        if self._ended:
            self._ended.discard((client, cut_text(claim.task)))
        now, newest = self._clock.now, None
        if self._lookups or now >= self._more_lookups:
            newest = self._newest_of_last(claim, partition, positions, now)
        self._notes.append((_CLAIM, now, since, AHEAD if claim.ahead else 0, client, claim, newest, which))
        if len(self._notes) >= MAX_NOTES or len(which) > 8 * MANY_ROWS or len(claim.fields) > LOOKED_AT:
            self.flush()

    def _newest_of_last(
        self, claim: Claim, partition: Partition, positions: np.ndarray, now: float
    ) -> tuple[int, Policy | None] | None:
        """Return the newest block of the last row of a claim, and the row's policy; None if the row was cleared."""
        if now >= self._more_lookups:
            self._lookups, self._more_lookups = LOOKUPS, now + LOOKUP_SECONDS
        self._lookups -= 1
        position = positions.item(-1) if len(positions) else -1
        chunk = partition.rows.chunks.get(position >> CHUNK_BITS) if position >= 0 else None
        if chunk is None:
            return None
        fields, columns_of, at, block = claim.fields, chunk.field, position & MASK, 0
        for name in fields[:LOOKED_AT]:
            columns = columns_of.get(name)
            if columns is not None:
                block = max(block, columns[0].item(at))
        if not partition.policy_version:
            return block, None
        oldest = _oldest_version(partition, positions)
        return block, (_oldest_block(chunk, fields, at), oldest, partition.policy_version)

    def note_end(self, client: str, claim: Claim, since: float) -> None:
        """Note that a claim was answered with the end of its partition."""
        if self.ring.capacity:
            self._note_claim(_END, client, claim, since, 0, 0)
            self._ended.add((client, cut_text(claim.task)))

    def on_wait_ended(self, waiting: ParkedRequest, met: bool) -> None:
        """See `CoreService.on_wait_ended`."""
        if not self.ring.capacity:
            return
        request, flags = waiting.request, 0 if met else TIMED_OUT
        if isinstance(request, Claim):
            self._note_claim(_WAIT, waiting.client, request, waiting.since, min(request.count, _U4), flags)
        elif isinstance(request, (Publish, Reserve)):
            rows = min(request.count, _U4)
            self._write(_HOLD, waiting.since, waiting.client, request.partition, rows, flags)
        elif isinstance(request, TakeGroupDemand):
            groups = min(request.most or 0, _U4)
            self._write(_HOLD, waiting.since, waiting.client, request.partition, groups, flags | DEMAND)

    def _note_claim(self, kind: int, client: str, claim: Claim, since: float, rows: int, flags: int) -> None:
        if claim.ahead:
            flags |= AHEAD
        self._notes.append((kind, self._clock.now, since, flags, client, claim, rows, None))
        if len(self._notes) >= MAX_NOTES or len(claim.fields) > LOOKED_AT:
            self.flush()

    # ------------------------------------------------------------ other events

    def note_ack(self, client: str, partition: str, task: str, which: bytes) -> None:
        """Note that rows of a lease of this task were acknowledged. which: their global indexes."""
        if self.ring.capacity:
            self._note_rows(_ACK, client, partition, task, which)

    def note_reads(self, client: str, reads: Sequence[ValueRead]) -> None:
        """Note the gets that a client reports. They are written if it claims, puts, or has said its task."""
        if not self.ring.capacity:
            return
        now = self._clock.now
        for each in reads:
            ago = max(each.ago, 0.0)
            self._notes.append((_READ, now, now - ago - max(each.seconds, 0.0), 0, client, each, ago, None))
        if len(self._notes) >= MAX_NOTES:
            self.flush()

    def note_policy(self, client: str, partition: str, before: int, version: int) -> None:
        """Note that the policy version of a partition was set. before: the former version."""
        if self.ring.capacity:
            self._write(_POLICY, self._clock.now, client, partition, min(version, _U4))
            self._policies.note(partition, before, version, self._state.next_block)

    def on_connected(self, client: str) -> None:
        """See `CoreService.on_connected`."""
        self.departed.pop(client, None)

    def on_client_left(self, client: str, announced: bool) -> list[Effect]:
        """See `CoreService.on_client_left`. It is noted in each lane of the client."""
        if not self.ring.capacity:
            return []
        self.flush()
        for lane, key in self.lanes.all_of(client).items():
            in_order = announced or key in self._ended
            self._ended.discard(key)
            self._append(_GONE, self._clock.now, CLOSED if in_order else 0, lane, "", 0)
            if not in_order:
                self.departed[client] = self._clock.now
        while len(self.departed) > MAX_DEPARTED:
            del self.departed[next(iter(self.departed))]
        return []

    def _note_removal(self, kind: int, record: Any, which: bytes) -> None:
        """Note rows that were cleared or returned: by the client of the record, or else of the current request."""
        if which:
            client = getattr(record, "client", self._clock.actor)
            self._note_rows(kind, client, record.partition, getattr(record, "task", None), which)

    def _note_rows(self, kind: int, client: str, partition: str, task: str | None, which: bytes) -> None:
        """Note what happened to rows. task: that of the lane. Default: the client's current lane."""
        now = self._clock.now
        self._notes.append((kind, now, now, 0, client, partition, task, which))
        if len(self._notes) >= MAX_NOTES or len(which) > 8 * MANY_ROWS:
            self.flush()

    def _note_dropped(self, record: r.PartitionDropped) -> None:
        """Note that a partition was dropped with the rows that were left."""
        name, end = record.partition, self._state.next_index
        if len(self._dropped) >= MAX_PARTITIONS:
            self._dropped.clear()
        first, self._dropped[name] = self._dropped.pop(name, 0), end
        self._write(_CLEAR, self._clock.now, self._clock.actor, name, 0, WHOLE, which=(first, end - 1))
        self._policies.forget(record.partition)

    def _forget_times(self) -> None:
        """Forget the times of blocks and versions, because a loaded state has others."""
        self.flush()
        self.block_times, self._policies = PublicationTimes(), PolicyHistory()
        self.change_times, self.reservation_times = PublicationTimes(), PublicationTimes()
        self.from_start = False
        self.known_since, self.rows.first = self._clock.now, self.ring.end

    # ------------------------------------------------------------ writing

    def _write(
        self, kind: int, since: float, client: str, partition: str, rows: int, flags: int = 0,
        which: tuple[int, int] = (1, 0),
    ) -> None:  # fmt: skip
        """Write a rare event. which: the first and the last global index of its rows; (1, 0): it has none."""
        self.flush()
        self._append(kind, since, flags, self.lanes.of_client(client), partition, rows, *which)

    def _append(
        self, kind: int, since: float, flags: int, lane: int, partition: str, rows: int, first: int = 1, last: int = 0
    ) -> None:
        number = self.partitions.of(partition)
        self.ring.append(self._clock.now, since, kind, flags, lane, number, rows, first, last, self.rows.end)

    def flush(self) -> None:
        """Write the events that were noted to the ring."""
        notes, self._notes = self._notes, []
        lanes, current, partitions, fields = (
            self.lanes.numbers, self.lanes.current, self.partitions.numbers, self.fields.numbers
        )  # fmt: skip
        ring, names_of, times = self.ring, self._names, self.block_times
        memory, capacity = ring.memory, ring.capacity
        listed = self.rows.end
        lists: list[bytes] = []
        for kind, time, since, flags, client, about, more, which in notes:
            nbytes, block, age, staleness = 0, 0, -1.0, -1
            if kind == _PUT:
                lane = current.get(client)
                if lane is None:
                    lane = self.lanes.of_client(client)
                names: tuple[str, ...] = ()
                partition, part, block = about
                rows = part.count
                if part.blocks:
                    known = names_of.get(id(more))
                    names = known[1] if known is not None and known[0] is more else self._names_of(more)
                    for each in part.blocks:
                        nbytes += each.nbytes
                    if time >= times.due:
                        times.note(block, time)
            elif kind == _READ:
                lane = current.get(client)
                if lane is None:
                    continue
                names, rows, nbytes, age = tuple(about.fields), min(about.rows, _U4), about.nbytes, more
                partition = about.partition
            elif kind > _PUT:
                lane = self.lanes.of_client(client) if more is None else self.lanes.of_task(client, more, -1)
                names, rows, partition = (), len(which) >> 3, about  # type: ignore[arg-type]
            else:
                task = about.task
                lane = lanes.get((client, task))
                if lane is None or lane != current.get(client):
                    lane = self.lanes.of_claim(client, task, about.sampling.get("dp_rank"))
                names, partition = tuple(about.fields), about.partition
                if kind != _CLAIM:
                    rows = more
                else:
                    rows = len(which) >> 3  # type: ignore[arg-type]
                    if more is not None and more[0]:
                        block, policy = more
                        age = time - (times.newest_time if block >= times.newest else times.time_of(block))
                        if not age >= 0:
                            age = -1.0
                        if policy is not None:
                            staleness = self._staleness(partition, *policy)
            place = partitions.get(partition)
            if place is None:
                place = self.partitions.of(partition)
            field = fields.get(names)
            if field is None:
                field = self.fields.of(names)
            end = ring.end
            first, last = (which, which + rows - 1) if isinstance(which, int) else (1, 0)
            _pack(
                memory, end % capacity * SIZE, time, since, kind, flags, 0, lane, place, field, rows, 0, nbytes,
                block, age, staleness, first, last, listed,
            )  # fmt: skip
            if isinstance(which, bytes):
                lists.append(which)
                listed += len(which) >> 3
            ring.end = end + 1
        if lists:
            self.rows.write(b"".join(lists))
        if ring.end >= self.tasks.due:
            for _ in self.tasks.count_events():
                pass

    def _names_of(self, schema: Schema) -> tuple[str, ...]:
        """Return the names of the fields of a schema, limited to the first ones."""
        if len(self._names) >= MAX_FIELDS:
            self._names.clear()
        names = tuple(spec.name for spec in schema[: MAX_NAMES + 1])
        self._names[id(schema)] = schema, names
        return names

    def _staleness(self, partition: str, oldest: int, version: Any, current: int) -> int:
        """Return by how many policy versions a row is old; -1 if it is not known.

        Args:
            partition: The partition.
            oldest: The block of the row that was put first.
            version: The row's tag entry with its policy version, if it has one.
            current: The policy version of the partition.
        """
        if type(version) is float and abs(version) < _I4:
            version = int(version)
        if type(version) is not int:
            known = not math.isnan(self.block_times.time_of(oldest))
            version = self._policies.version_at(partition, oldest) if known else None
        return -1 if version is None else min(max(current - version, 0), _I4)


def _oldest_version(partition: Partition, positions: np.ndarray) -> float | None:
    """Return the lowest policy version in the tags of these rows; None if no tag has one."""
    oldest_versions = []
    for _, chunk, at, _ in partition.rows.split(positions[positions >= 0]):
        numbers = chunk.numbers.get(POLICY_TAG)
        if numbers is not None:  # `max_staleness` and FreshnessSampler watch the tag
            known = numbers[at]
            known = known[~np.isnan(known)]
            if len(known):
                oldest_versions.append(float(known.min()))
        elif chunk.tags is not None:
            versions = chunk.tags.values(POLICY_TAG, at)
            oldest_versions += [float(version) for version in versions if isinstance(version, (int, float))]
    return min(oldest_versions, default=None)


def _oldest_block(chunk: Chunk, fields: Sequence[str], at: int) -> int:
    """Return the lowest block number of these fields of a row; 0 if it has no such field."""
    columns_of_fields = map(chunk.field.get, fields[:LOOKED_AT])
    return min(filter(None, [columns[0].item(at) for columns in columns_of_fields if columns is not None]), default=0)


# ------------------------------------------------------------ requests


@handles(Introduce)
def handle_introduce(context: Context, caller: Caller, request: Introduce) -> Decision:
    """Remember the task and rank of a client."""
    context.services[TimelineRecorder].flush()  # its earlier events are in its former lane
    known = context.state.introductions.get(caller.client) == request
    return Decision([] if known else [r.ClientIntroduced(caller.client, request)], Done)


@handles(Leave, reads=True)
def handle_leave(context: Context, caller: Caller, request: Leave) -> Done:
    """Remember until the last connection of the client ends that the client closes it."""
    if caller.client in context.connections.peers:
        context.connections.leaving.add(caller.client)
    return Done()


@handles(ReadTimeline, reads=True)
def handle_read_timeline(context: Context, caller: Caller, request: ReadTimeline) -> TimelineReply:
    """Return events from a position on. The reply has the names of all numbers in it that the reader does not know."""
    timeline, now = context.services[TimelineRecorder], context.now
    ring = timeline.ring
    timeline.flush()
    if request.boot != context.config.boot:
        request = ReadTimeline(seconds=request.seconds, most=request.most)
    if request.position is None:
        position = wanted = max(ring.position_at(now - request.seconds), ring.end - request.most if request.most else 0)
    else:
        wanted = min(request.position, ring.end)
        position = max(wanted, ring.first)
    waits = _open_waits(context) if position + MAX_EVENTS >= ring.end else []
    lanes, next_lane = timeline.lanes.since(request.lanes, MAX_NUMBERS)
    partitions, next_partition = timeline.partitions.since(request.partitions, MAX_NUMBERS)
    fields, next_fields = timeline.fields.since(request.fields, MAX_NUMBERS)
    events = _named_events(timeline, position, next_lane, next_partition, next_fields)
    end = position + len(events) // EVENT.itemsize
    caught_up = end == ring.end
    return TimelineReply(
        context.config.boot,
        now,
        timeline.wall,
        end,
        ring.end,
        position - wanted,
        events,
        list(lanes.values()),
        partitions,
        fields,
        [wait for wait in waits if wait.lane < next_lane] if caught_up else [],
        _connected(context) if caught_up else [],
        timeline.departed if caught_up else {},
    )


def _named_events(timeline: TimelineRecorder, position: int, lane: int, partition: int, fields: int) -> bytes:
    """Return the events from a position on, up to the first one with a lane, partition or fields from these numbers on.

    The reader gets the names of these numbers with one of its next requests.
    """
    events = timeline.ring.read(position, MAX_EVENTS)
    if (lane, partition, fields) == (timeline.lanes.next, timeline.partitions.next, timeline.fields.next):
        return events
    array = np.frombuffer(events, EVENT)
    unknown = np.zeros(len(array), bool)
    for name, number in (("lane", lane), ("partition", partition), ("fields", fields)):
        unknown |= array[name] >= number
    count = int(unknown.argmax()) if unknown.any() else len(array)
    return events[: count * EVENT.itemsize]


def _open_waits(context: Context) -> list[OpenWait]:
    """Return the claims and producers that wait, those that have waited longest first."""
    examined = islice(context.state.waiting.by_waiter.values(), MAX_EXAMINED)
    waits = map(context.services[TimelineRecorder].lanes.open_wait, examined)
    return list(islice(filter(None, waits), MAX_OPEN))


def _connected(context: Context) -> list[str]:
    peers = context.connections.peers
    return list(islice((client for client, connections in peers.items() if connections), MAX_CONNECTED))
