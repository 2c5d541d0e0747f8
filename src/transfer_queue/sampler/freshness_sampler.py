"""The sampler that deals nothing made by a policy too old."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import BaseSampler, Share, natural
from transfer_queue.sampler.views import Key, Without, tagged
from transfer_queue.sampler.wrapper import SamplerWrapper

LATE = "of a group of which others were passed over, consumed or cleared"


class FreshnessSampler(SamplerWrapper):
    """Drops samples of policies more than max_staleness versions old, and shows the others to the sampler inside.

    tag: its value is the version of the policy that made the sample, a number; a sample without it is never too old.
    The current version is that of the partition, or `policy_version` of the sampling_config where it is given.
    Where the sampler inside deals groups, a group goes as a whole when a ready member is too old: members that are
    not ready yet, too. Those that come later go when they are ready, under a reason of their own. What is dropped
    counts as consumed by the task; the controller counts it by reason (`passes_over`).
    """

    sampling_entries: Collection[str] = ("policy_version",)

    def __init__(self, inner: BaseSampler, max_staleness: int, tag: str = "policy_version") -> None:
        super().__init__(inner)
        if not isinstance(tag, str):
            raise InvalidArgumentError(f"tag must be the name of a tag, but is {tag!r}")
        bound = natural({"max_staleness": max_staleness}, "max_staleness")
        if bound is None:
            raise InvalidArgumentError("max_staleness must be an int, but is None")
        self.max_staleness = bound
        self.tag = tag

    @property
    def key(self) -> Key:
        """How old a policy is; one that is not known is the newest there can be."""
        return Key(self.tag, sign=-1.0, missing=-math.inf)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """As the sampler inside; raises InvalidArgumentError for a policy_version that is no int of 0 or more."""
        natural(sampling_config, "policy_version")
        super().validate(batch_size, sampling_config)

    def view(self, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
        """The rows that are not too old. Raises InvalidArgumentError for a tag that is no number."""
        old = self._too_old(ready_indexes, config)
        return Without(tagged(ready_indexes, config.get("partition")), old) if old else ready_indexes

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return the batch of the sampler inside. Samples that are too old are consumed together with it."""
        sampled, consumed = super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **kwargs)
        if not len(sampled):
            return sampled, consumed
        ready = set(ready_indexes)
        old = [row for row in self._too_old(ready_indexes, kwargs) if row in ready]
        return sampled, [*consumed, *old] if old else consumed

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """The rows that are too old, those of groups that lost others, and what the sampler inside passes over."""
        passed = dict(super().passes_over(ready_indexes, **config))
        old = self._too_old(ready_indexes, config)
        size = self._group_size()
        late = tagged(ready_indexes, config.get("partition")).orphans(size) if size is not None else []
        gone = set(old)
        for reason, rows in (
            (f"stale: more than {self.max_staleness} policy versions behind", old),
            (LATE, [row for row in late if row not in gone]),
        ):
            if rows:
                passed[reason] = sorted({*passed.get(reason, ()), *rows})
        return passed

    def _too_old(self, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> list[int]:
        partition = config.get("partition")
        current = natural(config, "policy_version")
        if current is None:
            said = getattr(partition, "policy_version", 0)
            current = said if isinstance(said, int) else 0  # a Mock returns another Mock
        key, bound = self.key, float(self.max_staleness - current)
        rows = tagged(ready_indexes, partition)
        size = self._group_size()
        return rows.above(key, bound) if size is None else rows.spoiled(key, bound, size)

    def _group_size(self) -> int | None:
        size = getattr(self, "n_samples_per_prompt", None)
        return size if isinstance(size, int) else None
