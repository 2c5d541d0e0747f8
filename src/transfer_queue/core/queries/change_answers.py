"""Answers the requests that wait for changes of a partition. Reads the state."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Union

import numpy as np

from transfer_queue.core.columns.tag_filter import matching_rows
from transfer_queue.core.context import Context
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.core.tables.change_feed import is_first_watch, keys_or_none
from transfer_queue.messages.queries import ChangeReply, Watch


@handles(Watch)
def handle_watch(context: Context, caller: Caller, request: Watch) -> Union[ChangeReply, list[Effect]]:
    """Reply with the changes since the caller's version, or park the request if there are none."""
    reply = watch_reply(context.state, request)
    if reply is None and request.wait is not None and request.wait > 0:
        context.parked.park(caller, request, request.wait)
        mark_seen(context.state, request.partition)
        return []
    return reply or empty_watch_reply(context.state, request)


def watch_reply(state: State, watch: Watch) -> ChangeReply | None:
    """Return the reply to a watch; None if nothing has changed since its version."""
    since = -1 if watch.since is None else watch.since
    return ChangeQuery(state.partitions.get(watch.partition), since).answer(watch.where, is_first_watch(watch))


def empty_watch_reply(state: State, watch: Watch) -> ChangeReply:
    """Return the reply that nothing has changed."""
    partition = state.partitions.get(watch.partition)
    return ChangeReply(-1) if partition is None else ChangeReply(partition.version, sealed=partition.sealed)


def mark_seen(state: State, name: str) -> None:
    """Note that all connected watches of a partition have been answered up to its present version."""
    watches = state.waiting.watches.get(name)
    if watches is not None:
        partition = state.partitions.get(name)
        watches.looked = -1 if partition is None else partition.version


def watch_replies(state: State, name: str, connected: Container[RequestKey]) -> list[tuple[RequestKey, ChangeReply]]:
    """Return the watches to answer after a change of a partition, with their replies.

    The changes are collected once, and matched once for all watches with the same conditions.
    """
    watches = state.waiting.watches.get(name)
    if watches is None:
        return []
    news = ChangeQuery(state.partitions.get(name), watches.looked)
    mark_seen(state, name)
    found = []
    for (_, beginning), group in watches.groups.items():
        waiters = [waiter for waiter in group if waiter in connected]
        reply = news.answer(group[waiters[0]].watch.where, beginning) if waiters else None
        if reply is not None:
            found += [(waiter, reply) for waiter in waiters]
    return found


class ChangeQuery:
    """The changes of a partition (None: it does not exist) since a version; a version below 1 means all changes."""

    def __init__(self, partition: Partition | None, since: int) -> None:
        self.partition = partition
        self.since = max(since, 0)
        self.dropped = since >= 1 and (partition is None or since < partition.changes.made)
        """Whether the partition of that version was dropped. A newer one of the same name may exist."""
        if partition is None or self.dropped:
            return
        changes = partition.changes
        self.positions, self.versions = changes.changed_since(self.since)
        self.cleared = changes.cleared_since(self.since)
        self.sealed = changes.sealed > self.since
        self.lost, self.lost_fields = partition.losses.lost_since(self.since)
        self.complete = self.since >= changes.forgotten

    def answer(self, where: dict[str, Any], begins: bool) -> ChangeReply | None:
        """Return the reply to a watch for rows with these tags; None if nothing has changed for it.

        begins: whether it has received no rows yet, so that cleared rows do not concern it.
        """
        if self.dropped:
            return ChangeReply(-1, changed=True, dropped=True)
        partition = self.partition
        if partition is None:
            return None
        chosen = self._matching_rows(where)
        cleared = [] if begins else self.cleared
        complete = begins or self.complete
        if not (len(chosen) or cleared or self.sealed) and complete:
            return None
        positions = self.positions[chosen]
        # a row that lost a value has changed, so its tags were matched above
        missed = np.isin(self.lost, positions) if len(self.lost) else np.zeros(0, bool)
        return ChangeReply(
            partition.version,
            changed=True,
            rows=partition.rows.indexes_of(positions).tobytes(),
            versions=self.versions[chosen].tobytes(),
            keys=keys_or_none(partition.keys_of(positions)),
            tags=partition.packed_tags_of(positions),
            cleared=b"".join(indexes for _, indexes, _ in cleared),
            cleared_versions=b"".join(_repeat_version(version, indexes) for version, indexes, _ in cleared),
            cleared_keys=keys_or_none(
                [key for _, indexes, keys in cleared for key in keys or [None] * (len(indexes) // 8)]
            ),
            sealed=partition.sealed,
            complete=complete,
            lost=partition.rows.indexes_of(self.lost[missed]).tobytes(),
            lost_keys=keys_or_none(partition.keys_of(self.lost[missed])),
            lost_fields={name: lost[missed].tobytes() for name, lost in self.lost_fields.items()},
        )

    def _matching_rows(self, where: dict[str, Any]) -> np.ndarray:
        """Return which of the changed rows have these tags."""
        if not where:
            return np.arange(len(self.positions))
        assert self.partition is not None
        fits = np.zeros(len(self.positions), bool)
        for _, chunk, at, places in self.partition.rows.split(self.positions):
            fits[places] = matching_rows(chunk.tags, where, at)
        return np.flatnonzero(fits)


def _repeat_version(version: int, indexes: bytes) -> bytes:
    return np.full(len(indexes) // 8, version, "i8").tobytes()
