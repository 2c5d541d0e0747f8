"""Subscriptions: the loop over `wait_for_change`, as an iterator of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from transfer_queue.client import arguments
from transfer_queue.client.changes import SampleChange
from transfer_queue.client.surface import Surface

ASK_SECONDS = 60.0  # after so long without news the server is asked anew: it keeps nothing for who has gone


class Subscriptions(Surface):
    """The methods of a client that are iterators."""

    def subscribe(
        self, partition_id: str, where: Mapping[str, Any] | None = None, *, since: int | None = None
    ) -> Iterator[SampleChange]:
        """The changes of a partition's samples, as they happen; blocks for the next, and ends when it is dropped.

        It begins with the samples that are there, and waits for a partition that does not exist yet. An event tells the
        newest state: who takes events slowly is told of the last of several changes of a sample, and loses no sample.

        where: entries that a sample's tag must have, with equal values, to be told of; see `wait_for_change`. Cleared
        samples are told whatever their tag was. since: the version of an event, or of a `wait_for_change`; it begins
        with what changed after that.
        """
        arguments.partition(partition_id)
        arguments.where(where, allow_pickle=True)
        return self._events(partition_id, where, since)

    def _events(self, partition_id: str, where: Mapping[str, Any] | None, since: int | None) -> Iterator[SampleChange]:
        while True:
            change = self.wait_for_change(partition_id, since, where, timeout=ASK_SECONDS)
            yield from change.events()
            if change.dropped:
                return
            since = change.version

    def async_subscribe(
        self, partition_id: str, where: Mapping[str, Any] | None = None, *, since: int | None = None
    ) -> AsyncIterator[SampleChange]:
        """`subscribe` for `async for`."""
        arguments.partition(partition_id)
        arguments.where(where, allow_pickle=True)
        return self._async_events(partition_id, where, since)

    async def _async_events(
        self, partition_id: str, where: Mapping[str, Any] | None, since: int | None
    ) -> AsyncIterator[SampleChange]:
        while True:
            change = await self.async_wait_for_change(partition_id, since, where, timeout=ASK_SECONDS)
            for event in change.events():
                yield event
            if change.dropped:
                return
            since = change.version
