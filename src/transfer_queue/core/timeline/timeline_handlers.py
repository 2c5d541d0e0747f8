"""Handlers of the requests about the timeline."""

from __future__ import annotations

from itertools import islice

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.timeline.event_ring import cut_names, cut_text
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.reports.timeline import Introduce, Leave, OpenWait, ReadTimeline, TimelineReply
from transfer_queue.timeline.events import EVENT

MAX_EVENTS = 4_096
"""Events of a reply."""
MAX_NUMBERS = 2_048
"""Lanes, partitions and tuples of fields of a reply, each."""
MAX_OPEN = 1_024
"""Waits of a reply."""
MAX_EXAMINED = 8_192
"""Waiting requests among which these are found."""
MAX_CONNECTED = 16_384
"""Clients of a reply."""


@handles(Introduce)
def handle_introduce(context: Context, caller: Caller, request: Introduce) -> Decision:
    """Remember the task and rank of a client."""
    context.services[TimelineRecorder].flush()  # its earlier events are in its former lane
    known = context.state.introductions.get(caller.client) == request
    return Decision([] if known else [r.ClientIntroduced(caller.client, request)], Done)


@handles(Leave, reads=True)
def handle_leave(context: Context, caller: Caller, request: Leave) -> Done:
    """Remember until the last connection of the client ends that the client closes it."""
    context.connections.note_leaving(caller.client)
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
        position = asked = max(ring.position_at(now - request.seconds), ring.end - request.most if request.most else 0)
    else:
        asked = min(request.position, ring.end)
        position = max(asked, ring.first)
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
        position - asked,
        events,
        list(lanes.values()),
        partitions,
        fields,
        [wait for wait in waits if wait.lane < next_lane] if caught_up else [],
        _connected(context) if caught_up else [],
        timeline.gone if caught_up else {},
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
    found: list[OpenWait] = []
    lanes = context.services[TimelineRecorder].lanes
    for waiting in islice(context.state.waiting.by_waiter.values(), MAX_EXAMINED):
        request, client = waiting.request, waiting.client
        if len(found) == MAX_OPEN:
            break
        if isinstance(request, Claim):
            lane = lanes.of_task(client, request.task, request.sampling.get("dp_rank"))
            fields = list(cut_names(tuple(request.fields)))
            found.append(
                OpenWait(
                    lane, waiting.since, cut_text(request.partition), fields, request.count,
                    ahead=request.ahead > 0,
                )
            )  # fmt: skip
        elif isinstance(request, (Publish, Reserve)):
            lane = lanes.of_client(client)
            found.append(OpenWait(lane, waiting.since, cut_text(request.partition), [], request.count, holds=True))
        elif isinstance(request, TakeGroupDemand):
            lane, partition = lanes.of_client(client), cut_text(request.partition)
            found.append(OpenWait(lane, waiting.since, partition, [], request.most or 0, holds=True, demand=True))
    return found


def _connected(context: Context) -> list[str]:
    peers = context.connections.peers
    return list(islice((client for client, connections in peers.items() if connections), MAX_CONNECTED))
