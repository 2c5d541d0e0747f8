"""Who of those who watch a partition is to be answered, and with what. Reads the state."""

from __future__ import annotations

from collections.abc import Container

from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import Waiter
from transfer_queue.core.tables import change_feed
from transfer_queue.messages.queries import ChangeReply, Watch


def answer(state: State, watch: Watch) -> ChangeReply | None:
    """The answer to one who asks, None where nothing is new to him."""
    return change_feed.answer(state.partitions.get(watch.partition), watch)


def nothing(state: State, watch: Watch) -> ChangeReply:
    """The answer where nothing is new."""
    return change_feed.nothing(state.partitions.get(watch.partition))


def looked(state: State, name: str) -> None:
    """Nothing is new to any of those who watch a partition and have a connection."""
    watches = state.waiting.watches.get(name)
    if watches is not None:
        partition = state.partitions.get(name)
        watches.looked = -1 if partition is None else partition.version


def told(state: State, name: str, connected: Container[Waiter]) -> list[tuple[Waiter, ChangeReply]]:
    """Who is to be answered after a change of a partition, and with what.

    What is new since the last time is found once, and matched once for all who wait for the same.
    """
    watches = state.waiting.watches.get(name)
    if watches is None:
        return []
    news = change_feed.News(state.partitions.get(name), watches.looked)
    looked(state, name)
    found = []
    for (_, begins), group in watches.groups.items():
        waiters = [waiter for waiter in group if waiter in connected]
        reply = news.answer(group[waiters[0]].watch.where, begins) if waiters else None
        if reply is not None:
            found += [(waiter, reply) for waiter in waiters]
    return found
