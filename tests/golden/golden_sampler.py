"""A user's sampler with a state of its own, in a module that its process imports without torch."""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler import BaseSampler


class Alternating(BaseSampler):
    """The first ready samples and the last ones by turns: what it deals depends on how often it has dealt."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        turn = self._states["turn"] = self._states.get("turn", 0) + 1
        ready = list(ready_indexes)
        chosen = ready[:batch_size] if turn % 2 else ready[-batch_size:]
        return chosen, chosen
