"""What is new in a partition since a version, and which tags somebody asks for.

Nothing is queued for those who ask: every row knows the version at which its tags or fields last changed, so the
answer is made of the state, and holds the newest state of each row once. Cleared rows have no state: so many of them
are remembered, the latest, and who asks about the time before is told that the answer is not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, counter, deque_of, map_of
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, Rows
from transfer_queue.messages.queries import ChangeReply, Watch

if TYPE_CHECKING:
    from transfer_queue.core.state.partition import Partition

MAX_CLEARED = 65536  # cleared rows of a partition that are remembered

Keys = list[Any]  # of str | None
Tag = dict[str, Any]
Match = Callable[[Tag], bool]
Cleared = tuple[int, bytes, Keys | None]  # version, i8 global indexes, their keys (None: none has one)

_ABSENT = object()


def matcher(where: Tag) -> Match:
    """Whether a tag has all entries of `where`, with equal values (see `same`)."""
    wanted = list(where.items())
    if not wanted:
        return lambda tag: True
    if len(wanted) == 1:
        name, value = wanted[0]
        return lambda tag: same(tag.get(name, _ABSENT), value)
    return lambda tag: all(same(tag.get(name, _ABSENT), value) for name, value in wanted)


def same(one: Any, other: Any) -> bool:
    """Whether two values of tags, as messages carry them, are equal.

    Numbers are by their value (1 is 1.0) and NaN is NaN, but True is not 1. What a server cannot see into is equal
    where its bytes are.
    """
    kind, kind_of_other = type(one), type(other)
    if kind is kind_of_other:
        if kind is list:
            return len(one) == len(other) and all(map(same, one, other))
        if kind is dict:
            return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    elif {kind, kind_of_other} != {int, float}:
        return False
    return bool(one == other or (one != one and other != other))


class Changes(Persisted):
    """When the rows of a partition last changed, and which were cleared.

    newest: chunk number -> the newest version in `Chunk.changed` (or one that was there), the most recent last.
    cleared: of those rows that had ever changed. count: how many they are. forgotten: no clear up to this version is
    to be found here for sure. made, sealed: the versions at which the partition was (0: it is not).
    """

    newest: dict[int, int] = map_of(Count, Count)
    cleared: deque[Cleared] = deque_of(Count, bytes, list[str | None] | None)
    forgotten: int = counter()
    made: int = counter()
    sealed: int = counter()

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.count = 0

    def mark(self, version: int, positions: np.ndarray) -> None:
        """These rows changed."""
        for key, chunk, at, _ in self.rows.split(positions):
            chunk.changed[at] = version
            self.news(version, key)

    def news(self, version: int, key: int) -> None:
        """Rows of a chunk changed, and say so."""
        self.newest.pop(key, None)
        self.newest[key] = version

    def clear(self, version: int, chunk: Chunk, at: np.ndarray) -> None:
        """These rows of a chunk end. Who never changed was told to nobody, and is no news now."""
        told = at[chunk.changed[at] > 0]
        chunk.changed[at] = 0
        if not len(told):
            return
        keys = None if chunk.keys is None else _some([chunk.keys[a] for a in told.tolist()])
        self.cleared.append((version, chunk.index[told].tobytes(), keys))
        self.count += len(told)
        while self.count > MAX_CLEARED:
            self.forgotten, indexes, _ = self.cleared.popleft()
            self.count -= len(indexes) // 8

    def forget_chunk(self, key: int) -> None:
        """The chunk is dropped."""
        self.newest.pop(key, None)

    def since(self, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the rows that changed after a version, and when; in order of change.

        Costs what is new: chunks without news are not looked at.
        """
        positions, versions = [np.zeros(0, "i8")], [np.zeros(0, "i8")]
        for key in reversed(self.newest):
            if self.newest[key] <= version:
                break
            changed = self.rows.chunks[key].changed
            at = np.flatnonzero(changed > version)
            positions.append(at + (key << CHUNK_BITS))
            versions.append(changed[at])
        when = np.concatenate(versions)
        where = np.concatenate(positions)
        order = np.lexsort((where, when))
        return where[order], when[order]

    def cleared_since(self, version: int) -> list[Cleared]:
        """Those clears after a version that are remembered, in order."""
        found = []
        for entry in reversed(self.cleared):
            if entry[0] <= version:
                break
            found.append(entry)
        return found[::-1]

    def restored(self) -> None:
        """Counts the cleared rows."""
        self.count = sum(len(indexes) // 8 for _, indexes, _ in self.cleared)

    def state(self, positions: np.ndarray) -> dict[str, object]:
        """For comparison after replay."""
        changed = np.zeros(len(positions), "i8")
        for _, chunk, at, where in self.rows.split(positions):
            changed[where] = chunk.changed[at]
        return {
            "changed": changed.tolist(),
            "newest": list(self.newest.items()),
            "cleared": list(self.cleared),
            "forgotten": self.forgotten,
            "made": self.made,
            "sealed": self.sealed,
        }


class News:
    """What is new in a partition (None: it does not exist) since a version; below 1 is the beginning of all.

    dropped: the partition of that version is no more; another one of its name may be there.
    """

    def __init__(self, partition: Partition | None, since: int) -> None:
        self.partition = partition
        self.since = max(since, 0)
        self.dropped = since >= 1 and (partition is None or since < partition.changes.made)
        if partition is None or self.dropped:
            return
        changes = partition.changes
        self.positions, self.versions = changes.since(self.since)
        self.tags = partition.tags_of(self.positions)
        self.cleared = changes.cleared_since(self.since)
        self.sealed = changes.sealed > self.since
        self.lost, self.lost_fields = partition.losses.since(self.since)
        self.complete = self.since >= changes.forgotten

    def answer(self, where: Tag, begins: bool) -> ChangeReply | None:
        """The answer to one who asks for rows with these tags, None where nothing is new to him.

        begins: he was told of no row yet, so that no clear is news to him.
        """
        if self.dropped:
            return ChangeReply(-1, changed=True, dropped=True)
        partition = self.partition
        if partition is None:
            return None
        chosen = self._chosen(where)
        cleared = [] if begins else self.cleared
        complete = begins or self.complete
        if not (len(chosen) or cleared or self.sealed) and complete:
            return None
        positions = self.positions[chosen]
        missed = np.isin(self.lost, positions)  # whose tags are wanted: a row that lost a value has changed
        return ChangeReply(
            partition.version,
            changed=True,
            rows=partition.rows.indexes_of(positions).tobytes(),
            versions=self.versions[chosen].tobytes(),
            keys=_some(partition.keys_of(positions)),
            tags=None if self.tags is None else [self.tags[i] for i in chosen.tolist()],
            cleared=b"".join(indexes for _, indexes, _ in cleared),
            cleared_versions=b"".join(_repeated(version, indexes) for version, indexes, _ in cleared),
            cleared_keys=_some([key for _, indexes, keys in cleared for key in keys or [None] * (len(indexes) // 8)]),
            sealed=partition.sealed,
            complete=complete,
            lost=partition.rows.indexes_of(self.lost[missed]).tobytes(),
            lost_keys=_some(partition.keys_of(self.lost[missed])),
            lost_fields={name: lost[missed].tobytes() for name, lost in self.lost_fields.items()},
        )

    def _chosen(self, where: Tag) -> np.ndarray:
        """Which of the rows have these tags."""
        if not where:
            return np.arange(len(self.positions))
        if self.tags is None:
            return np.zeros(0, "i8")
        matches = matcher(where)
        return np.array([i for i, tag in enumerate(self.tags) if matches(tag)], "i8")


def answer(partition: Partition | None, request: Watch) -> ChangeReply | None:
    """The answer to somebody who asks, None where nothing is new to him."""
    since = -1 if request.since is None else request.since
    return News(partition, since).answer(request.where, begins(request))


def begins(request: Watch) -> bool:
    """Whether one who asks knows of nothing yet."""
    return request.since is None or request.since < 1


def nothing(partition: Partition | None) -> ChangeReply:
    """The answer where nothing is new."""
    return ChangeReply(-1) if partition is None else ChangeReply(partition.version, sealed=partition.sealed)


def _some(keys: Keys) -> Keys | None:
    return None if keys.count(None) == len(keys) else keys


def _repeated(version: int, indexes: bytes) -> bytes:
    return np.full(len(indexes) // 8, version, "i8").tobytes()
