"""Collects the replies of the controller into a bounded array of events, with the names that the events refer to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np

from transfer_queue.messages.reports.timeline import Lane, OpenWait, ReadTimeline, TimelineReply
from transfer_queue.timeline.events import CLOSED, EVENT, EventKind

SECONDS = 300.0  # how much time a recording keeps, by default
EVENTS = 1 << 18  # how many events a recording keeps, by default
NAMES = 1 << 16  # a table with more names forgets those that no event refers to
GAPS = 64
FIRST = 4096  # the event with the earliest beginning is searched among this many first events
FIELDS = 1024  # the number of fields whose producers a recording remembers

T = TypeVar("T")


@dataclass(frozen=True)
class Gap:
    """A time of which the recording has no events, or not all."""

    start: float
    """When it begins, in Unix seconds."""
    end: float
    """When it ends, in Unix seconds."""
    missed: int
    """The number of events that were lost; 0 if it is not known, as after a restart of the controller."""


class NameTable(Generic[T]):
    """Maps the numbers of one boot of the controller to positions in a table that survives a restart.

    Position 0 stands for everything that is not known.
    """

    def __init__(self, unknown: T) -> None:
        self.values: list[T] = [unknown]
        """The names, by position."""
        self._positions: dict[T, int] = {unknown: 0}
        self._learned: dict[int, int] = {}
        self.known = 0
        """The names of this boot below this number are known."""

    def __len__(self) -> int:
        return len(self.values)

    def learn(self, named: Iterable[tuple[int, T]]) -> None:
        """Add the names that a reply has, by the number that its boot uses."""
        for number, value in named:
            if not 0 <= number < 1 << 32:
                continue
            self._learned[number] = self._positions.setdefault(value, len(self.values))
            if self._learned[number] == len(self.values):
                self.values.append(value)
            self.known = max(self.known, number + 1)

    def position_of(self, number: int) -> int:
        """Return the position of a number; 0 for a number without a name."""
        return self._learned.get(number, 0)

    def positions_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the position of each number; 0 for a number without a name."""
        distinct, which = np.unique(numbers, return_inverse=True)
        return np.array([self.position_of(number) for number in distinct.tolist()], np.uint32)[which]

    def forget_boot(self) -> None:
        """Forget the numbers, which mean something else after a restart of the controller."""
        self._learned.clear()
        self.known = 0

    def keep(self, used: np.ndarray) -> np.ndarray:
        """Forget all names but those at the given positions. Returns the new position of each old one."""
        moved = np.zeros(len(self.values), np.uint32)
        kept = np.unique(np.append(used, 0))
        moved[kept] = np.arange(len(kept))
        self.values = [self.values[position] for position in kept.tolist()]
        self._positions = {value: position for position, value in enumerate(self.values)}
        self._learned = {number: int(moved[at]) for number, at in self._learned.items() if moved[at]}
        return moved


