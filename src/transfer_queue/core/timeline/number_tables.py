"""Numbers for the lanes, partitions and fields that events name. The tables are bounded, whatever clients send."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from transfer_queue.core.timeline.event_ring import EventRing
from transfer_queue.messages.timeline import Introduce, Lane

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


class Entry(Generic[K, T]):
    """What one number means."""

    __slots__ = ("key", "number", "used", "value")

    def __init__(self, number: int, key: K | None, value: T) -> None:
        self.number = number
        self.key = key
        """What the entry is found by; None for an entry that stays for ever."""
        self.value = value
        self.used = -1
        """The position of the last event with this number; -1 if there is none. Who writes events sets it."""


class NumberTable(Generic[K, T]):
    """Entries by number. Numbers ascend and are never reused.

    If the table is full, entries are removed that no event in the ring refers to. If there are none, all further keys
    share one entry.
    """

    def __init__(self, ring: EventRing, most: int, others: Callable[[int], T]) -> None:
        self.by_key: dict[K, Entry[K, T]] = {}
        self.entries: dict[int, Entry[K, T]] = {}
        """Number -> entry, ascending."""
        self.next = 0
        """The next number."""
        self._ring = ring
        self._most = most
        self._make_others = others
        self._others: Entry[K, T] | None = None
        self._prune_at = 0

    def add(self, key: K, make: Callable[[int], T]) -> Entry[K, T]:
        """Return the entry of a key, a new one if the table has none. `make` returns the value for a number."""
        found = self.by_key.get(key)
        if found is not None:
            return found
        return self.replace(key, make)

    def replace(self, key: K, make: Callable[[int], T]) -> Entry[K, T]:
        """Return a new entry of a key, with a new number. The former one stays as long as events refer to it."""
        if (len(self.entries) >= self._most and not self._prune()) or self.next > _LARGEST - 1:
            return self.others
        made = self.by_key[key] = self.entries[self.next] = Entry(self.next, key, make(self.next))
        self.next += 1
        return made

    @property
    def others(self) -> Entry[K, T]:
        """The entry of the keys for which the table had no space."""
        if self._others is None:
            self._others = self._add_permanent(self._make_others(self.next))
        return self._others

    def _add_permanent(self, value: T) -> Entry[K, T]:
        made: Entry[K, T] = Entry(self.next, None, value)
        self.entries[self.next] = made
        self.next += 1
        return made

    def _prune(self) -> bool:
        """Remove the entries that no event refers to. Returns whether there is space now.

        It looks at all entries, so it does so again only after many events.
        """
        if self._ring.end < self._prune_at:
            return False
        first = self._ring.first
        for number, entry in list(self.entries.items()):
            if entry.used < first and entry.key is not None:
                del self.entries[number]
                if self.by_key.get(entry.key) is entry:
                    self._forget(entry.key)
        self._prune_at = self._ring.end + self._ring.capacity // 8
        return len(self.entries) < self._most

    def _forget(self, key: K) -> None:
        del self.by_key[key]

    def since(self, number: int, most: int) -> tuple[list[Entry[K, T]], int]:
        """Return the entries from a number on, at most `most`, and the number behind the last one.

        This number is `next` if these are all entries.
        """
        found: list[Entry[K, T]] = []
        for entry in reversed(self.entries.values()):
            if entry.number < number:
                break
            found.append(entry)
        found.reverse()
        return (found, self.next) if len(found) <= most else (found[:most], found[most].number)


class PartitionTable(NumberTable[str, str]):
    """The names of partitions. Number 0 is the empty name."""

    def __init__(self, ring: EventRing) -> None:
        super().__init__(ring, MAX_PARTITIONS, lambda number: OTHERS)
        self.none = self.by_key[""] = self._add_permanent("")

    def of(self, name: str) -> Entry[str, str]:
        """Return the entry of a partition."""
        name = cut_text(name)
        return self.add(name, lambda number: name)


class FieldTable(NumberTable[tuple[str, ...], list[str]]):
    """Tuples of fields. Number `timeline.events.NO_FIELDS` is the empty tuple."""

    def __init__(self, ring: EventRing) -> None:
        super().__init__(ring, MAX_FIELDS, lambda number: [CUT])
        self.none = self.by_key[()] = self._add_permanent([])

    def of(self, names: tuple[str, ...]) -> Entry[tuple[str, ...], list[str]]:
        """Return the entry of these fields."""
        key = cut_names(names)
        return self.add(key, lambda number: list(key))


LaneKey = tuple[str, str]  # client, task
LaneEntry = Entry[LaneKey, Lane]


class Introduced(Protocol):
    """What the state keeps about a client."""

    introduction: Introduce | None


class LaneTable(NumberTable[LaneKey, Lane]):
    """The lanes by (client, task)."""

    def __init__(self, ring: EventRing, clients: Mapping[str, Introduced]) -> None:
        """Make a lane for each introduced client. `clients` are those of the state."""
        super().__init__(ring, MAX_LANES, lambda number: Lane(number, "", OTHERS))
        self.next = 1
        self._clients = clients
        self._tasks: dict[str, dict[str, None]] = {}
        """Client -> the tasks of its lanes."""
        self.current: dict[str, LaneEntry] = {}
        """Client -> the lane of its puts: the one that it introduced itself with, or that of its last claim."""
        for client, kept in clients.items():
            if kept.introduction is not None:
                self.introduce(client)

    def of_client(self, client: str) -> LaneEntry:
        """Return the current lane of a client."""
        found = self.current.get(client)
        if found is None:
            said = self._introduction(client)
            found = self._enter(self._of(client, "" if said is None else said.task, -1), client)
        return found

    def of_task(self, client: str, task: str, sampling: Mapping[str, Any]) -> LaneEntry:
        """Return the lane of a client in a task. sampling: the sampling_config of a claim, which may have a rank."""
        rank = sampling.get("dp_rank")
        return self._of(client, task, rank if type(rank) is int and 0 <= rank < 1 << 31 else -1)

    def of_claim(self, client: str, task: str, sampling: Mapping[str, Any]) -> LaneEntry:
        """Return the lane of a client that claims for a task. It becomes the current one of a client without a task."""
        found, said = self.of_task(client, task, sampling), self._introduction(client)
        return found if said is not None and said.task else self._enter(found, client)

    def introduce(self, client: str) -> None:
        """Note that a client has introduced itself. Its lane gets a new number if it has changed."""
        said = self._introduction(client)
        assert said is not None
        key = client, cut_text(said.task)
        found = self.by_key.get(key)
        if found is None or found.value != self._lane(found.number, key, -1):
            found = self.replace(key, lambda number: self._lane(number, key, -1))
        self._enter(found, client)

    def forget(self, client: str) -> None:
        """Note that the state has forgotten a client."""
        self.current.pop(client, None)

    def all_of(self, client: str) -> list[LaneEntry]:
        """Return the newest lanes of a client, at most 64."""
        return [self.by_key[client, task] for task in list(self._tasks.get(client, ()))[-64:]]

    def replace(self, key: LaneKey, make: Callable[[int], Lane]) -> LaneEntry:
        """See `NumberTable`."""
        made = super().replace(key, make)
        if made.key is not None:
            self._tasks.setdefault(key[0], {})[key[1]] = None
        return made

    def _introduction(self, client: str) -> Introduce | None:
        kept = self._clients.get(client)
        return None if kept is None else kept.introduction

    def _of(self, client: str, task: str, rank: int) -> LaneEntry:
        key = client, cut_text(task)
        return self.add(key, lambda number: self._lane(number, key, rank))

    def _lane(self, number: int, key: LaneKey, rank: int) -> Lane:
        """Return a lane, with what its client has said of itself. `rank` is that of a claim."""
        client, task = key
        said = self._introduction(client)
        if said is None:
            return Lane(number, client, task, rank)
        if rank < 0 or task == cut_text(said.task):
            rank = said.rank
        return Lane(number, client, task, rank, cut_text(said.host), said.pid)

    def _enter(self, lane: LaneEntry, client: str) -> LaneEntry:
        if lane.key is not None:
            self.current[client] = lane
        return lane

    def _forget(self, key: LaneKey) -> None:
        client, task = key
        lane = self.by_key.pop(key)
        if self.current.get(client) is lane:
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
