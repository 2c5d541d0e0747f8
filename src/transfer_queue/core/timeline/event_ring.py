"""The ring of the newest timeline events, packed in memory that is allocated once, and the numbers in them.

Events name lanes, partitions and fields by numbers. The size of the tables of these numbers is bounded.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from transfer_queue.messages.reports.timeline import Introduce, Lane
from transfer_queue.timeline.events import EVENT, NO_FIELDS

PACKING = struct.Struct("<ddBBHIIIIIQQfiqqq")
"""How an event and its rows are packed together."""
SIZE = PACKING.size
"""The bytes of both."""
_ENTRY = np.dtype([("event", EVENT), ("first", "<i8"), ("last", "<i8"), ("before", "<i8")])
"""The event, and which rows it is about: see `EventRing.rows_of`."""

assert _ENTRY.itemsize == SIZE

_WIDE = 1 << 22


class EventRing:
    """The newest events. An event has a position; positions ascend from 0 and are never reused.

    Args:
        capacity: The number of events that the ring keeps; 0: it keeps none. The operating system provides the memory
            page by page when events are written.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.end = 0
        """The position behind all events."""
        column = np.empty(capacity * SIZE, "u1")
        self._entries = column.view(_ENTRY)
        self.memory = column.data
        """The bytes of the entries. An event is written at its position modulo `capacity`."""

    @property
    def first(self) -> int:
        """The position of the oldest event that the ring has."""
        return max(0, self.end - self.capacity)

    def append(
        self, time: float, since: float, kind: int, flags: int, lane: int, partition: int, rows: int,
        first: int = 1, last: int = 0, before: int = 0,
    ) -> None:  # fmt: skip
        """Write an event without fields over the oldest one. See `timeline.events.EVENT` and `rows_of`."""
        PACKING.pack_into(
            self.memory, self.end % self.capacity * SIZE,
            time, since, kind, flags, 0, lane, partition, NO_FIELDS, rows, 0, 0, 0, -1.0, -1, first, last, before,
        )  # fmt: skip
        self.end += 1

    def rows_of(self, position: int, count: int = 1) -> np.ndarray:
        """Return which rows events are about, from a position on, up to the end of the array at most.

        The columns "first" and "last" have the first and the last global index of an event with a range of rows,
        otherwise 1 and 0. "before" has the number of global indexes that were listed before those of the event.
        """
        start = position % self.capacity
        return self._entries[start : start + count]

    def numbers_in(self, column: str) -> set[int]:
        """Return the distinct numbers in a column of all events."""
        numbers = self._entries["event"][column][: self.end]
        if not len(numbers):
            return set()
        low, high = int(numbers.min()), int(numbers.max())
        if high - low > _WIDE:
            return set(np.unique(numbers).tolist())  # this takes ten times as long
        found = np.zeros(high - low + 1, bool)
        found[numbers - low] = True
        return set((np.flatnonzero(found) + low).tolist())

    def position_at(self, time: float) -> int:
        """Return the position of the first event at or after this time."""
        times = self._entries["event"]["time"]
        found = range(self.first, self.end)
        return self.first + bisect_left(found, time, key=lambda position: times[position % self.capacity])

    def read(self, position: int, count: int) -> bytes:
        """Return the events from a position on, at most `count`. The ring must have the first of them."""
        count = min(count, self.end - position)
        if count <= 0:
            return b""
        start = position % self.capacity
        some = self._entries["event"][start : start + count].tobytes()
        rest = start + count - self.capacity
        return some if rest <= 0 else some + self._entries["event"][:rest].tobytes()


MAX_LANES = 16_384
MAX_PARTITIONS = 4_096
MAX_FIELDS = 1_024
"""Tuples of fields."""
MAX_TEXT = 256
"""Characters of a name."""
MAX_NAMES = 256
"""Names of a tuple of fields."""
MAX_NAMES_TEXT = 8_192
"""Characters of all names of a tuple of fields."""
CUT = "..."
"""The end of a name that was cut, and the last name of a tuple of fields that was cut."""
OTHERS = "(others)"
"""The name of what has no number of its own, because its table was full."""

