"""What a source of batches delivers, and the wait for it, which ends with the timeout of the dataset."""

from __future__ import annotations

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
    timeout: float,
    position: Callable[[], tuple[str, int, int]],
    fetcher: Fetcher,
) -> Steps[Delivery]:
    """Return what a source delivers. Nothing is delivered yet if the position has changed meanwhile.

    Args:
        deliver: Returns the steps of one delivery, which wait for at most these seconds.
        timeout: Seconds to wait for the batch.
        position: Returns the partition and the number of the batch, and how often the position was changed.
        fetcher: Finds out why no batch comes.

    Raises:
        WaitTimeoutError: No batch came for `timeout` seconds. The message says why, with the verdict.
    """
    place, deadline = position(), fetcher.clock() + timeout
    found = yield from deliver(timeout)
    while found.is_empty and position() == place:
        left = deadline - fetcher.clock()
        if left <= 0:
            reason = yield from fetcher.explain(*place[:2])
            raise WaitTimeoutError(f"Timeout: no batch came within {timeout:g} s. {reason}")
        found = yield from deliver(left)
    return found