class Recording:
    """The events of the last seconds, with their names.

    Times are Unix seconds by the controller's clock. `lane`, `partition` and `fields` of an event are positions in the
    tables of the recording, which a restart of the controller does not change; 0 is what is not known.

    Args:
        seconds: How much time is kept, in seconds.
        limit: How many events are kept at most.

    Example:
        >>> recording = Recording(seconds=60)
        >>> recording.request()
        ReadTimeline(boot='', position=None, seconds=60.0, lanes=0, partitions=0, fields=0, most=262144)
    """

    def __init__(self, seconds: float = SECONDS, limit: int = EVENTS) -> None:
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be a positive number, got {seconds!r}.")
        if limit < 1:
            raise ValueError(f"limit must be a positive integer, got {limit!r}.")
        self.seconds = float(seconds)
        self.limit = limit
        self._lanes = NameTable(Lane(0, "", ""))
        self._partitions = NameTable("")
        self._fields: NameTable[tuple[str, ...]] = NameTable(())
        self._buffer = np.zeros(0, EVENT)
        self._begin = self._end = 0
        self._boot, self._position, self._wall = "", -1, 0.0
        self.now = 0.0
        """The time of the last reply."""
        self.start = 0.0
        """When the recording begins: with its first event or the oldest open wait, at most `seconds` ago."""
        self.from_boot = False
        """True if no event since the start of the controller is missing."""
        self.caught_up = False
        """True if the last reply had no more events behind it, so that `open` and `connected` are complete."""
        self.open: list[OpenWait] = []
        """The requests that waited at `now`. `since` is in Unix seconds, and `lane` a position in `lanes`."""
        self.connected: frozenset[str] = frozenset()
        """The clients that were connected at `now`; empty if this is not known."""
        self.departed: dict[str, float] = {}
        """Client that is gone -> when its last connection ended, in Unix seconds; empty if this is not known."""
        self.closed: set[str] = set()
        """The clients that closed in order; they will not connect again."""
        self.gaps: list[Gap] = []
        """The times of which events are missing."""
        self.producers: dict[str, dict[str, float]] = {}
        """Field -> task -> when the task put the field last, from events that are no longer kept."""

    @property
    def events(self) -> np.ndarray:
        """The events in order, as an array of `EVENT`."""
        return self._buffer[self._begin : self._end]

    @property
    def lanes(self) -> list[Lane]:
        """The lanes, by their position; their `number` means nothing here."""
        return self._lanes.values

    @property
    def partitions(self) -> list[str]:
        """The names of the partitions, by their position."""
        return self._partitions.values

    @property
    def fields(self) -> list[tuple[str, ...]]:
        """The tuples of fields, by their position."""
        return self._fields.values

    def request(self) -> ReadTimeline:
        """Return the request whose reply `add` takes next."""
        if self._position < 0:
            return ReadTimeline(seconds=self.seconds, most=self.limit)
        known = self._lanes.known, self._partitions.known, self._fields.known
        return ReadTimeline(self._boot, self._position, self.seconds, *known, self.limit)

    def add(self, reply: TimelineReply) -> None:
        """Add a reply. Events that cannot be true, such as those of the future, are made harmless or left out."""
        now, wall = float(reply.now), float(reply.wall)
        if not (math.isfinite(now) and math.isfinite(wall)) or max(abs(now), abs(wall)) > 1e15:
            return
        first = self._position < 0
        if first or reply.boot != self._boot:
            for table in (self._lanes, self._partitions, self._fields):
                table.forget_boot()
            self._wall = wall
        self._learn(reply)
        added = self._translated(reply.events, now)
        before = reply.position - len(reply.events) // EVENT.itemsize
        self.from_boot = (before <= 0 if first else self.from_boot and reply.boot == self._boot) and reply.missed <= 0
        if not first and (reply.boot != self._boot or reply.missed > 0):
            missed = reply.missed if reply.boot == self._boot else 0
            resumed = float(added["since"].min()) if len(added) else now + self._wall
            self.gaps = [*self.gaps, Gap(self.now, max(resumed, self.now), missed)][-GAPS:]
        self._boot, self._position = reply.boot, max(reply.position, 0)
        self.now = max(self.now, now + self._wall)
        self.caught_up = reply.position >= reply.end
        self._append(added)
        leaves = added["lane"][(added["kind"] == EventKind.GONE) & (added["flags"] & CLOSED != 0)]
        self.closed.update(self.lanes[lane].client for lane in leaves.tolist() if lane)
        self._trim()
        self.open = [self._opened(each) for each in reply.open] if self.caught_up else []
        self.connected = frozenset(reply.connected) if self.caught_up else frozenset()
        self.departed = {client: min(time + self._wall, self.now) for client, time in reply.departed.items()}
        begins = [self.now, *(each.since for each in self.open), *self.events["since"][:FIRST].tolist()]
        self.start = max(min(begins), self.now - self.seconds)
        if len(self.events) >= self.limit:  # the controller has older ones, which the open waits do not cover
            self.start = max(self.start, float(self.events["time"][0]))

    def _learn(self, reply: TimelineReply) -> None:
        self._lanes.learn(
            (each.number, Lane(0, each.client, each.task, each.rank, each.host, each.pid)) for each in reply.lanes
        )
        self._partitions.learn(reply.partitions.items())
        self._fields.learn((number, tuple(names)) for number, names in reply.fields.items())

    def _translated(self, data: bytes, now: float) -> np.ndarray:
        """Return the events with Unix times in order, and with positions instead of numbers."""
        events = np.frombuffer(data, EVENT, len(data) // EVENT.itemsize)
        events = np.array(events[np.isfinite(events["time"]) & np.isfinite(events["since"])])
        earliest = float(self.events["time"][-1]) if len(self.events) else -1e15
        times = np.clip(events["time"] + self._wall, earliest, max(now + self._wall, earliest))
        events["time"] = np.maximum.accumulate(times) if len(times) else times
        events["since"] = np.clip(events["since"] + self._wall, -1e15, events["time"])
        events["lane"] = self._lanes.positions_of(events["lane"])
        events["partition"] = self._partitions.positions_of(events["partition"])
        events["fields"] = self._fields.positions_of(events["fields"])
        events["age"] = np.where(np.isfinite(events["age"]), events["age"], -1)
        return events

    def _opened(self, wait: OpenWait) -> OpenWait:
        lane = self._lanes.position_of(wait.lane)
        since = wait.since + self._wall if math.isfinite(wait.since) else self.now
        return msgspec.structs.replace(wait, lane=lane, since=min(since, self.now))

    def _append(self, added: np.ndarray) -> None:
        added = added[-self.limit :]
        kept = self._end - self._begin
        if self._end + len(added) > len(self._buffer):
            larger = np.empty(min(max(1024, 2 * (kept + len(added))), 2 * self.limit + len(added)), EVENT)
            larger[:kept] = self.events
            self._buffer, self._begin, self._end = larger, 0, kept
        self._buffer[self._end : self._end + len(added)] = added
        self._end += len(added)

    def _trim(self) -> None:
        """Drop the events that are too old or too many, and the names that nothing refers to."""
        first = int(np.searchsorted(self.events["time"], self.now - self.seconds))
        first = max(first, len(self.events) - self.limit)
        self._remember(self.events[:first])
        self.from_boot &= first == 0
        self._begin += first
        self.gaps = [each for each in self.gaps if each.end >= self.now - self.seconds]
        for column, table in (("lane", self._lanes), ("partition", self._partitions), ("fields", self._fields)):
            if len(table) > NAMES:
                latest = np.arange(len(table) - NAMES // 4, len(table))
                moved = table.keep(np.append(np.unique(self.events[column]), latest))
                self.events[column] = moved[self.events[column]]
                self.closed.intersection_update(lane.client for lane in self.lanes)

    def _remember(self, dropped: np.ndarray) -> None:
        """Remember which task put which field, so that a stage that ended long ago still has a name."""
        puts = dropped[dropped["kind"] == EventKind.PUT]
        pairs, last = np.unique((puts["lane"].astype(np.int64) << 32 | puts["fields"])[::-1], return_index=True)
        for pair, at in zip(pairs.tolist(), last.tolist()):
            task, when = self.lanes[pair >> 32].task, float(puts["time"][len(puts) - 1 - at])
            for field in self.fields[pair & 0xFFFFFFFF]:
                if field in self.producers or len(self.producers) < FIELDS:
                    tasks = self.producers.setdefault(field, {})
                    if task in tasks or len(tasks) < FIELDS:
                        tasks[task] = when
