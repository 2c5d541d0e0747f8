"""Subscriptions: the loop over `wait_for_change`, as an iterator of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Union

from transfer_queue.client import arguments
from transfer_queue.client.changes import PartitionChange, SampleChange, SampleLoss
from transfer_queue.client.surface import Surface

ASK_SECONDS = 60.0  # after so long without news the server is asked anew: it keeps nothing for who has gone


OnLost = Union[Callable[[SampleLoss], object], None]


def _tell(change: PartitionChange, on_lost: OnLost) -> None:
    if on_lost is not None:
        for loss in change.lost:
            on_lost(loss)


class Subscriptions(Surface):
    """The methods of a client that are iterators."""

    def subscribe(
        self,
        partition_id: str,
        where: Mapping[str, Any] | None = None,
        *,
        since: int | None = None,
        on_lost: Callable[[SampleLoss], object] | None = None,
    ) -> Iterator[SampleChange]:
        """The changes of a partition's samples, as they happen; blocks for the next, and ends when it is dropped.

        It begins with the samples that are there, and waits for a partition that does not exist yet. An event tells the
        newest state: who takes events slowly is told of the last of several changes of a sample, and loses no sample.

        where: entries that a sample's tag must have, with equal values, to be told of; see `wait_for_change`. Cleared
        samples are told whatever their tag was. since: the version of an event, or of a `wait_for_change`; it begins
        with what changed after that.

        on_lost: called for each of these samples that lost values with their storage unit, before the event that it
        has changed; whoever can should put them again.
        """
        arguments.partition(partition_id)
        arguments.where(where, allow_pickle=True)
        return self._events(partition_id, where, since, on_lost)

    def _events(
        self, partition_id: str, where: Mapping[str, Any] | None, since: int | None, on_lost: OnLost
    ) -> Iterator[SampleChange]:
        while True:
            change = self.wait_for_change(partition_id, since, where, timeout=ASK_SECONDS)
            _tell(change, on_lost)
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
        """`subscribe` for `async for`."""
        arguments.partition(partition_id)
        arguments.where(where, allow_pickle=True)
        return self._async_events(partition_id, where, since, on_lost)

    async def _async_events(
        self, partition_id: str, where: Mapping[str, Any] | None, since: int | None, on_lost: OnLost
    ) -> AsyncIterator[SampleChange]:
        while True:
            change = await self.async_wait_for_change(partition_id, since, where, timeout=ASK_SECONDS)
            _tell(change, on_lost)
            for event in change.events():
                yield event
            if change.dropped:
                return
            since = change.version