_LARGEST = (1 << 32) - 1

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class NumberTable(Generic[K, T]):
    """Values by number. Numbers ascend and are never reused.

    If the table is full, entries are removed that no event in the ring refers to. If events refer to all of them,
    all further keys share one number.

    Args:
        ring: The ring of events.
        column: The column of events that has the numbers.
        most: The number of entries.
        others: Returns the value of the number that further keys share.
    """

    def __init__(self, ring: EventRing, column: str, most: int, others: Callable[[int], T]) -> None:
        self.numbers: dict[K, int] = {}
        """Key -> its newest number."""
        self.values: dict[int, tuple[K | None, T]] = {}
        """Number -> (key, value), ascending. The key is None if the entry is never removed."""
        self.next = 0
        """The next number."""
        self._ring = ring
        self._column = column
        self._most = most
        self._make_others = others
        self._others: int | None = None
        self._prune_at = 0

    def add(self, key: K, make: Callable[[int], T]) -> int:
        """Return the number of a key, a new one if the table has none. `make` returns the value for a number."""
        found = self.numbers.get(key)
        return self.replace(key, make) if found is None else found

    def replace(self, key: K, make: Callable[[int], T]) -> int:
        """Return a new number of a key. The former one stays as long as events refer to it."""
        if (len(self.values) >= self._most and not self._prune()) or self.next > _LARGEST - 1:
            return self.others
        number = self.numbers[key] = self._enter(key, make(self.next))
        return number

    @property
    def others(self) -> int:
        """The number of the keys for which the table had no space."""
        if self._others is None:
            self._others = self._enter(None, self._make_others(self.next))
        return self._others

    def since(self, number: int, most: int) -> tuple[dict[int, T], int]:
        """Return the values from a number on, at most `most`, and the number behind the last one.

        This number is `next` if these are all values.
        """
        found: list[int] = []
        for known in reversed(self.values):
            if known < number:
                break
            found.append(known)
        found.reverse()
        return {known: self.values[known][1] for known in found[:most]}, found[most] if len(found) > most else self.next

    def _enter(self, key: K | None, value: T) -> int:
        number = self.next
        self.values[number] = key, value
        self.next += 1
        return number

    def _prune(self) -> bool:
        """Remove the entries that no event refers to. Returns whether there is space now.

        It reads the whole ring, so it does so again only after many events.
        """
        if self._ring.end < self._prune_at:
            return False
        used = self._ring.numbers_in(self._column)
        for number, (key, _) in list(self.values.items()):
            if number not in used and key is not None:
                del self.values[number]
                if self.numbers.get(key) == number:
                    self._forget(key)
        self._prune_at = self._ring.end + self._ring.capacity // 8
        return len(self.values) < self._most

    def _forget(self, key: K) -> None:
        del self.numbers[key]


class PartitionTable(NumberTable[str, str]):
    """The names of partitions. Number 0 is the empty name."""

    def __init__(self, ring: EventRing) -> None:
        super().__init__(ring, "partition", MAX_PARTITIONS, lambda number: OTHERS)
        self.numbers[""] = self._enter(None, "")

    def of(self, name: str) -> int:
        """Return the number of a partition."""
        name = cut_text(name)
        return self.add(name, lambda number: name)


class FieldTable(NumberTable[tuple[str, ...], list[str]]):
    """Tuples of fields. Number `timeline.events.NO_FIELDS` is the empty tuple."""

    def __init__(self, ring: EventRing) -> None:
        super().__init__(ring, "fields", MAX_FIELDS, lambda number: [CUT])
        self.numbers[()] = self._enter(None, [])

    def of(self, names: tuple[str, ...]) -> int:
        """Return the number of these fields."""
        key = cut_names(names)
        return self.add(key, lambda number: list(key))


LaneKey = tuple[str, str]  # client, task


