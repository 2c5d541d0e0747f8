"""The ring of the newest timeline events, the numbers in them, and the rows that they are about.

Events are packed in memory that is allocated once. They name lanes, partitions and fields by numbers. The size of the
tables of these numbers is bounded.

Each event has either a range of global indexes, or a place in a second ring, of global indexes. That ring has four
entries for each event, so a history goes back as far as the events or these entries do. To look a row up means to
compare it with all entries. A page of them takes a fraction of a millisecond.

The times of publication, and the policy versions, are found by the numbers of blocks. Blocks are numbered in the order
of their publication, so a few checkpoints are enough. The same table contains the times at which rows changed or were
reserved, because the versions of partitions and the global indexes of rows ascend with time, too.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping
from itertools import takewhile
from typing import Any, Generic, TypeVar

import numpy as np

from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.reports.timeline import Introduce, Lane, OpenWait
from transfer_queue.timeline.events import EVENT, NO_FIELDS

PACKING = struct.Struct("<ddBBHIIIIIQQfiqqq")
"""How an event and its rows are packed together."""
SIZE = PACKING.size
"""The bytes of both."""
_ENTRY = np.dtype([("event", EVENT), ("first", "<i8"), ("last", "<i8"), ("before", "<i8")])
"""The event, and which rows it is about: see `EventRing.rows_of`."""

assert _ENTRY.itemsize == SIZE


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
        return set(np.unique(self._entries["event"][column][: self.end]).tolist())

    def position_at(self, time: float) -> int:
        """Return the position of the first event at or after this time."""
        times = self._entries["event"]["time"]
        positions = range(self.first, self.end)
        return self.first + bisect_left(positions, time, key=lambda position: times[position % self.capacity])

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
        number = self.numbers.get(key)
        return self.replace(key, make) if number is None else number

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
        newer = list(takewhile(lambda known: known >= number, reversed(self.values)))[::-1]
        return {known: self.values[known][1] for known in newer[:most]}, newer[most] if len(newer) > most else self.next

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
        lane = self.current.get(client)
        if lane is None:
            introduction = self._introductions.get(client)
            lane = self._follow(client, self._of(client, "" if introduction is None else introduction.task, -1))
        return lane

    def of_task(self, client: str, task: str, rank: Any) -> int:
        """Return the lane of a client in a task. rank: the dp_rank of a claim, if it has one; any value."""
        return self._of(client, task, rank if type(rank) is int and 0 <= rank < 1 << 31 else -1)

    def of_claim(self, client: str, task: str, rank: Any) -> int:
        """Return the lane of a client that claims for a task. It becomes the current one of a client without a task."""
        lane, introduction = self.of_task(client, task, rank), self._introductions.get(client)
        return lane if introduction is not None and introduction.task else self._follow(client, lane)

    def open_wait(self, waiting: ParkedRequest) -> OpenWait | None:
        """Return what readers get of a request that waits; None if no consumer or producer waits with it."""
        request, client = waiting.request, waiting.client
        if isinstance(request, Claim):
            lane = self.of_task(client, request.task, request.sampling.get("dp_rank"))
            fields = list(cut_names(tuple(request.fields)))
            where = cut_text(request.partition)
            return OpenWait(lane, waiting.since, where, fields, request.count, ahead=request.ahead > 0)
        if isinstance(request, (Publish, Reserve, TakeGroupDemand)):
            demand = isinstance(request, TakeGroupDemand)
            rows = (request.most or 0) if isinstance(request, TakeGroupDemand) else request.count
            lane, where = self.of_client(client), cut_text(request.partition)
            return OpenWait(lane, waiting.since, where, [], rows, holds=True, demand=demand)
        return None

    def introduce(self, client: str) -> None:
        """Note that a client has introduced itself. Its lane gets a new number if it has changed.

        A client without a task has no lane before it claims or puts.
        """
        key = client, cut_text(self._introductions[client].task)
        lane = self.numbers.get(key)
        if lane is None and not key[1] and client not in self.current:
            return
        if lane is None or self.values[lane][1] != self._lane(lane, key, -1):
            lane = self.replace(key, lambda number: self._lane(number, key, -1))
        self._follow(client, lane)

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
        introduction = self._introductions.get(client)
        if introduction is None:
            return Lane(number, client, task, rank)
        if rank < 0 or task == cut_text(introduction.task):
            rank = introduction.rank
        return Lane(number, client, task, rank, cut_text(introduction.host), introduction.pid)

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


ROWS_PER_EVENT = 4
"""Global indexes that are kept for each event of the ring."""
PAGE_EVENTS = 1 << 16
"""Events that one search examines."""
PAGE_ROWS = 1 << 18
"""Global indexes that one search examines."""


class RowHistory:
    """The rows of the newest events.

    Args:
        ring: The events. Each says how many global indexes had been listed here before its own.
    """

    def __init__(self, ring: EventRing) -> None:
        self._ring = ring
        self.capacity = ROWS_PER_EVENT * ring.capacity
        """The number of global indexes that are kept."""
        self._rows = np.empty(self.capacity, "<i8")
        self.end = 0
        """The number of global indexes that were written so far."""
        self.first = 0
        """Events before this position are about rows of another state, which may have had the same global indexes."""

    def write(self, rows: bytes) -> None:
        """List global indexes, event by event. Of more than `capacity`, the last are kept."""
        kept = np.frombuffer(rows, "<i8")[-self.capacity :]
        self.end += len(rows) >> 3
        start = (self.end - len(kept)) % self.capacity
        before, after = np.split(kept, [self.capacity - start])  # the second part is at the start of the ring
        self._rows[start : start + len(before)] = before
        self._rows[: len(after)] = after

    def find(self, row: int, before: int | None = None) -> tuple[list[int], int | None]:
        """Return the positions of some of the events of a row, ascending, and where to continue.

        Args:
            row: The global index.
            before: Only events before this position are examined. Default: the newest ones.

        Returns:
            The positions, and the position before which the next call continues; None if all events are examined.
        """
        ring = self._ring
        end = ring.end if before is None else min(before, ring.end)
        rows_end = self.end if end == ring.end else self._before(end)
        oldest = max(self.end - self.capacity, rows_end - PAGE_ROWS)
        # a page does not go beyond the end of the array
        first = max(ring.first, self.first)
        begin = max(first, end - PAGE_EVENTS, (end - 1) // ring.capacity * ring.capacity if end else 0)
        if begin >= end:
            return [], None
        begin += bisect_left(range(begin, end), oldest, key=self._before)
        if begin == end and rows_end > self.end - self.capacity:
            begin = end - 1  # an event with more rows than a page has
        page = ring.rows_of(begin, end - begin)
        positions = (np.flatnonzero((page["first"] <= row) & (row <= page["last"])) + begin).tolist()
        if begin < end:
            positions += self._listed(row, page["before"], begin, rows_end)
        kept = begin > first and self._before(begin) > self.end - self.capacity
        return sorted(set(positions)), begin if kept else None

    def listed(self, before: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of several events that have listed theirs, and the place of the event of each row.

        Rows that are no longer kept are left out.

        Args:
            before: The column "before" of the events (`EventRing.rows_of`).
            counts: The number of rows of each event.
        """
        counts = counts.astype("i8")
        event = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(len(event)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
        kept = at >= self.end - self.capacity
        return self._rows[at[kept] % self.capacity], event[kept]

    def reaches_start(self) -> bool:
        """Return whether no event and no row was lost so far."""
        return 0 < self._ring.end <= self._ring.capacity and self.end <= self.capacity and not self.first

    def _before(self, position: int) -> int:
        return int(self._ring.rows_of(position)["before"][0])

    def _listed(self, row: int, before: np.ndarray, begin: int, rows_end: int) -> list[int]:
        """Return the positions of the events from `begin` on whose listed rows contain a row."""
        low = max(int(before[0]), self.end - self.capacity)
        positions: list[int] = []
        while low < rows_end:
            start = low % self.capacity
            some = self._rows[start : start + rows_end - low]
            at = np.flatnonzero(some == row) + low
            positions += (before.searchsorted(at, "right") - 1 + begin).tolist()
            low += len(some)
        return positions


GRAIN = 0.001
"""Seconds for which the blocks that are published have one checkpoint."""
MAX_CHECKPOINTS = 16_384
MAX_VERSIONS = 1_024
"""Policy versions of one partition that are remembered."""
MAX_POLICIES = 1_024
"""Partitions whose policy versions are remembered."""

_UNKNOWN = math.nan
_LAST_BLOCK = (1 << 63) - 1


class PublicationTimes:
    """The times at which blocks were published. Those of old blocks are less exact."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        """The first block of each checkpoint, ascending."""
        self._times: list[float] = []
        """When it was published; NaN: these blocks are copies of older ones."""
        self.newest = 0
        """The first block of the newest checkpoint."""
        self.newest_time = _UNKNOWN
        """Its time."""
        self.due = -math.inf
        """From this time on a block needs a checkpoint of its own. Before, `note` has no effect."""

    def note(self, number: int, now: float) -> None:
        """Note that this block was published, and that later ones follow."""
        if now >= self.due:
            self._add(number, now)
            self.due = now + GRAIN

    def note_copies(self, number: int) -> None:
        """Note that the blocks from this one on are copies of older blocks, until the next one is published."""
        if not self._times or not math.isnan(self._times[-1]):
            self._add(number, _UNKNOWN)
        self.due = -math.inf

    def time_of(self, number: int) -> float:
        """Return when a block was published; NaN if it is not known."""
        at = bisect_right(self._numbers, number) - 1
        return self._times[at] if at >= 0 else _UNKNOWN

    @property
    def first(self) -> int:
        """The first number whose time is known. If no time is known, it is larger than every number."""
        return self._numbers[0] if self._numbers else _LAST_BLOCK

    def number_after(self, time: float) -> int:
        """Return the first number whose time is after this one. If no time is, returns a number above all others.

        For tables without copies.
        """
        at = bisect_right(self._times, time)
        return self._numbers[at] if at < len(self._numbers) else _LAST_BLOCK

    def _add(self, number: int, time: float) -> None:
        if len(self._numbers) >= MAX_CHECKPOINTS:
            self._thin()
        self._numbers.append(number)
        self._times.append(time)
        self.newest, self.newest_time = number, time

    def _thin(self) -> None:
        """Remove every second checkpoint of the older half, or all of it if most of its blocks are copies."""
        times, half = self._times, len(self._times) // 2
        kept = [at for at in range(half) if not at % 2 or math.isnan(times[at]) or math.isnan(times[at - 1])]
        if len(kept) > half * 3 // 4:
            kept = []
        self._numbers = [*(self._numbers[at] for at in kept), *self._numbers[half:]]
        self._times = [*(times[at] for at in kept), *times[half:]]


class PolicyHistory:
    """The policy version that each partition had when a block was published."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[int], list[int]]] = {}
        """Partition -> (the first block of each version, ascending, and the version)."""

    def note(self, partition: str, before: int, version: int, next_block: int) -> None:
        """Note a new version, and the one before it, which is 0 if none was set."""
        known = self._known.get(partition)
        if known is None:
            if len(self._known) >= MAX_POLICIES:
                del self._known[next(iter(self._known))]
            # versions never decrease: if it was 0 until now, it was 0 for all earlier blocks
            known = self._known[partition] = ([], []) if before else ([0], [0])
        blocks, versions = known
        blocks.append(next_block)
        versions.append(version)
        if len(blocks) > MAX_VERSIONS:
            del blocks[: MAX_VERSIONS // 2], versions[: MAX_VERSIONS // 2]

    def version_at(self, partition: str, block: int) -> int | None:
        """Return the version that the partition had when this block was published; None if it is not known."""
        known = self._known.get(partition)
        at = -1 if known is None else bisect_right(known[0], block) - 1
        return None if known is None or at < 0 else known[1][at]

    def forget(self, partition: str) -> None:
        """Forget a partition."""
        self._known.pop(partition, None)
