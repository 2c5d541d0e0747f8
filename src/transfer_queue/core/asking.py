"""How samplers are asked: what they see of a partition, what is checked of their answers, what becomes of their errors.

A built-in sampler is trusted. A user's sampler is asked through `sample`; rows that it was not offered fail its caller,
and nothing is dealt. One that raises fails its caller, too, with its traceback.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from transfer_queue.core.partition import Partition
from transfer_queue.core.ready import ReadySet
from transfer_queue.errors import InvalidArgumentError, SamplerError, TransferQueueError
from transfer_queue.sampler.base import BaseSampler, RankConsistentSampler, Share
from transfer_queue.sampler.tags import PartitionTags

SLACK = 64  # entries of a sampler that may be out of date


class PartitionView(PartitionTags):
    """A partition as samplers see it; read-only.

    group_size: members of a declared group, where known. policy_version: as `set_policy_version` said last, 0 at first.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.partition_id = partition.name
        self.group_size = partition.groups.size
        self.policy_version = partition.policy_version

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """{global index: tag} of those of these rows that live."""
        wanted = np.asarray(indexes, "i8")
        positions = self._partition.rows.positions_of(wanted)
        there = positions >= 0
        tags = self._partition.tags_of(positions[there])
        live = wanted[there].tolist()
        return {i: dict(tag) for i, tag in zip(live, tags, strict=True)} if tags is not None else {i: {} for i in live}

    def tags_of(self, rows: np.ndarray) -> list[dict[str, Any] | None]:
        """The tags of live rows (i8 global indexes), not copied: a tag that is set is another dict."""
        tags: list[dict[str, Any] | None] = [None] * len(rows)
        for _, chunk, at, where in self._partition.rows.split(self._partition.rows.positions_of(rows)):
            if chunk.tags is not None:
                first, last = int(at[0]), int(at[-1])
                if last - first == len(at) - 1 and (np.diff(at) == 1).all():
                    found: Sequence[dict[str, Any] | None] = chunk.tags[first : last + 1]
                else:
                    found = itemgetter(*at.tolist(), 0)(chunk.tags)[:-1]
                if isinstance(where, slice):
                    tags[where] = found
                else:
                    for place, tag in zip(where.tolist(), found, strict=True):
                        tags[place] = tag
        return tags


def dealt_together(
    sampler: RankConsistentSampler, partition: Partition, task: str, key: tuple[int, int], mine: Share
) -> dict[int, Share]:
    """The shares of the deal that a user's `sample` has just made, by dp_rank: its own, and those that its base cached.

    A sampler that deals to all ranks at once keeps the others' shares in `_states`; they are dealt with its own.
    """
    dealt = partition.dealt.get(task)
    shares = {key[0]: mine}
    for rank, batches in sampler._states.get(partition.name, {}).get(task, {}).items():
        if rank == key[0] or not isinstance(batches, dict) or key[1] not in batches:
            continue
        if dealt is None or key[1] not in dealt.issued.get(rank, ()):
            shares[rank] = sampler._share(batches[key[1]])
    return shares


def forget_gone(sampler: RankConsistentSampler, partition: Partition, task: str) -> None:
    """Drops from a user's sampler's `_states` what is no dealt batch any more, once that is most of it."""
    dealt = partition.dealt[task]
    kept = sampler._states.get(partition.name, {}).get(task, {})
    if sum(len(batches) for batches in kept.values()) > 2 * len(dealt.by_key) + SLACK:
        sampler.keep_only(partition.name, task, dealt.by_key)


def two(sampler: BaseSampler, outcome: Any) -> tuple[Any, Any]:
    """(sampled, consumed) of what a user's sampler gave. Raises SamplerError where it is no pair."""
    try:
        sampled, consumed = outcome
    except (TypeError, ValueError):
        raise SamplerError(
            f"{type(sampler).__name__}.sample must give (sampled, consumed), two lists of global indexes, and gave "
            f"{outcome!r:.200}; nothing was dealt"
        ) from None
    return sampled, consumed


def checked(
    partition: Partition, sampler: BaseSampler, ready: ReadySet | None, sampled: Any, consumed: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What a user's sampler gave, as columns: only rows that it was offered.

    ready None: the sampler said that it has dealt this batch before; then some of its rows may be cleared since.
    """
    try:
        rows = np.array([operator.index(row) for row in sampled], "i8")
        taken = np.array([operator.index(row) for row in consumed], "i8")
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplerError(
            f"{type(sampler).__name__}.sample must give (sampled, consumed), two lists of global indexes: {error}; "
            f"nothing was dealt"
        ) from None
    if ready is None:
        return rows, taken[partition.rows.positions_of(taken) >= 0]
    both = np.concatenate([rows, taken])
    positions = partition.rows.positions_of(both)
    strange = [row for row, p in zip(both.tolist(), positions.tolist(), strict=True) if p < 0 or p not in ready]
    if strange:
        raise SamplerError(
            f"{type(sampler).__name__} gave {len(strange)} rows that it was not offered, among them "
            f"{strange[:5]}; nothing was dealt"
        )
    return rows, taken


def asked(sampler: BaseSampler, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """What a function of the sampler gives. What it raises becomes an error of the tree, with its traceback."""
    try:
        return function(*arguments, **keywords)
    except TransferQueueError:
        raise
    except Exception as error:
        raise sampler_error(sampler, error) from None


def sampler_error(sampler: BaseSampler, error: Exception) -> TransferQueueError:
    """An error of a sampler as its caller gets it: a ValueError stays one."""
    kind = InvalidArgumentError if isinstance(error, ValueError) else SamplerError
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return kind(f"the sampler {type(sampler).__name__} raised {type(error).__name__}: {error}\n{told}")
