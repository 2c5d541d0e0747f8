"""The batches of one partition that were dealt and that no consumer has seen.

A claim without a rank-consistent key consumes its rows when it is answered. Its client holds them until it has handed
them over: until the call has returned, or until a loader has yielded the first item. If this never happens, the rows
become ready again, as if they had not been dealt. Tokens come from the counter of the leases, so a late notice names a
token that has ended.
"""

from __future__ import annotations

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, unique_dict, value_of


class UnseenBatch(msgspec.Struct, frozen=True):
    """The rows of one claim that were not handed over yet."""

    token: Count
    task: str
    client: str
    """The client that claimed the rows."""
    rows: bytes
    """Global indexes, i8, in the order in which they were dealt. Some may be cleared."""
    policy_version: int
    """The policy version of the partition when the rows were dealt."""

    @property
    def indexes(self) -> np.ndarray:
        """The rows as an array."""
        return np.frombuffer(self.rows, "<i8")


class UnseenBatches(Persisted, bare=True):
    """The batches of one partition that were not handed over, by token."""

    by_token: dict[int, UnseenBatch] = value_of(
        list[UnseenBatch],
        dict,
        lambda batches: msgspec.to_builtins(list(batches.values()), builtin_types=(bytes,)),
        lambda batches: unique_dict([(batch.token, batch) for batch in batches]),
    )
    """The batches by token, in the order in which they were dealt."""

    def of_client(self, client: str) -> list[UnseenBatch]:
        """Return the batches that a client holds."""
        return [batch for batch in self.by_token.values() if batch.client == client]

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset. Its tokens are fenced."""
        for token in [token for token, batch in self.by_token.items() if batch.task == task]:
            del self.by_token[token]
