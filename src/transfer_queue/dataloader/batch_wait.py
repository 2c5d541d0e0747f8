"""What a source of batches delivers, and the wait for it, which ends with the timeout of the dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transfer_queue.client.conversion.arguments import validated_seconds
from transfer_queue.dataloader.batch_fetcher import Batch, Fetcher
from transfer_queue.dataloader.steps import Steps
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease


class Delivery(NamedTuple):
    """What a source returns for a batch."""

    batch: Batch | None = None
    """The batch; None if nothing is ready yet, or if its data is not kept."""
    items: Sequence[Any] | None = None
    """The finished items of the batch; None if they are still to be cut."""
    ended: bool = False
    """True if there will be no further batch."""
    held: BatchMeta | None = None
    """The metadata of a batch whose samples must still be finished (`create_partition(free_when=...)`) or acknowledged.
    """
    unseen: tuple[BatchLease, ...] = ()
    """The leases of the batch that end when it is handed over."""
    meta: BatchMeta | None = None
    """The metadata of the batch, if there are finished items."""

    @property
    def is_empty(self) -> bool:
        """Whether no batch has come yet."""
        return self.batch is None and self.meta is None and not self.ended


def checked_timeout(timeout: float | None) -> float | None:
    """Return the timeout of a dataset. Raises InvalidArgumentError if it is not a positive number of seconds."""
    seconds = validated_seconds(timeout)
    if seconds is not None and seconds <= 0:
        raise InvalidArgumentError(
            f"timeout must be a positive number of seconds, or None for no limit, got {timeout!r}"
        )
    return seconds


def deliver_in_time(
    deliver: Callable[[float | None], Steps[Delivery]],
    timeout: float | None,
    position: Callable[[], tuple[str, int, int]],
    make_fetcher: Callable[[], Fetcher],
) -> Steps[Delivery]:
    """Wait until a source delivers something, and return it. Return nothing if the position has changed meanwhile.

    Args:
        deliver: Returns the steps of one delivery, which wait for at most these seconds; None for no limit.
        timeout: Seconds to wait for the batch; None for no limit.
        position: Returns the partition and the number of the batch, and how often the position was changed.
        make_fetcher: Returns the fetcher that finds out why no batch comes.

    Raises:
        WaitTimeoutError: No batch came for `timeout` seconds. The message says why, with the verdict.
    """
    place, left, deadline, fetcher = position(), timeout, math.inf, None
    if timeout is not None:
        fetcher = make_fetcher()
        deadline = fetcher.clock() + timeout
    found = yield from deliver(left)
    while found.is_empty and position() == place:
        if fetcher is not None:
            left = deadline - fetcher.clock()
            if left <= 0:
                reason = yield from fetcher.explain(*place[:2])
                raise WaitTimeoutError(f"Timeout: no batch came within {timeout:g} s. {reason}")
        found = yield from deliver(left)
    return found