class LaneTable(NumberTable[LaneKey, Lane]):
    """The lanes by (client, task). Numbers begin with 1."""

    def __init__(self, ring: EventRing, introductions: Mapping[str, Introduce]) -> None:
        """Make a lane for each introduced client of the state."""
        super().__init__(ring, "lane", MAX_LANES, lambda number: Lane(number, "", OTHERS))
        self.next = 1
        self._introductions = introductions
        self._tasks: dict[str, dict[str, None]] = {}
        """Client -> the tasks of its lanes."""
        self.current: dict[str, int] = {}
        """Client -> the lane of its puts: the one that it introduced itself with, or that of its last claim."""
        for client in introductions:
            self.introduce(client)

    def of_client(self, client: str) -> int:
        """Return the current lane of a client."""
        found = self.current.get(client)
        if found is None:
            said = self._introductions.get(client)
            found = self._follow(client, self._of(client, "" if said is None else said.task, -1))
        return found

    def of_task(self, client: str, task: str, rank: Any) -> int:
        """Return the lane of a client in a task. rank: the dp_rank of a claim, if it has one; any value."""
        return self._of(client, task, rank if type(rank) is int and 0 <= rank < 1 << 31 else -1)

    def of_claim(self, client: str, task: str, rank: Any) -> int:
        """Return the lane of a client that claims for a task. It becomes the current one of a client without a task."""
        found, said = self.of_task(client, task, rank), self._introductions.get(client)
        return found if said is not None and said.task else self._follow(client, found)

    def introduce(self, client: str) -> None:
        """Note that a client has introduced itself. Its lane gets a new number if it has changed.

        A client without a task has no lane before it claims or puts.
        """
        key = client, cut_text(self._introductions[client].task)
        found = self.numbers.get(key)
        if found is None and not key[1] and client not in self.current:
            return
        if found is None or self.values[found][1] != self._lane(found, key, -1):
            found = self.replace(key, lambda number: self._lane(number, key, -1))
        self._follow(client, found)

    def forget(self, client: str) -> None:
        """Note that the state has forgotten a client."""
        self.current.pop(client, None)

    def all_of(self, client: str) -> dict[int, LaneKey]:
        """Return the newest lanes of a client by number, at most 64."""
        return {self.numbers[client, task]: (client, task) for task in list(self._tasks.get(client, ()))[-64:]}

    def tasks_of(self, client: str) -> list[str]:
        """Return the tasks of the lanes of a client, without "" if it has others."""
        tasks = list(self._tasks.get(client, ()))
        return [task for task in tasks if task] or tasks

    def replace(self, key: LaneKey, make: Callable[[int], Lane]) -> int:
        """See `NumberTable`."""
        made = super().replace(key, make)
        if made != self._others:
            self._tasks.setdefault(key[0], {})[key[1]] = None
        return made

    def _of(self, client: str, task: str, rank: int) -> int:
        key = client, cut_text(task)
        return self.add(key, lambda number: self._lane(number, key, rank))

    def _lane(self, number: int, key: LaneKey, rank: int) -> Lane:
        """Return a lane, with the task and rank that its client has reported. `rank` is that of a claim."""
        client, task = key
        said = self._introductions.get(client)
        if said is None:
            return Lane(number, client, task, rank)
        if rank < 0 or task == cut_text(said.task):
            rank = said.rank
        return Lane(number, client, task, rank, cut_text(said.host), said.pid)

    def _follow(self, client: str, lane: int) -> int:
        if lane != self._others:
            self.current[client] = lane
        return lane

    def _forget(self, key: LaneKey) -> None:
        client, task = key
        number = self.numbers.pop(key)
        if self.current.get(client) == number:
            del self.current[client]
        del self._tasks[client][task]
        if not self._tasks[client]:
            del self._tasks[client]


def cut_text(text: str) -> str:
    """Return a name with at most `MAX_TEXT` characters."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + CUT


def cut_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of fields, cut to the limits of a tuple."""
    left, kept = MAX_NAMES_TEXT, []
    for name in names[:MAX_NAMES]:
        left -= len(name)
        if left < 0:
            break
        kept.append(cut_text(name))
    return tuple(kept) if len(kept) == len(names) else (*kept, CUT)
