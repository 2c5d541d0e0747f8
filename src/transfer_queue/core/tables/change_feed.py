"""What is new in a partition since a version, and which tags somebody asks for.

Nothing is queued for those who ask: every row knows the version at which its tags or fields last changed, so the
answer is made of the state, and holds the newest state of each row once. Cleared rows have no state: so many of them
are remembered, the latest, and who asks about the time before is told that the answer is not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, counter, deque_of, map_of
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, RowTable
from transfer_queue.messages.queries import Watch

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


class ChangeFeed(Persisted):
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

    def __init__(self, rows: RowTable) -> None:
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
        keys = None if chunk.keys is None else known_keys([chunk.keys[a] for a in told.tolist()])
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


def begins(request: Watch) -> bool:
    """Whether one who asks knows of nothing yet."""
    return request.since is None or request.since < 1


def known_keys(keys: Keys) -> Keys | None:
    """Return the keys; None if no row has one."""
    return None if keys.count(None) == len(keys) else keys
