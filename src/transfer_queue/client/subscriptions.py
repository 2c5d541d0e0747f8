"""Subscriptions: iterators over the events of repeated calls of `wait_for_change`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Union

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.change_events import PartitionChange, SampleChange, SampleLoss

OnLost = Union[Callable[[SampleLoss], object], None]


def _report_losses(change: PartitionChange, on_lost: OnLost) -> None:
    if on_lost is not None:
        for loss in change.lost:
            on_lost(loss)


class Subscriptions(GeneratedMethods):
    """The methods of a client that return iterators."""

    def subscribe(
        self,
        partition_id: str,
        where: Mapping[str, Any] | None = None,
        *,
        since: int | None = None,
        on_lost: Callable[[SampleLoss], object] | None = None,
    ) -> Iterator[SampleChange]:
        """Iterate over the changes of a partition's samples as they happen: `wait_for_change` again and again.

        The iterator starts with the existing samples, blocks until the next change, and ends when the partition is
        removed. It waits for a partition that does not exist yet. An event has the newest state: a slow reader gets
        only the last of several changes of a sample, and misses no sample.

        Args:
            partition_id: The partition.
            where: Tag entries that a sample must have, with equal values; see `wait_for_change`. Cleared samples are
                always reported. Default: every sample.
            since: The version of an event or of a `wait_for_change`, to start with the changes after it. Default: start
                with all samples.
            on_lost: A function that is called for each of these samples that lost values with their storage unit,
                before the event of this change. A producer that still has the values should put them again. Default:
                none.

        Returns:
            The iterator over the events.

        Raises:
            InvalidArgumentError: An argument is not valid.

        Example:
            >>> put = client.kv_put("a", "train_0", tag={"status": "done"})
            >>> events = client.subscribe("train_0", where={"status": "done"})
            >>> next(events).key
            'a'
        """
        arguments.check_partition_id(partition_id)
        arguments.validated_filter(where, allow_pickle=True)
        return self._events(partition_id, where, since, on_lost)

    def _events(
        self, partition_id: str, where: Mapping[str, Any] | None, since: int | None, on_lost: OnLost
    ) -> Iterator[SampleChange]:
        while True:
            change = self.wait_for_change(partition_id, since, where, timeout=arguments.LONGEST_TIMEOUT)
            _report_losses(change, on_lost)
            yield from change.events()
            if change.dropped:
                return
            since = change.version

    def async_subscribe(
        self,
        partition_id: str,
        where: Mapping[str, Any] | None = None,
        *,
        since: int | None = None,
        on_lost: Callable[[SampleLoss], object] | None = None,
    ) -> AsyncIterator[SampleChange]:
        """Iterate over the changes of a partition's samples with `async for`; see `subscribe`.

        Args:
            partition_id: See `subscribe`.
            where: See `subscribe`.
            since: See `subscribe`.
            on_lost: See `subscribe`.

        Returns:
            The asynchronous iterator over the events.

        Raises:
            InvalidArgumentError: An argument is not valid.

        Example:
            >>> put = client.kv_put("a", "train_0", tag={"status": "done"})
            >>> async for event in client.async_subscribe("train_0"):
            ...     print(event.key)
            ...     client.clear_partition("train_0")
            a
        """
        arguments.check_partition_id(partition_id)
        arguments.validated_filter(where, allow_pickle=True)
        return self._async_events(partition_id, where, since, on_lost)

    async def _async_events(
        self, partition_id: str, where: Mapping[str, Any] | None, since: int | None, on_lost: OnLost
    ) -> AsyncIterator[SampleChange]:
        while True:
            change = await self.async_wait_for_change(partition_id, since, where, timeout=arguments.LONGEST_TIMEOUT)
            _report_losses(change, on_lost)
            for event in change.events():
                yield event
            if change.dropped:
                return
            since = change.version
