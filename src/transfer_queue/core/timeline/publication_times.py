"""When blocks were published, and under which policy version, found by the numbers of blocks.

Blocks are numbered in the order of their publication, so a few checkpoints are enough. The same table contains the
times at which rows changed or were reserved, because the versions of partitions and the global indexes of rows ascend
with time, too.
"""

from __future__ import annotations

import math
from bisect import bisect_right

GRAIN = 0.001
"""Seconds for which the blocks that are published have one checkpoint."""
MAX_CHECKPOINTS = 16_384
MAX_VERSIONS = 1_024
"""Policy versions of one partition that are remembered."""
MAX_PARTITIONS = 1_024
"""Partitions whose policy versions are remembered."""

_UNKNOWN = math.nan
_LARGEST = (1 << 63) - 1


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
        return self._numbers[0] if self._numbers else _LARGEST

    def number_after(self, time: float) -> int:
        """Return the first number whose time is after this one. If no time is, returns a number above all others.

        For tables without copies.
        """
        at = bisect_right(self._times, time)
        return self._numbers[at] if at < len(self._numbers) else _LARGEST

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
            if len(self._known) >= MAX_PARTITIONS:
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
