"""Reads the timeline of a harness as a program would: in replies, with the names that it knows already."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from harness import Harness

from transfer_queue.messages.reports.timeline import Lane, ReadTimeline, TimelineReply
from transfer_queue.timeline.events import EVENT, EventKind


class Event(NamedTuple):
    """An event with the names of its numbers."""

    kind: EventKind
    time: float
    since: float
    client: str
    task: str
    partition: str
    fields: tuple[str, ...]
    rows: int
    flags: int


class Reader:
    """raw: the events as arrays. lanes, partitions, fields: by number. last: the last reply."""

    def __init__(self, h: Harness, **first: Any) -> None:
        self.h = h
        self.raw: list[np.ndarray] = []
        self.lanes: dict[int, Lane] = {}
        self.partitions: dict[int, str] = {}
        self.fields: dict[int, list[str]] = {}
        self.missed = 0
        self.last: TimelineReply | None = None
        self._first = first

    def read(self) -> list[Event]:
        """All events since the last call."""
        found: list[Event] = []
        while True:
            if self.last is None:
                request = ReadTimeline(**self._first)
            else:
                known = (max(table, default=-1) + 1 for table in (self.lanes, self.partitions, self.fields))
                request = ReadTimeline(self.last.boot, self.last.position, 0.0, *known)
            reply = self.last = self.h.look(request)
            assert isinstance(reply, TimelineReply)
            self.lanes |= {lane.number: lane for lane in reply.lanes}
            self.partitions |= reply.partitions
            self.fields |= reply.fields
            self.missed += reply.missed
            self.raw.append(np.frombuffer(reply.events, EVENT))
            found += [self._named(event) for event in self.raw[-1]]
            if reply.position == reply.end and (reply.open or not self.h.state.waiting.by_waiter or reply.connected):
                return found

    def _named(self, event: Any) -> Event:
        lane = self.lanes[int(event["lane"])]
        return Event(
            EventKind(int(event["kind"])), float(event["time"]), float(event["since"]), lane.client, lane.task,
            self.partitions[int(event["partition"])], tuple(self.fields[int(event["fields"])]), int(event["rows"]),
            int(event["flags"]),
        )  # fmt: skip


def kinds(events: list[Event]) -> list[str]:
    """The names of the kinds, in order."""
    return [event.kind.name.lower() for event in events]
