"""The view of a partition that samplers get, and the calls of built-in samplers.

`sampler.calls.sampler_calls` converts the errors of a user's sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transfer_queue.core.state.partition import Partition
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.tag_table import ABSENT
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.calls.sampler_calls import failure
from transfer_queue.sampler.numeric_tags import PartitionTags


class PartitionView(PartitionTags):
    """The read-only view of a partition for samplers.

    values: decodes a value of a message to the value that was put; None for samplers that read only numbers.
    """

    def __init__(self, partition: Partition, values: Callable[[Any], Any] | None = None) -> None:
        self._partition = partition
        self._values = values
        self.partition_id = partition.name
        self.group_size = partition.groups.size
        """The number of samples in a declared group; None if the partition does not declare it."""

    @property
    def policy_version(self) -> int:
        """The last version that `set_policy_version` has set; 0 at first."""
        return self._partition.policy_version

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return {global index: tag} for those of these rows that exist."""
        wanted = np.asarray(indexes, "i8")
        positions = self._partition.rows.positions_of(wanted)
        there = positions >= 0
        tags = self._partition.tags_of(positions[there])
        live = wanted[there].tolist()
        if tags is None:
            return {i: {} for i in live}
        values = dict if self._values is None else self._values
        return {i: values(tag) for i, tag in zip(live, tags, strict=True)}

    def entries_of(self, rows: np.ndarray, name: str) -> list[Any]:
        """See `PartitionTags`."""
        entries: list[Any] = [None] * len(rows)
        for _, chunk, at, where in self._partition.rows.split(self._partition.rows.positions_of(rows)):
            if chunk.tags is None:
                continue
            found = chunk.tags.values(name, at)
            for place, value in zip(np.arange(len(rows))[where].tolist(), found, strict=True):
                if value is not ABSENT:
                    entries[place] = value
        values = self._values
        return entries if values is None else [values(value) for value in entries]


def call_sampler(sampler: BaseSampler, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of a built-in sampler. Converts its exceptions to errors of the tree, with their tracebacks."""
    try:
        return function(*arguments, **keywords)
    except TransferQueueError:
        raise
    except Exception as error:
        raise failure(type(sampler).__name__, error) from None
