"""The sampler that deals what matters most first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.views import Key, Ranked, tagged
from transfer_queue.sampler.wrapper import SamplerWrapper


class PrioritySampler(SamplerWrapper):
    """Shows the ready samples to the sampler inside by falling priority, those of equal priority in order.

    tag: its value is the priority, a number; 0 where a sample has none. inner: any sampler; a SequentialSampler
    where None. The priority of a group is that of its highest member.
    aging: what a sample's priority gains with each sample inserted after it, not negative. As all age alike, the order
    is that of tag - aging * global index, and needs no clock: with aging 0.01 a sample waits for no more than 100
    newer ones that are higher by 1. Without aging a sample waits as long as higher ones come.
    """

    ranks_groups = True

    def __init__(self, tag: str = "priority", inner: BaseSampler | None = None, aging: float = 0.0) -> None:
        super().__init__(SequentialSampler() if inner is None else inner)
        if not isinstance(tag, str):
            raise InvalidArgumentError(f"tag must be the name of a tag, but is {tag!r}")
        if not isinstance(aging, (int, float)) or isinstance(aging, bool) or not 0 <= aging < math.inf:
            raise InvalidArgumentError(f"aging must be a finite number, not negative, but is {aging!r}")
        self.tag = tag
        self.aging = float(aging)

    @property
    def key(self) -> Key:
        """The priority, and the age."""
        return Key(self.tag, aging=self.aging)

    def view(self, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
        """The same rows by falling priority. Raises InvalidArgumentError for a tag that is no number."""
        return Ranked(tagged(ready_indexes, config.get("partition")), self.key)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """As the sampler inside; the order does not matter."""
        return self.inner.remainder(ready_indexes, **config)

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """As the sampler inside; the order does not matter."""
        return self.inner.passes_over(ready_indexes, **config)
